"""Classic grouped data by default settings, against lme4's maximum likelihood."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpop as fp

DATA = Path("/work/shared/data/grouped")
pytestmark = pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} is not there")

Groups = dict[str, tuple[np.ndarray, np.ndarray]]


def grouped(name: str, y: str, x: list[str], by: str) -> Groups:
    """Columns x and y of a table, group by group."""
    rows: dict[str, list[list[float]]] = {}
    with open(DATA / f"{name}.csv", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row[by], []).append([float(row[c]) for c in (*x, y)])
    tables = {group: np.array(own) for group, own in rows.items()}
    return {group: (t[:, :-1], t[:, -1]) for group, t in tables.items()}


LME4 = {"sleepstudy": -875.96967, "radon": -1080.55440}
"""Log-likelihoods of the models with a random slope and intercept, as beside the data."""


def log_density(groups: Groups, mu: np.ndarray, sigma: np.ndarray, noise: float) -> float:
    """log N(y; F mu, F Sigma F' + s2 I), written down once more in numpy."""
    total = 0.0
    for x, y in groups.values():
        f = np.column_stack((x, np.ones(len(x))))
        cov = f @ sigma @ f.T + noise * np.eye(len(y))
        residual = y - f @ mu
        total -= 0.5 * (residual @ np.linalg.solve(cov, residual) + np.linalg.slogdet(2 * np.pi * cov)[1])
    return total


@pytest.mark.parametrize(
    ("name", "y", "x", "by"),
    [("sleepstudy", "Reaction", "Days", "Subject"), ("radon", "log_radon", "floor", "county")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_random_slope_and_intercept(name: str, y: str, x: str, by: str, dtype: torch.dtype) -> None:
    groups = grouped(name, y, [x], by)
    model = fp.Composition(None, nn.Linear(1, 1).to(dtype), "normal")
    population = fp.FedSOUL(model, prior="full").fit(groups, progress=False)
    assert population.engine.startswith("exact: ")
    assert population.rounds < 60
    assert population.log_likelihood().value == pytest.approx(LME4[name], abs=1e-3)
    beta = population.published["beta"].double()
    prior = population.algorithm.hierarchy.prior  # type: ignore[union-attr]
    noise = float(population.phi["likelihood.log_variance"].exp())
    own = log_density(groups, prior.mu(beta).numpy(), prior.sigma(beta).numpy(), noise)  # type: ignore[attr-defined]
    assert own == pytest.approx(LME4[name], abs=2e-3)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_units_of_the_data_do_not_matter(scale: float) -> None:
    """sleepstudy in other units: the density changes by the factor's logarithm, once a row."""
    groups = {
        g: (x, y * scale) for g, (x, y) in grouped("sleepstudy", "Reaction", ["Days"], "Subject").items()
    }
    prior = fp.priors.Normal(covariance="full", bounds=(1e-9, 1e9), ball=1e9)
    model = fp.Composition(None, nn.Linear(1, 1).double(), "normal")
    population = fp.FedSOUL(model, prior=prior).fit(groups, progress=False)
    expected = LME4["sleepstudy"] - 180 * np.log(scale)
    assert population.rounds < 60
    assert population.log_likelihood().value == pytest.approx(expected, abs=1e-3)


def test_chains_start_in_the_units_of_the_data_too() -> None:
    """300 rounds from a mean of 0 and a variance of 1 ended 3,100 nats below."""
    groups = grouped("sleepstudy", "Reaction", ["Days"], "Subject")
    method = fp.FedSOUL(fp.Composition(None, nn.Linear(1, 1), "normal"), prior="full", engine="sampled")
    population = method.fit(groups, rounds=300, progress=False)
    assert population.log_likelihood().value == pytest.approx(LME4["sleepstudy"], abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("columns", "fixed", "sd", "sigma", "value"),
    [
        (["floor"], [1.46116, -0.69264], 0.32446, 0.755160, -1081.82529),
        (["floor", "log_uranium"], [1.46427, -0.66644, 0.72320], 0.14583, 0.758278, -1061.40845),
    ],
    ids=["floor", "floor and uranium"],
)
def test_fixed_slopes_beside_a_random_intercept(
    columns: list[str], fixed: list[float], sd: float, sigma: float, value: float, dtype: torch.dtype
) -> None:
    """radon: log radon ~ floor (+ log uranium) + (1 | county)."""
    groups = {
        g: ({"fixed": x, "random": np.ones((len(y), 1))}, y)
        for g, (x, y) in grouped("radon", "log_radon", columns, "county").items()
    }
    slopes = nn.Linear(len(columns), 1, bias=False).to(dtype)
    intercept = nn.Linear(1, 1, bias=False).to(dtype)
    population = fp.FedSOUL(fp.Composition(None, intercept, "normal", fixed=slopes)).fit(
        groups, progress=False
    )
    assert population.engine.startswith("exact: ")
    assert population.rounds < 40
    assert population.log_likelihood().value == pytest.approx(value, abs=1e-3)
    found = [float(population.prior_mean), *population.phi["fixed.weight"].flatten().tolist()]
    assert found == pytest.approx(fixed, abs=2e-4)
    assert float(population.prior_sd) == pytest.approx(sd, abs=5e-4)
    assert float(population.phi["likelihood.log_variance"].exp().sqrt()) == pytest.approx(sigma, abs=2e-4)
