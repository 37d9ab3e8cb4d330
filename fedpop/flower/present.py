"""What a run is waiting for at the moment, in a small file beside its metrics: for the live page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import read_json

PRESENT = "present.json"


class Present:
    """Writes what is asked of whom, whenever that changes. Nothing depends on it: no fsync, and no error."""

    def __init__(self, file: Path) -> None:
        self._file, self._last, self._since = file, ("", frozenset[str]()), 0.0

    def __call__(self, what: str, waiting: Collection[str]) -> None:
        now = (what, frozenset(waiting))
        if now == self._last:
            return
        self._since = time.time() if what != self._last[0] else self._since
        self._last = now
        temporary = self._file.with_suffix(".tmp")
        with suppress(OSError):
            temporary.write_text(json.dumps({"what": what, "since": self._since, "waiting": sorted(waiting)}))
            os.replace(temporary, self._file)


def read_present(file: Path) -> Mapping[str, Any]:
    """What was written last; nothing where there is none."""
    try:
        found = read_json(file)
    except CheckpointError:
        return {}
    whole = isinstance(found, dict) and isinstance(found.get("what"), str)
    whole = whole and isinstance(found.get("since"), int | float) and isinstance(found.get("waiting"), list)
    return found if whole else {}
