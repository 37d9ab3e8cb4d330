"""Decoded images kept as bytes in the user's cache, memory-mapped: decoding is done once, not at every start.

An entry is a folder named by the digest of its source files. A note by their paths, sizes and times spares
the digest as long as nobody touched them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedpop.data.download import digest_of
from fedpop.data.formats.decoded import Decoded
from fedpop.errors import CheckpointError
from fedpop.files import cache_folder, read_json, write_bytes

VERSION = 1
"""Of the entries' form."""


def cached(label: str, files: Sequence[Path], decode: Callable[[Sequence[str]], Decoded]) -> Decoded:
    """The images of these files: from the cache, or decoded (given the files' digests) and put there.

    Without a cache folder that can be written to they are decoded every time.
    """
    root = cache_folder()
    if root is None:
        return _in_memory(decode(_digests(files)))
    folder, note = root / "images", _note(files)
    digests = _remembered(folder / note, len(files)) or _digests(files)
    name = hashlib.sha256("\n".join((str(VERSION), label, *digests)).encode()).hexdigest()[:16]
    entry = folder / f"{label}-{name}"
    found = _opened(entry)
    if found is None:
        found = decode(digests)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(entry, found)
        except OSError:
            return _in_memory(found)
        found = _opened(entry) or _in_memory(found)
    with suppress(OSError):
        if not (folder / note).exists():
            write_bytes(folder / note, json.dumps(list(digests)).encode())
    return found


def _in_memory(decoded: Decoded) -> Decoded:
    """As an entry would be: in the order of its axes, and with memory that may be written to."""
    return Decoded(np.require(decoded.images, requirements=["C", "W"]), decoded.labels)


def _digests(files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(digest_of(file) for file in files)


def _note(files: Sequence[Path]) -> str:
    told = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return f"seen-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]}.json"


def _remembered(note: Path, count: int) -> tuple[str, ...] | None:
    try:
        held = read_json(note)
    except CheckpointError:
        return None
    known = isinstance(held, list) and len(held) == count and all(isinstance(d, str) for d in held)
    return tuple(held) if known else None


def _opened(entry: Path) -> Decoded | None:
    """An entry, mapped and not read; None if it is not there or not whole."""
    try:
        # Copy on write: torch wants memory that may be written to, and nobody writes to the file.
        images = np.load(entry / "images.npy", mmap_mode="c", allow_pickle=False)
        labels = np.load(entry / "labels.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = images.ndim == 4 and images.dtype == np.uint8 and labels.dtype == np.int64
    return Decoded(images, labels) if whole and labels.shape == images.shape[:1] else None


def _write(entry: Path, decoded: Decoded) -> None:
    """The whole folder under a name of its own first, so that two processes at once leave one whole entry."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        for name, array in (("images", decoded.images), ("labels", decoded.labels)):
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        temporary.chmod(0o755)
        if entry.exists() and _opened(entry) is None:
            shutil.rmtree(entry)  # what is left of a broken one
        with suppress(OSError):  # another process was faster
            os.replace(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
