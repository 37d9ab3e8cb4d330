"""Populations in files: theta, each client's own model, and settings as plain values; never code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpop.algorithms.base import Algorithm
from fedpop.channel import Tensors
from fedpop.files import writable_folder, write_bytes, write_json, write_tensors
from fedpop.models.spec import model_spec
from fedpop.version import __version__


def save(
    path: Path,
    method: Algorithm,
    published: Tensors,
    models: Mapping[int, Tensors],
    about: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
) -> Path:
    """Write a population and these clients' models into a folder; models that were there before go."""
    folder = writable_folder(path)
    digest = write_tensors(folder / "theta.safetensors", published)
    if models:
        writable_folder(folder / "clients")
    for i, state in models.items():
        write_tensors(folder / "clients" / f"{i:08d}.safetensors", state)
    for file in (folder / "clients").glob("*.safetensors"):
        if int(file.stem) not in models:
            file.unlink()  # of a population that was saved here before
    described = {
        "version": __version__,
        "method": type(method).__name__,
        "algorithm": method.describe(),
        "model": model_spec(method.model),
        "known": method.model.known(),
        "theta": digest,
    }
    write_json(folder / "population.json", described | dict(about))
    if history:
        lines = "".join(json.dumps(m) + "\n" for m in history)
        write_bytes(folder / "history.jsonl", lines.encode())
    return folder
