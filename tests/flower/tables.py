"""Sites with tables, as their folders have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedpop as fp
from fedpop.federation.inputs import Example
from fedpop.flower.client import app
from fedpop.flower.deployment import Deployment
from fedpop.flower.remote import RoundTerms
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment

FORM: dict[str, Any] = {"x": ["age", "sex"], "y": "dose", "categories": ["sex"], "minimum": 2}


def ages(seed: int, rows: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).normal(50, 10, rows).round(3)


def table(values: np.ndarray, sexes: str = "fm", y: float = 1.0) -> str:
    rows = [f"{v!r},{sexes[i % len(sexes)]},{y * (i % 3)}" for i, v in enumerate(values.tolist())]
    return "\n".join(["age,sex,dose", *rows]) + "\n"


def tables_at(root: Path, texts: Mapping[str, str], more: str = "") -> LocalGrid:
    """A Grid of sites with these tables."""
    folders = {}
    for name, text in texts.items():
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "rows.csv").write_text(text)
        (folder / "site.toml").write_text(f'name = "{name}"\ndata = "rows.csv"\n{more}')
        (folder / "secret").write_text("1\n")
        folders[name] = folder
    return LocalGrid(app, folders)


def planned(rounds: int = 2, sites: int = 2, likelihood: Any = None, **schema: Any) -> Deployment:
    """FedAvg on a linear model with as many inputs as are agreed on, from zero."""

    def method(example: Example) -> fp.FedAvg:
        layer = nn.Linear(example.shapes[0][0], 1)
        for values in layer.parameters():
            nn.init.zeros_(values)
        return fp.FedAvg(fp.Composition(None, layer, likelihood or fp.likelihoods.Normal(1.0)))

    terms, usual = RoundTerms(sites=sites, timeout=60.0), method(Example(None, ((1,),), (torch.float32,)))
    return replace(deployment(usual, rounds, terms=terms, schema=FORM | schema), method=method)
