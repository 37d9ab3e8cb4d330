"""Decoded images in the user's cache, as memory-mapped bytes: decoding is done once, not at every start.

An entry is a folder named by the digest of its source files, and says itself what is in it: what does not fit
is decoded anew. A note by the files' paths, sizes and times spares the digest as long as nobody touched them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from fedpop.data.download import digest_of_file
from fedpop.data.formats.decoded import Decoded
from fedpop.errors import CheckpointError, DataError
from fedpop.files import cache_folder, read_json, write_bytes

CACHE_VERSION = 1
"""Of the entries' form."""
ABOUT = "about.json"
"""In an entry: how many images of which shape it has, and the digest of their labels."""
ABANDONED_AFTER = 86_400.0
"""Seconds after which a folder that is still being written is what a killed process left."""
_BROKEN = (OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, EOFError, SyntaxError)
"""What numpy raises on a file that is not its own, and TokenError."""


def known_digests(files: Sequence[Path]) -> tuple[str, ...]:
    """The digest of each file: a remembered one where it has not been touched since."""
    root = cache_folder()
    if root is None:
        return _digests(files)
    note = root / "images" / _note(files)
    remembered = _remembered(note, len(files))
    if remembered is not None:
        return remembered
    digests = _digests(files)
    with suppress(OSError, CheckpointError):  # it only spares time
        note.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(note, json.dumps(list(digests)).encode())
    return digests


def cached(
    label: str, digests: Sequence[str], shape: tuple[int, int, int], decode: Callable[[], Decoded]
) -> Decoded:
    """Images of this shape from files with these digests: from the cache, or decoded and put there.

    Without a cache folder that can be written to they are decoded every time.
    """
    root = cache_folder()
    if root is None:
        return _in_memory(decode())
    name = hashlib.sha256("\n".join((str(CACHE_VERSION), label, *digests)).encode()).hexdigest()[:16]
    entry = root / "images" / f"{label}-{name}"
    found = _opened(entry, shape)
    if found is not None:
        return found
    decoded = decode()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _tidy(entry.parent)
        _write(entry, decoded)
    except OSError:
        return _in_memory(decoded)
    return _opened(entry, shape) or _in_memory(decoded)


def _in_memory(decoded: Decoded) -> Decoded:
    """As an entry would be: in the order of its axes, and with memory that may be written to."""
    return Decoded(np.require(decoded.images, requirements=["C", "W"]), decoded.labels)


def _digests(files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(digest_of_file(file) for file in files)


def _note(files: Sequence[Path]) -> str:
    versions = []
    for file in files:
        try:
            seen = file.stat()
            versions.append((str(file.resolve()), seen.st_size, seen.st_mtime_ns))
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    return f"seen-{hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:16]}.json"


def _remembered(note: Path, count: int) -> tuple[str, ...] | None:
    try:
        digests = read_json(note)
    except CheckpointError:
        return None
    known = isinstance(digests, list) and len(digests) == count and all(isinstance(d, str) for d in digests)
    return tuple(digests) if known else None


def _about(decoded: Decoded) -> dict[str, Any]:
    labels = np.ascontiguousarray(decoded.labels, dtype="<i8")
    return {"images": list(decoded.images.shape), "labels": hashlib.sha256(labels.tobytes()).hexdigest()}


def _opened(entry: Path, shape: tuple[int, ...]) -> Decoded | None:
    """An entry, its images mapped and not read; None if it is not there, or not what was written."""
    try:
        about = read_json(entry / ABOUT)
        # Copy on write: torch wants memory that may be written to, and nobody writes to the file.
        images = np.lib.format.open_memmap(entry / "images.npy", mode="c")
        with (entry / "labels.npy").open("rb") as file:
            labels = np.lib.format.read_array(file, allow_pickle=False)
    except (*_BROKEN, TokenError, CheckpointError):
        return None
    whole = images.dtype == np.uint8 and images.shape[1:] == shape and images.flags.c_contiguous
    if not whole or labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        return None
    found = Decoded(images, labels)
    return found if about == _about(found) else None


def _write(entry: Path, decoded: Decoded) -> None:
    """The whole folder under a name of its own first, so that two processes at once leave one whole entry."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        for name, array in (("images", decoded.images), ("labels", decoded.labels)):
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        (temporary / ABOUT).write_text(json.dumps(_about(decoded)))
        temporary.chmod(0o755)
        if entry.is_dir() and _opened(entry, decoded.images.shape[1:]) is None:
            shutil.rmtree(entry)  # what is left of a broken one
        elif entry.is_file():
            entry.unlink()
        with suppress(OSError):  # another process was faster
            os.replace(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what processes that were killed have left half-written."""
    for path in folder.glob(".*"):
        with suppress(OSError):
            if path.is_dir() and path.stat().st_mtime < time.time() - ABANDONED_AFTER:
                shutil.rmtree(path, ignore_errors=True)
