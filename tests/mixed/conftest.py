"""Grouped data with references from R, where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.mixed.formula import parse

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")
pytest.importorskip("formulae", reason="mixed models need the extra 'formula'")

FOLDER = Path(os.environ.get("FEDPOP_DATA", "/work/shared/data")) / "grouped"


def need(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no {name} in {FOLDER}; set FEDPOP_DATA to the folder with grouped/{name}")
    return path


@pytest.fixture
def table() -> Callable[[str], Any]:
    return lambda name: pd.read_csv(need(f"{name}.csv"))


@pytest.fixture
def reference() -> Callable[[str, str], dict[str, Any]]:
    def found(name: str, model: str) -> dict[str, Any]:
        saved = json.loads(need(f"{name}.reference.json").read_text())
        return next(m for m in saved["models"] if m["model"] == model)

    return found


@pytest.fixture
def simulated() -> Callable[..., Any]:
    """Rows of groups of these sizes: x far from zero, w, categories s, exposure t."""

    def made(sizes: list[int], seed: int = 0) -> Any:
        rng = np.random.default_rng(seed)
        g = np.repeat(np.arange(len(sizes)), sizes)
        n = len(g)
        z = rng.normal(size=(len(sizes), 2)) * [1.0, 0.4]
        frame = pd.DataFrame(
            {
                "g": [f"g{i}" for i in g],
                "x": rng.normal(size=n) * 3 + 20,
                "w": rng.normal(size=n),
                "s": rng.choice(list("abc"), n),
                "t": rng.uniform(1, 5, n),
            }
        )
        eta = 0.3 + 0.5 * frame.w + 0.4 * (frame.s == "b") + z[g, 0] + z[g, 1] * frame.w
        frame["y"] = 2 * eta + 0.1 * frame.x + rng.normal(size=n)
        frame["count"] = rng.poisson(np.exp(eta) * frame.t)
        frame["yes"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))) * 1
        return frame

    return made


@dataclass
class Placed:
    """A fit, and the posteriors of its groups wherever they are kept."""

    fit: Any
    effects: Callable[[], Any]


@pytest.fixture(params=["here", "one site", "three sites"])
def fitted(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Placed]:
    """A fit on this machine, or over the Grid in this process: at one site to the bit of the local fit in
    which all groups are at one site, at three to rounding."""

    def made(formula: str, frame: Any, family: str = "gaussian", **settings: Any) -> Placed:
        if request.param == "here":
            fit = fp.mixed_model(formula, frame, family, **settings)
            return Placed(fit, fit.random_effects)
        pytest.importorskip("flwr", reason="the Grid needs the extra 'flower'")
        from tests.flower.formulas import by_site, effects_at, grid_of, over

        group, one = parse(formula).group, request.param == "one site"
        root, frames = tmp_path / str(len(list(tmp_path.iterdir()))), by_site(frame, group, 1 if one else 3)
        fit = over(grid_of(root, frames), formula, family, **settings)
        here = fp.mixed_model(
            formula, frame, family, sites={"all": list(map(str, frame[group].unique()))}, **settings
        )
        alike(fit, here, None if one else 1e-9)
        return Placed(fit, lambda: effects_at(root, frames, fit))

    return made


def alike(fit: Any, other: Any, rel: float | None) -> None:
    """The same estimates; None: to the bit."""
    numbers = [
        {**f.coefficients, "log likelihood": f.log_likelihood, "sigma": f.sigma or 0.0}
        | {f"sd {n}": v for n, v in f.sd.items()}
        | {f"se {n}": v for n, v in f.standard_errors.items()}
        for f in (fit, other)
    ]
    if rel is None:
        assert numbers[0] == numbers[1]
        assert (fit.rounds, fit.n_obs, fit.n_groups) == (other.rounds, other.n_obs, other.n_groups)
        assert torch.equal(fit.vcov, other.vcov)
        assert torch.equal(fit.covariance, other.covariance)
        return
    # A search ends where a step promises nothing more, within rounding; a variance at zero within more of it.
    sizes = {n: fit.standard_errors.get(n, abs(v)) for n, v in numbers[1].items()}
    for name, value in numbers[0].items():
        assert value == pytest.approx(numbers[1][name], rel=rel, abs=max(rel * sizes[name], 1e-12)), name
