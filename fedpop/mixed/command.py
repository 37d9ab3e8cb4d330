"""``fedpop fit``: a CSV file, a formula, a summary, and a file of estimates for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedpop.errors import SettingsError
from fedpop.files import write_json
from fedpop.mixed.model import mixed_model
from fedpop.mixed.table import read_csv


def fit_file(
    data: Path, formula: str, family: str = "gaussian", json: Path | None = None, **settings: Any
) -> str:
    """The summary in words; estimates go to ``json`` as plain values."""
    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise SettingsError(f"cannot write {json}: it is a folder, or the folder it is to be in is not there")
    fit = mixed_model(formula, read_csv(data), family, **settings)
    if json is not None:
        write_json(json, fit.plain())
    return f"{fit}\n"
