"""Populations in files: theta, clients' own models side by side, and settings as plain values; never code.

``population.json`` says what there is and names the other files with their digests. It is written last, in
one step: a process that dies before that leaves the population that was there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedpop.files import NewFiles, tensor_bytes, writable_folder, write_sealed
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm
from fedpop.models.spec import saved_spec
from fedpop.settings import name_of
from fedpop.version import __version__

POPULATION_FORMAT = 3
"""Of the layout; 1 was a file for each client (fedpop 0.2.0 and before), 2 did not say how theta was found
and what a run decided."""
PIECE_BYTES = 2**27
"""Bytes of clients' models in one file, about."""
SAVED_BYTES, LEAST_SAVED_DRAWS = 2**24, 100
"""Bytes up to which all draws of all clients are saved unless more are asked for, and draws of a client that
are saved whatever they take."""
KEYS = {
    "format", "version", "method", "algorithm", "model", "known", "theta", "models", "private", "history",
    "clients", "learned_from", "rounds", "best_round", "drift", "convergence", "how", "decisions", "totals",
    "files",
}  # fmt: skip
"""What ``population.json`` holds, beside its seal."""
STEMS, INDEX = "theta|clients-[0-9]+|private|history", "population.json"


def save(
    path: str | Path,
    method: Algorithm,
    published: Tensors,
    models: Mapping[int, Tensors],
    about: Mapping[str, Any],
    private: Mapping[str, Any] | None,
    history: Sequence[Mapping[str, Any]],
) -> Path:
    """Write a population and these clients' models into a folder; what was saved there before goes.

    ``private`` is what only those who hold the clients' data may know.
    """
    folder = writable_folder(path)
    new = NewFiles(folder)
    try:
        described = {
            "format": POPULATION_FORMAT,
            "version": __version__,
            "method": name_of(type(method)),
            "algorithm": method.describe(),
            "model": saved_spec(method.model),
            "known": method.model.known(),
            "theta": new.add("theta", "safetensors", tensor_bytes(published)),
            "models": [
                new.add(f"clients-{number:04d}", "safetensors", tensor_bytes(piece))
                for number, piece in enumerate(_pieces(models))
            ],
            "private": private and new.add("private", "json", json.dumps(dict(private)).encode()),
            "history": None,
        }
        if history:
            lines = "".join(json.dumps(m) + "\n" for m in history)
            described["history"] = new.add("history", "jsonl", lines.encode())
        write_sealed(folder / INDEX, described | dict(about) | {"files": new.digests})
    except BaseException:
        new.forget()
        raise
    new.tidy(STEMS, INDEX)
    return folder


def draws_that_fit(models: Mapping[int, Tensors]) -> int:
    """Of each client, so that draws of all take no more room than they may; some of each in any case."""
    each = [m["draws"] for m in models.values() if "draws" in m]
    if not each:
        return LEAST_SAVED_DRAWS
    most = max(v.shape[1] * v.shape[2] for v in each)
    return max(LEAST_SAVED_DRAWS, most * SAVED_BYTES // max(sum(v.nbytes for v in each), SAVED_BYTES))


def thinned(model: Tensors, draws: int) -> Tensors:
    """A client's model with so many of its draws, or all where there are no more; chains stay as long as
    each other."""
    if "draws" not in model:
        return model
    chains, length = model["draws"].shape[1:3]
    kept = min(length, max(1, draws // chains))
    at = torch.linspace(0, length - 1, kept).round().long()
    return model | {"draws": model["draws"][:, :, at]}


def _pieces(models: Mapping[int, Tensors]) -> Iterator[Tensors]:
    """Models of clients, stacked: those of one form together, as many as one file may hold. ``clients`` says
    whose each row is, by position among the names."""
    alike: dict[Any, list[int]] = {}
    for i, state in models.items():
        form = tuple((n, t.dtype, t.shape) for n, t in state.items())
        alike.setdefault(form, []).append(i)
    for form, ids in alike.items():
        each = sum(shape.numel() * dtype.itemsize for _, dtype, shape in form)
        most = max(1, PIECE_BYTES // max(each, 1))
        for start in range(0, len(ids), most):
            some = ids[start : start + most]
            stacked = {f"model.{n}": torch.cat([models[i][n] for i in some]) for n, _, _ in form}
            yield {"clients": torch.tensor(some)} | stacked
