"""``metrics.jsonl``: a line of numbers for each round, as far as they are known to be whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedpop.errors import CheckpointError
from fedpop.files import append, json_lines, writing


class Metrics:
    """The file, how much of it counts, and the digest of that much."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.size = 0
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def read(self, size: int, digest: str) -> list[dict[str, Any]]:
        """The lines that a checkpoint counts, which must be those that were written."""
        try:
            lines = self.path.read_bytes()[:size]
        except OSError:
            lines = b""
        wrong = "is missing or shorter than its checkpoint says" if len(lines) < size else ""
        self._digest.update(lines)
        if not wrong and self.digest != digest:
            wrong = "was edited: its lines are not those that the checkpoint counts"
        if wrong:
            raise CheckpointError(
                f"cannot resume: {self.path} {wrong}; put it back, or use another output folder"
            )
        self.size = size
        return json_lines(lines, self.path)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Ready for more lines; those of rounds that are run again go."""
        with writing(self.path):
            if self.size == 0:
                self.path.write_bytes(b"")
            # Without a buffer: what cannot be written is noticed in its round, not when the file is closed.
            self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
            self._file.truncate(self.size)
            self._file.seek(self.size)
        try:
            yield
        finally:
            self._file.close()
            self._file = None

    def add(self, metrics: dict[str, Any]) -> None:
        assert self._file is not None
        line = (json.dumps(metrics) + "\n").encode()
        append(self._file, line, self.path)
        self._digest.update(line)
        self.size += len(line)

    def settle(self) -> None:
        """Everything is on the disk: a checkpoint may not be newer than the lines it counts."""
        assert self._file is not None
        with writing(self.path):
            os.fsync(self._file.fileno())


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers for curves: lists by their lengths, and nothing that is no number.

    >>> scalars({"round": 3, "loss": 0.5, "left_out": ["anna"], "acceptance": None, "unbiased": False})
    {'round': 3.0, 'loss': 0.5, 'left_out': 1.0, 'unbiased': 0.0}
    """
    plain = {n: len(v) if isinstance(v, list | tuple) else v for n, v in metrics.items()}
    return {n: float(v) for n, v in plain.items() if isinstance(v, int | float) and math.isfinite(v)}
