"""Grouped data with references from R, where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
