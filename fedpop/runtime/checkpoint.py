"""Checkpoints: all that a run needs to go on to the same bits, and proof that nothing was changed."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedpop.errors import CheckpointError, FedpopWarning
from fedpop.files import read_json, read_tensors, write_json, write_tensors

KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """A run after ``round`` complete rounds. Random numbers are keyed, so there is no generator."""

    round: int
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    metrics_bytes: int
    ends: list[int]
    """Of the run's stages, the present one included."""
    threads: int
    precision: str
    """What the backbone runs in, chosen at the first start."""
    totals: dict[str, float]
    rate: float | None = None
    """A step size that trial rounds found before the first one."""
    kept: int | None = None
    """The round of the best state on validation data, where one is remembered."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False


def _seal(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint and drop all but the last two."""
    folder.mkdir(exist_ok=True)
    name = f"round-{checkpoint.round:08d}"
    meta = {k: v for k, v in asdict(_light(checkpoint)).items() if k != "tensors"}
    meta["digest"] = write_tensors(folder / f"{name}.safetensors", checkpoint.tensors)
    meta = json.loads(json.dumps(meta))
    # The JSON is written last: a checkpoint exists only once both files are whole.
    write_json(folder / f"{name}.json", meta | {"seal": _seal(meta)})
    for old in sorted(folder.glob("round-*.json"))[:-KEEP]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    kept = {p.stem for p in folder.glob("round-*.json")}
    for stray in folder.glob("round-*.safetensors"):
        if stray.stem not in kept:
            stray.unlink()


def _light(checkpoint: Checkpoint) -> Checkpoint:
    return Checkpoint(**{**checkpoint.__dict__, "tensors": {}})


def read(folder: Path) -> Checkpoint | None:
    """The newest usable checkpoint; a bad one is named in a warning and the previous one is used."""
    found = sorted(folder.glob("round-*.json"), reverse=True)
    for path in found:
        try:
            return _read_one(path)
        except CheckpointError as error:
            rest = "using the previous one" if path != found[-1] else "there is no earlier one"
            warnings.warn(f"checkpoint refused: {error}; {rest}", FedpopWarning, stacklevel=2)
    if found:
        raise CheckpointError(
            f"no usable checkpoint in {folder}; delete the folder to start again, or use resume=False"
        )
    return None


def _read_one(path: Path) -> Checkpoint:
    meta = read_json(path)
    if not isinstance(meta, dict) or "seal" not in meta:
        raise CheckpointError(f"{path} is not a checkpoint of this version")
    seal = meta.pop("seal")
    if _seal(meta) != seal:
        raise CheckpointError(f"{path} was edited: its seal does not match")
    digest = meta.pop("digest")
    return Checkpoint(tensors=read_tensors(path.with_suffix(".safetensors"), digest), **meta)


def require_same(config: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse to resume a run whose settings or data have changed; name what differs. More rounds are none of
    them: the run is extended."""
    config = json.loads(json.dumps(config))
    different = _differences("", saved | {"rounds": None}, config | {"rounds": None})
    if different:
        raise CheckpointError(
            "cannot resume: settings differ from those of the saved run ("
            + "; ".join(different[:5])
            + "). Use the same settings, or another output folder"
        )


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        out = []
        for key in sorted(old.keys() | new.keys()):
            out += _differences(f"{path}.{key}" if path else key, old.get(key), new.get(key))
        return out
    return [] if old == new else [f"{path}: {old} then, {new} now"]
