"""Kernels without accept/reject: their own stationary laws on Gaussians, their bias elsewhere.

Oracles: the stationary covariance Q^-1 (I - gamma Q / 2)^-1 of ULA, Q^-1 for the exponential step at any
h, with Q written out from the data; quadrature for logistic and softmax heads. Tolerance: five standard
errors from 600 chains that never meet.
"""

import pytest
import torch

from fedpop.errors import SettingsError
from fedpop.kernels import ULA, Exponential, Tuning, run
from fedpop.keys import Key
from tests.oracles import (
    DOUBLE,
    SIGMAS,
    Moments,
    assert_mean,
    bias_of_distance,
    gaussian_cases,
    make_case,
    sample,
)

CASES = gaussian_cases()
CHAINS = 600


def law(case, kernel) -> Moments:
    """The stationary law of a kernel on the case's Gaussian posteriors."""
    if isinstance(kernel, Exponential):
        return case.gaussian
    covs = []
    for i in range(len(case.clients)):
        q, _ = case.precision(i)
        gamma = kernel.step_size / torch.linalg.eigvalsh(q)[-1]
        identity = torch.eye(len(q), dtype=DOUBLE)
        covs.append(torch.linalg.inv(q) @ torch.linalg.inv(identity - gamma * q / 2))
    return Moments.of_gaussians(case.gaussian.mean, torch.stack(covs), case.mu)


@pytest.mark.parametrize(
    "kernel", [ULA(), ULA(0.3), Exponential(), Exponential(0.7), Exponential(0.3)], ids=repr
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_stationary_law(case, kernel):
    exact = law(case, kernel)
    trace = sample(kernel, case.target(), chains=CHAINS, warmup=100, draws=40)
    z = trace.draws.movedim(2, 0)
    centred = z - exact.mean.unsqueeze(1)
    second = torch.einsum("kcmi,kcmj->kcij", centred, centred) / z.shape[2]
    assert_mean(z.mean(2), exact.mean, "mean")
    assert_mean(second, exact.cov, "covariance")
    assert_mean((z - case.mu).square().sum(-1).mean(2), exact.distance, "mean of norm(z - mu)^2")
    # The tolerance can tell ULA's law from the posterior: its inflation is many standard errors.
    if isinstance(kernel, ULA):
        with pytest.raises(AssertionError):
            assert_mean(second, case.gaussian.cov, "covariance")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_exponential_step_at_one_forgets_where_it_was(case):
    ids = torch.arange(3)
    here = torch.zeros(3, 2, len(case.mu), dtype=DOUBLE)
    tuning = Tuning.fresh(3, 0.0, here)
    one, two = (
        run(Exponential(), case.target(), z, tuning, 1, Key(0), ids, adapt=False).draws
        for z in (here, here + 3)
    )
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_ula_step_decays_over_rounds():
    case, kernel = CASES[0], ULA(0.8, decay=0.5)
    z = torch.zeros(3, 1, 2, dtype=DOUBLE)
    tuning = Tuning.fresh(3, 0.0, z)
    first, ninth = (kernel.prepare(case.target(), z, tuning, k) for k in (0, 8))
    torch.testing.assert_close(ninth * 3, first)
    largest = [torch.linalg.eigvalsh(case.precision(i)[0])[-1] for i in range(3)]
    torch.testing.assert_close(first.flatten(), 0.8 / torch.stack(largest))


@pytest.mark.parametrize(
    "case",
    [make_case("bernoulli", "isotropic"), make_case("categorical", "isotropic", features=1, outputs=3)],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize(("kernel", "steps"), [(ULA, (0.8, 0.2)), (Exponential, (1.0, 0.25))])
def test_bias_falls_with_the_step(case, kernel, steps):
    """The bias of the mean of norm(z - mu)^2 at least halves when the step is quartered."""
    bias, error = zip(*(bias_of_distance(kernel(h), case, CHAINS, h) for h in steps), strict=True)
    # ULA spreads too far, the exponential step with a bound in place of Q not far enough.
    sign = 1 if kernel is ULA else -1
    assert sign * bias[0] > SIGMAS * error[0]
    assert sign * bias[0] / 2 - abs(bias[1]) > SIGMAS * ((error[0] / 2) ** 2 + error[1] ** 2) ** 0.5


def test_impossible_steps_are_refused():
    for bad in (
        lambda: ULA(0.0),
        lambda: ULA(2.0),
        lambda: ULA(decay=-1),
        lambda: Exponential(0),
        lambda: Exponential(1.1),
    ):
        with pytest.raises(SettingsError):
            bad()
