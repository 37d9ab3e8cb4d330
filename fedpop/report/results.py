"""One format of results for comparisons, searches, benchmarks and experiments: a list of records in
``results.json``.

A record is ``{"experiment", "setting", "method", "seed", "metrics", "cost", "config", "version"}``.
Tables and figures are made from it, never by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import DAMAGED, read_json, writable_folder, write_json
from fedpop.version import __version__

COSTS = ("rounds", "bytes_up", "bytes_down", "backbone_passes", "head_steps", "seconds")
BESIDE = ("evaluation_seconds", "rest_seconds")
"""Costs beside those of training, of a comparison."""

TYPES: dict[str, type] = {
    "experiment": str, "setting": dict, "method": str, "seed": int, "metrics": dict, "cost": dict,
    "config": dict, "version": str,
}  # fmt: skip
FIELDS = tuple(TYPES)

Record = dict[str, Any]


def record(
    experiment: str,
    setting: dict[str, Any],
    method: str,
    seed: int,
    metrics: Mapping[str, float | None],
    cost: Mapping[str, float],
    config: dict[str, Any],
) -> Record:
    """One record, with every cost present (zero where a method has none) and NaN written as null."""
    return {
        "experiment": experiment,
        "setting": setting,
        "method": method,
        "seed": seed,
        "metrics": {k: None if v is None or not math.isfinite(v) else v for k, v in metrics.items()},
        "cost": {name: float(cost.get(name, 0.0)) for name in COSTS}
        | {name: float(cost[name]) for name in BESIDE if name in cost},
        "config": config,
        "version": __version__,
    }


def _wrong(item: Any) -> str:
    """What a record out of a file is not; nothing where it is one."""
    if not isinstance(item, dict) or set(FIELDS) - set(item):
        return f"not an object with the fields {', '.join(FIELDS)}"
    for name, kind in TYPES.items():
        if not isinstance(item[name], kind) or isinstance(item[name], bool):
            return f"{name} is {_short(item[name])}, not {kind.__name__}"
    for part in ("metrics", "cost"):
        for name, value in item[part].items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                return f"{part}.{name} is {_short(value)}, not a number"
    missing = [name for name in COSTS if item["cost"].get(name) is None]
    return f"cost has no {missing[0]}" if missing else ""


def _short(value: Any) -> str:
    return repr(value)[:60]


def identity(item: Record) -> str:
    """What makes two records the same one."""
    return json.dumps([item["experiment"], item["setting"], item["method"], item["seed"]], sort_keys=True)


def made_by(records: Iterable[Record]) -> str:
    """Which versions made the numbers: those of another version than this one are not what it would give.

    >>> made_by([{"version": __version__}]) == f"Made by fedpop {__version__}."
    True
    """
    versions = sorted({r["version"] for r in records})
    made_by = f"Made by fedpop {' and '.join(versions)}."
    if versions == [__version__]:
        return made_by
    return f"{made_by} The present version is {__version__}; numbers of another one are to be made again."


@dataclass
class Results:
    """Records of one kind, in a file that is rewritten whole whenever one is added."""

    folder: Path
    records: list[Record] = field(default_factory=list)

    @classmethod
    def open(cls, folder: str | Path) -> Results:
        """Read what is there; a folder without results is empty."""
        path = Path(folder) / "results.json"
        records = read_json(path) if path.exists() else []
        if not isinstance(records, list):
            raise CheckpointError(f"{path} is not a list of records but {type(records).__name__}; {DAMAGED}")
        for number, item in enumerate(records):
            if wrong := _wrong(item):
                raise CheckpointError(f"{path}, record {number}: {wrong}; {DAMAGED}")
        return cls(Path(folder), records)

    def add(self, new: Iterable[Record]) -> None:
        """Add records, replacing older ones of the same identity, and write the file."""
        by_identity = {identity(r): r for r in self.records}
        by_identity.update({identity(r): r for r in new})
        self.records = [by_identity[k] for k in sorted(by_identity)]
        write_json(writable_folder(self.folder) / "results.json", self.records)

    def settings(self) -> list[dict[str, Any]]:
        """Distinct settings, in order of first appearance."""
        return list({json.dumps(r["setting"], sort_keys=True): r["setting"] for r in self.records}.values())

    def methods(self) -> list[str]:
        return list(dict.fromkeys(r["method"] for r in self.records))

    def of(self, setting: dict[str, Any] | None = None, method: str | None = None) -> list[Record]:
        return [
            r
            for r in self.records
            if (setting is None or r["setting"] == setting) and (method is None or r["method"] == method)
        ]


def values(records: Sequence[Record], metric: str, of: str = "metrics") -> list[float]:
    """One number of each record, where it is there."""
    return [r[of][metric] for r in records if r[of].get(metric) is not None]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
