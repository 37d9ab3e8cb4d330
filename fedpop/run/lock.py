"""One process at a time in a folder, and a word to the others about who that is.

The lock is the operating system's, on the file ``.lock``: whoever dies lets go of it, so that nobody waits
for the dead. Where there is no such thing, the file itself counts for as long as its process is alive.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import writing

try:
    import fcntl
except ImportError:  # not a Unix
    _fcntl: ModuleType | None = None
else:
    _fcntl = fcntl


@contextmanager
def locked_folder(folder: Path | None) -> Iterator[None]:
    """The folder is this block's alone, or a CheckpointError says whose it is."""
    if folder is None:
        yield
        return
    path = folder / ".lock"
    handle = _taken(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is still locked: nobody can have another's file removed
        os.close(handle)


def _taken(path: Path) -> int:
    while True:
        with writing(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _free(handle, path):
                raise CheckpointError(_in_use(path))
            # The one before may have removed the file between our opening and our locking it.
            if _same(handle, path):
                _sign(handle, path)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _free(handle: int, path: Path) -> bool:
    """Whether the lock is ours now."""
    if _fcntl is not None:
        try:
            _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    holder = _holder(path)
    if not holder:
        return True
    return holder.get("host") == socket.gethostname() and not _alive(holder.get("pid"))


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _sign(handle: int, path: Path) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with writing(path):
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(owner).encode())


def _holder(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    except OSError:
        return True  # there, but somebody else's
    return True


def _in_use(path: Path) -> str:
    holder = _holder(path)
    who = "another process"
    if {"pid", "host", "since"} <= holder.keys():
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    return (
        f"{path.parent} is in use by {who}; wait for it or use another output folder (if that process is "
        f"gone for certain, delete {path})"
    )
