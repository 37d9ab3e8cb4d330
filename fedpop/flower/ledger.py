"""A site's ledger: what left it, one line for each reply, in a file that only ever grows.

Each line has the digest of the line before it, so that whoever changes, removes or inserts one breaks all
that follow; lines cut off at the end are found by whoever noted the last digest. A line is on the disk before
its reply leaves. What a crash left of a line stays in the file: the next line has its digest, and goes on
from the last whole one.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any, BinaryIO

from fedpop.errors import CheckpointError
from fedpop.files import append, digest_of_bytes, writing

LEDGER = "ledger.jsonl"
NOTHING = "0" * 64
"""What the first line has in the place of the digest of the one before it."""
EDITED = "was edited: its digest does not match"
TAIL_BYTES = 2**16
"""How much of the file's end is read at a time, in search of its last line."""


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Ledger:
    """The file, in a site's folder."""

    path: Path

    @classmethod
    def of(cls, folder: Path) -> Ledger:
        return cls(folder / LEDGER)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Write a line and wait until it is on the disk."""
        with self._opened() as file:
            last, rest = self._end(file)
            links = {"n": 1, "before": NOTHING}
            if last is not None:
                links = {"n": last["n"] + 1, "before": last["hash"]}
            if rest.strip():
                links["torn"] = digest_of_bytes(rest)
            plain = links | {"time": now()} | dict(entry)
            line = json.dumps(plain | {"hash": _hash(plain)}) + "\n"
            append(file, _newline_first(file) + line.encode(), self.path)
            with writing(self.path):
                os.fsync(file.fileno())

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        fresh = not self.path.exists()
        with writing(self.path):
            # Several processes may answer for a site, one after the other.
            file = open(  # noqa: SIM115
                self.path, "ab+", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)
            )
        with file:
            flock(file, LOCK_EX)
            if fresh:
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            yield file

    def read(self) -> Iterator[dict[str, Any]]:
        """Entries, each checked against the one before it; a CheckpointError names the first line that is not
        what was written. An unfinished last line is no entry: its reply did not leave."""
        before, n, torn, begun = NOTHING, 1, b"", 0
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                plain = _parsed(line)
                if plain is None:  # what a crash left, if the next entry says so
                    begun, torn = begun or number, torn + line
                    continue
                if plain["hash"] != _hash(plain):
                    raise self._broken(number, EDITED)
                if plain.get("torn") != (digest_of_bytes(torn) if torn.strip() else None):
                    raise self._broken(
                        begun or number, "it is no entry, and the next one does not know of it"
                    )
                if (plain["n"], plain["before"]) != (n, before):
                    raise self._broken(
                        number, "it does not follow the entry before it: some were moved or removed"
                    )
                before, n, torn, begun = plain["hash"], n + 1, b"", 0
                yield plain

    def _end(self, file: BinaryIO) -> tuple[dict[str, Any] | None, bytes]:
        """The last entry, and what crashes left after it, as it will stand once that line is ended."""
        size, span = file.seek(0, os.SEEK_END), TAIL_BYTES
        while True:
            start = max(0, size - span)
            file.seek(start)
            lines = file.read(size - start).removesuffix(b"\n").split(b"\n")
            for i in reversed(range(1 if start else 0, len(lines))):
                if (plain := _parsed(lines[i])) is not None:
                    if plain["hash"] != _hash(plain):
                        raise CheckpointError(
                            f"the last line of {self.path} {EDITED}; move the file elsewhere as it is, and a "
                            "new one begins"
                        )
                    return plain, b"".join(line + b"\n" for line in lines[i + 1 :])
            if not start:
                return None, b"".join(line + b"\n" for line in lines)
            span *= 2  # a line that is longer than this

    def _broken(self, number: int, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}, line {number}: {why}")


def _newline_first(file: BinaryIO) -> bytes:
    """What ends the file's last line, where a crash left it without an end."""
    if not file.seek(0, os.SEEK_END):
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _hash(plain: Mapping[str, Any]) -> str:
    """Of all of an entry but its own digest."""
    return digest_of_bytes(
        json.dumps({k: v for k, v in plain.items() if k != "hash"}, sort_keys=True).encode()
    )


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line's values; None where it is no entry."""
    try:
        plain = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(plain, dict) and isinstance(plain.get("n"), int)
    return plain if whole and all(isinstance(plain.get(k), str) for k in ("before", "hash", "time")) else None
