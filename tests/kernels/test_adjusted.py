"""Kernels with accept/reject against exact posteriors.

Oracles: closed-form Gaussians (Normal likelihood), quadrature on a grid (everything else), densities
written with torch.distributions. Every client list has one without data, whose posterior is the prior.
Tolerance: five standard errors, from 600 chains that never meet.
"""

import pytest
import torch

from fedpop.kernels import HMC, MALA
from tests.oracles import Case, assert_mean, effective_draws, gaussian_cases, other_cases, sample

CASES = gaussian_cases() + other_cases()
KERNELS = {"HMC": HMC(), "MALA": MALA()}
WARMUP = {"HMC": 50, "MALA": 200}
DRAWS = {"HMC": 60, "MALA": 250}


@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: c.name)
def test_the_two_oracles_agree(case):
    for name in ("mean", "cov", "distance"):
        torch.testing.assert_close(getattr(case.moments, name), getattr(case.gaussian, name))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_mean_covariance_and_distance(case: Case, name: str):
    exact = case.gaussian if case.name.startswith("normal") else case.moments
    trace = sample(KERNELS[name], case.target(), chains=600, warmup=WARMUP[name], draws=DRAWS[name])
    z = trace.draws.movedim(2, 0)  # [K, C, M, d]
    centred = z - exact.mean.unsqueeze(1)
    second = torch.einsum("kcmi,kcmj->kcij", centred, centred) / z.shape[2]
    distance = (z - case.mu).square().sum(-1)
    assert_mean(z.mean(2), exact.mean, "mean")
    assert_mean(second, exact.cov, "covariance")
    assert_mean(distance.mean(2), exact.distance, "mean of norm(z - mu)^2")
    # At least 1,000 effective draws: five standard errors are at most 16 % of a sd.
    variance = exact.cov.diagonal(dim1=-2, dim2=-1)
    assert effective_draws(z.mean(2), variance).min() > 1000
    assert effective_draws(distance.mean(2), distance.var(dim=(0, 2))).min() > 1000
    assert trace.diverged.sum() == 0
