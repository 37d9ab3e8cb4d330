"""A nonlinear mixed model through ``CustomModel``: theophylline in twelve subjects (Boeckmann et al., 1994).

One compartment, first-order absorption: conc = dose ke ka / cl (exp(-ke t) - exp(-ka t)) / (ka - ke), with ke
shared, ka and cl of each subject log-normal, and a normal error. The reference is exact maximum likelihood,
by 31 x 31 points of adaptive Gauss-Hermite quadrature per subject. The same quadrature, written out here,
judges the federated fit: by how much its likelihood falls short of the maximum.
"""

import json
import math
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.theophylline import fit as example

pytestmark = pytest.mark.slow

FOLDER = Path(os.environ.get("FEDPOP_DATA", "/work/shared/data")) / "grouped"
DOUBLE = torch.float64
Named = dict[str, Tensor]


@cache
def subjects() -> dict[str, tuple[Named, Tensor]]:
    if not (FOLDER / "theoph.csv").exists():
        pytest.skip(f"no theoph.csv in {FOLDER}; set FEDPOP_DATA to the folder with grouped/theoph.csv")
    return example.subjects(FOLDER / "theoph.csv")


def reference() -> dict[str, float]:
    """log ke, log ka, log cl, the two standard deviations, that of the error, the log-likelihood; and the
    standard errors of the first three."""
    saved = json.loads((FOLDER / "theoph.reference.json").read_text())
    exact = next(m for m in saved["models"] if m["model"].startswith("exact_ml") and "diag" in m["model"])
    sd = exact["random"]["Subject"]["sd"]
    values = exact["fixed"] | {"sd_lKa": sd["lKa"], "sd_lCl": sd["lCl"], "sigma": exact["sigma"]}
    return values | {"logLik": exact["logLik"]} | {f"se_{n}": v for n, v in exact["fixed_se"].items()}


def marginal(theta: dict[str, float], points: int = 31) -> float:
    """The exact log-likelihood: quadrature around each subject's posterior mode."""
    nodes, weights = (torch.as_tensor(v, dtype=DOUBLE) for v in np.polynomial.hermite.hermgauss(points))
    grid = torch.cartesian_prod(nodes, nodes) * 2**0.5
    log_w = torch.cartesian_prod(weights, weights).log().sum(1) + 0.5 * grid.square().sum(1)
    mean = torch.tensor([theta["lKa"], theta["lCl"]], dtype=DOUBLE)
    sd = torch.tensor([theta["sd_lKa"], theta["sd_lCl"]], dtype=DOUBLE)
    phi = {"ke": torch.tensor(math.exp(theta["lKe"]), dtype=DOUBLE)}
    total = 0.0
    for x, y in subjects().values():

        def joint(z: Tensor, x: Named = x, y: Tensor = y) -> Tensor:
            eta = example.concentration(phi, {"ka": z[0].exp(), "cl": z[1].exp()}, x)
            noise = torch.distributions.Normal(eta, theta["sigma"], validate_args=False)
            prior = torch.distributions.Normal(mean, sd, validate_args=False)
            return noise.log_prob(y).sum() + prior.log_prob(z).sum()

        mode = mean.clone()
        for _ in range(100):
            gradient, hessian = torch.func.grad(joint)(mode), torch.func.hessian(joint)(mode)
            values, vectors = torch.linalg.eigh(-hessian)
            step = vectors @ ((vectors.mT @ gradient) / values.abs().clamp(min=1.0))
            while joint(mode + step) < joint(mode) and step.norm() > 1e-12:
                step = step / 2
            mode = mode + step
        root = torch.linalg.cholesky(torch.linalg.inv(-torch.func.hessian(joint)(mode)))
        at = mode + grid @ root.mT
        log_area = root.diagonal().log().sum() + math.log(2)
        values = torch.func.vmap(joint)(at) + log_w
        total += float(torch.logsumexp(values, 0) + log_area)
    return total


def test_a_pharmacokinetic_model_reaches_exact_maximum_likelihood() -> None:
    """Within a tenth of a standard error: a fall of at most 0.01 in the log-likelihood is delta' I delta / 2
    for delta of 0.14 standard errors over all six parameters together."""
    truth = reference()
    assert marginal(truth) == pytest.approx(truth["logLik"], abs=1e-4)
    population = example.fitted(subjects())
    mean, sd = population.prior_mean.tolist(), population.prior_sd.tolist()
    found = {
        "lKe": math.log(float(population.phi["ke"])),
        "lKa": mean[0],
        "lCl": mean[1],
        "sd_lKa": sd[0],
        "sd_lCl": sd[1],
        "sigma": math.exp(0.5 * float(population.phi["likelihood.log_variance"])),
    }
    assert truth["logLik"] - marginal(found) < 0.01
    for name in ("lKe", "lKa", "lCl"):
        assert abs(found[name] - truth[name]) < 0.1 * truth[f"se_{name}"], name
    assert found["sd_lKa"] == pytest.approx(truth["sd_lKa"], rel=0.03)
    assert found["sd_lCl"] == pytest.approx(truth["sd_lCl"], rel=0.03)
    assert found["sigma"] == pytest.approx(truth["sigma"], rel=0.01)
    # The likelihood that the population itself reports, by importance sampling.
    own = population.log_likelihood()
    assert abs(own.value - marginal(found)) < 5 * own.error + 0.01
    # Standard errors by Louis' identity, from a hundred draws of theta: their sd is known to 7 %.
    draws = torch.stack([torch.cat(theta) for theta in population.theta_draws()])
    for name, column in (("lKe", 0), ("lKa", 2), ("lCl", 3)):
        assert float(draws[:, column].std()) == pytest.approx(truth[f"se_{name}"], rel=0.4), name
