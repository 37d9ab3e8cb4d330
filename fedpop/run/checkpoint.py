"""Checkpoints: all that a run needs to go on to the same bits, and proof that nothing was changed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedpop.checked import Count, Whole, require
from fedpop.errors import CheckpointError, OtherSettingsError, warn_user
from fedpop.files import read_sealed, read_tensors, reading, write_sealed, write_tensors, writing
from fedpop.version import __version__

MOST_THREADS = 2**15
"""That a file may ask for."""
CHECKPOINT_FORMAT = 4
"""Of the layout; what fedpop 0.2.0 and before wrote had no number, 3 had the engine among the settings."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after ``round`` complete rounds. Random numbers are keyed, so there is no generator."""

    round: int
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    metrics_bytes: int
    metrics_digest: str
    """Of so many bytes of ``metrics.jsonl``."""
    ends: list[int]
    """Of the run's stages, the present one included."""
    threads: int
    precision: str
    """What the backbone runs in, chosen at the first start."""
    totals: dict[str, float]
    doubted: dict[str, list[str]] = field(default_factory=dict)
    """Whose answers before the rounds were left out."""
    rate: float | None = None
    """A step size that trial rounds found before the first one."""
    best_round: int | None = None
    """The round of the best state on validation data, where one is remembered."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint and drop all but the last two."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
    name = _name(checkpoint.round)
    meta = {k: v for k, v in asdict(_light(checkpoint)).items() if k != "tensors"}
    tensors = folder / f"{name}.safetensors"
    try:
        meta["digest"] = write_tensors(tensors, checkpoint.tensors)
        # The JSON is written last: a checkpoint exists only once both files are whole.
        write_sealed(folder / f"{name}.json", meta | {"format": CHECKPOINT_FORMAT, "version": __version__})
    except CheckpointError:
        if not (folder / f"{name}.json").exists():
            tensors.unlink(missing_ok=True)
        raise
    for old in sorted(folder.glob("round-*.json"))[:-2]:  # one to go back to, should the last be damaged
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    complete = {p.stem for p in folder.glob("round-*.json")}
    for stray in folder.glob("round-*.safetensors"):
        if stray.stem not in complete:
            stray.unlink()


def _light(checkpoint: Checkpoint) -> Checkpoint:
    return Checkpoint(**{**checkpoint.__dict__, "tensors": {}})


def read(folder: Path) -> Checkpoint | None:
    """The newest usable checkpoint; a bad one is named in a warning and the previous one is used."""
    found = sorted(folder.glob("round-*.json"), reverse=True)
    reason = ""
    for path in found:
        try:
            return _read_one(path)
        except CheckpointError as error:
            rest = "using the previous one" if path != found[-1] else "there is no earlier one"
            warn_user(f"checkpoint refused: {error}; {rest}")
            reason = reason or str(error)
    if found:
        raise CheckpointError(
            f"no usable checkpoint in {folder} ({reason}); delete the folder to start again, or use another"
        )
    return None


def _read_one(path: Path) -> Checkpoint:
    meta = read_sealed(path, "a checkpoint")
    written = (meta.pop("format", None), meta.pop("version", "0.2.0 or before"))
    if written[0] != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path} was written by fedpop {written[1]} in its own layout, which {__version__} does not read "
            "and does not migrate: finish the run with that version, or start it again in another folder"
        )
    tensors = path.with_suffix(".safetensors")
    with reading(path, "a checkpoint"):
        digest = meta.pop("digest")
        if not isinstance(digest, str):
            raise TypeError("its tensors have no digest")
        found = Checkpoint(tensors=read_tensors(tensors, digest), **meta)
        _check(found, path)
    return found


def _check(found: Checkpoint, path: Path) -> None:
    """Raise where entries are not of the types that a run goes on with."""
    require(Whole, round=found.round, metrics_bytes=found.metrics_bytes)
    if path.stem != _name(found.round):
        raise ValueError(f"it is of round {found.round}")
    if not isinstance(found.ends, list) or not found.ends:
        raise TypeError("ends are those of the run's stages")
    require(Count, threads=found.threads, **{f"end {i}": end for i, end in enumerate(found.ends)})
    if found.threads > MOST_THREADS:
        raise ValueError(f"{found.threads} threads")
    for entry in ("config", "totals", "callbacks", "doubted"):
        if not isinstance(getattr(found, entry), dict):
            raise TypeError(f"{entry} is not an object")
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in found.totals.values()):
        raise TypeError("totals are numbers")


def _name(round: int) -> str:
    return f"round-{round:08d}"


def require_same(config: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse to resume a run whose settings or data have changed; name what differs. More rounds are none of
    them: the run is extended. Nor is why its engine is the one it is."""
    config = json.loads(json.dumps(config))
    then, now = (c | {"rounds": None, "engine": str(c.get("engine")).split(":")[0]} for c in (saved, config))
    different = _differences("", then, now)
    if different:
        raise OtherSettingsError(
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
    if old == new:
        return []
    if path == "names":
        return ["names: the clients have other names, or another order, than they had then"]
    return [f"{path}: {old} then, {new} now"]
