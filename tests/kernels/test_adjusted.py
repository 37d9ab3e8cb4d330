"""Kernels with accept/reject against exact posteriors.

Oracles: closed-form Gaussians (Normal likelihood), quadrature on a grid (everything else), densities
written with torch.distributions. Every client list has one without data, whose posterior is the prior.
Tolerance: five standard errors, from 1000 chains that never meet.
"""

import pytest
import torch

from fedpop.kernels import HMC
from tests.oracles import Case, assert_mean, effective_draws, gaussian_cases, other_cases, sample

CASES = gaussian_cases() + other_cases()
KERNELS = {"HMC": HMC(), "MALA": HMC(leapfrog=1)}
WARMUP = {"HMC": 100, "MALA": 300}


@pytest.mark.parametrize("case", gaussian_cases()[:3], ids=lambda c: c.name)
def test_the_two_oracles_agree(case):
    for name in ("mean", "cov", "distance"):
        torch.testing.assert_close(getattr(case.moments, name), getattr(case.gaussian, name))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_mean_covariance_and_distance(case: Case, name: str):
    exact = case.gaussian if case.name.startswith("normal") else case.moments
    trace = sample(KERNELS[name], case.target(), chains=1000, warmup=WARMUP[name], draws=100)
    z = trace.draws.movedim(2, 0)  # [K, C, M, d]
    centred = z - exact.mean.unsqueeze(1)
    second = torch.einsum("kcmi,kcmj->kcij", centred, centred) / z.shape[2]
    distance = (z - case.mu).square().sum(-1)
    assert_mean(z.mean(2), exact.mean, "mean")
    assert_mean(second, exact.cov, "covariance")
    assert_mean(distance.mean(2), exact.distance, "mean of norm(z - mu)^2")
    # The tolerance means something: at least 2,000 effective draws, so five errors are at most 11 %.
    variance = exact.cov.diagonal(dim1=-2, dim2=-1)
    assert effective_draws(z.mean(2), variance).min() > 2000
    assert effective_draws(distance.mean(2), distance.var(dim=(0, 2))).min() > 2000
    assert trace.diverged.sum() == 0
