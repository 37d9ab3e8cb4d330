"""Mixed models by chains, with few taking part and with quantised messages; coverage of new groups."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpop as fp

pytestmark = pytest.mark.slow
pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")

FOLDER = Path(os.environ.get("FEDPOP_DATA", "/work/shared/data")) / "grouped"
MODELS = {
    "sleepstudy": ("Reaction ~ Days + (Days | Subject)", "gaussian", "random_slope", 0.1, 0.04),
    "radon": ("log_radon ~ floor + (1 | county)", "gaussian", "random_intercept", 0.1, 0.04),
    "cbpp": (
        "cbind(incidence, size - incidence) ~ period + (1 | herd)",
        "binomial",
        "agq25",
        0.2,
        0.1,
    ),
}
"""Formula, family, reference; twice the exact engine's tolerances of fixed effects in standard errors, and of
standard deviations."""


def table(name: str) -> Any:
    if not (FOLDER / f"{name}.csv").exists():
        pytest.skip(f"no {name}.csv in {FOLDER}; set FEDPOP_DATA to the folder with grouped/{name}.csv")
    frame = pd.read_csv(FOLDER / f"{name}.csv")
    return frame.astype({"period": str}) if name == "cbpp" else frame


def reference(name: str, model: str) -> dict[str, Any]:
    saved = json.loads((FOLDER / f"{name}.reference.json").read_text())
    found: dict[str, Any] = next(m for m in saved["models"] if m["model"] == model)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": {"engine": "sampled"},
    "a fifth takes part": {"participation": 0.2},
    "quantised": {"compressor": "qsgd"},
}


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_chains_reach_twice_the_tolerances(name: str, how: str) -> None:
    formula, family, model, close, wide = MODELS[name]
    frame, truth = table(name), reference(name, model)
    fit = fp.mixed_model(formula, frame, family, **SETTINGS[how])
    assert fit.converged, fit.convergence
    for term, value in truth["fixed"].items():
        se = truth["fixed_se"][term]
        assert abs(fit.coefficients[term] - value) < close * se, term
        assert fit.standard_errors[term] == pytest.approx(se, rel=0.06)
    assert fit.sd == pytest.approx(truth["random"][fit.group]["sd"], rel=wide)
    if family == "gaussian":
        assert fit.sigma == pytest.approx(truth["sigma"], rel=0.01)
        assert fit.log_likelihood == pytest.approx(truth["logLik"], abs=0.2)


def test_intervals_of_new_groups_cover() -> None:
    """A parametric bootstrap of sleepstudy: the chance that an interval covers is known for each replicate,
    since the truth is normal, so that 200 of them tell coverage to half a percent."""
    frame, formula = table("sleepstudy"), MODELS["sleepstudy"][0]
    truth = fp.mixed_model(formula, frame)
    sigma, noise = truth.covariance.numpy(), float(truth.sigma or 0.0)
    b = np.array(list(truth.coefficients.values()))
    x = np.stack((np.ones(len(frame)), frame.Days), 1)
    owner = np.repeat(np.arange(18), 10)
    rows = pd.DataFrame({"Days": np.arange(10.0)})
    at = x[:10]
    mean, sd = at @ b, np.sqrt(np.einsum("ni,ij,nj->n", at, sigma, at) + noise**2)
    below = np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))
    covered: dict[bool, list[float]] = {True: [], False: []}
    for replicate in range(200):
        rng = np.random.default_rng(replicate)
        z = rng.multivariate_normal([0, 0], sigma, size=18)
        frame["Reaction"] = x @ b + (x * z[owner]).sum(1) + noise * rng.normal(size=len(x))
        fit = fp.mixed_model(formula, frame, seed=replicate)
        for uncertain, found in covered.items():
            low_high = fit.predict(rows, "new", theta_uncertainty=uncertain)
            share = below((low_high.upper - mean) / sd) - below((low_high.lower - mean) / sd)
            found.append(float(share.mean()))
    assert 0.88 <= np.mean(covered[True]) <= 0.92
    assert 0.84 <= np.mean(covered[False]) < np.mean(covered[True])
