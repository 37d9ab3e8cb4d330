"""The log-posterior and its preconditioner, against densities and Hessians written out by autograd."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from fedpop.kernels.target import BlockPrecision
from tests.oracles import Case, gaussian_cases, gaussian_noise, make_case, other_cases

CASES = gaussian_cases() + other_cases()
LINEAR = [case for case in CASES if case.model.linear]

cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
linear = pytest.mark.parametrize("case", LINEAR, ids=lambda c: c.name)


def log_posterior(case: Case, i: int, z):
    x, y = case.clients[i]
    value = MultivariateNormal(case.mu, case.sigma).log_prob(z)
    return value + case.log_likelihood(z.unsqueeze(0), x, y)[0] if len(y) else value


def minus_hessian(case: Case, i: int, z):
    return -torch.autograd.functional.hessian(lambda at: log_posterior(case, i, at), z)


def dense(precision: BlockPrecision, d: int):
    """Q ``[C, d, d]`` from its blocks."""
    blocks = precision.matrix
    outputs = d // blocks.shape[-1]
    return torch.stack([torch.block_diag(*b.expand(outputs, -1, -1)) for b in blocks])


@cases
def test_value_and_gradient(case):
    z = gaussian_noise(5, 3, 4, len(case.mu)).requires_grad_()
    value, grad = case.target().value_and_grad(z)
    exact = torch.stack([torch.stack([log_posterior(case, i, one) for one in z[i]]) for i in range(3)])
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(grad, torch.autograd.grad(exact.sum(), z)[0])
    torch.testing.assert_close(case.target().likelihood.value(z) + case.prior.log_prob(case.beta, z), exact)


@linear
def test_precision_is_the_curvature_or_a_bound_on_it(case):
    q = dense(case.target().precision(), len(case.mu))
    at = case.target().mode()
    for i in range(3):
        hessian = minus_hessian(case, i, at[i])
        if case.name.startswith(("normal", "poisson")):  # exact, or exact at the mode
            torch.testing.assert_close(q[i], hessian, rtol=1e-5, atol=1e-5)
        else:
            for z in (at[i], case.mu, gaussian_noise(6, len(case.mu))):
                assert torch.linalg.eigvalsh(q[i] - minus_hessian(case, i, z)).min() > -1e-9


@linear
def test_root_and_solve(case):
    precision, v = case.target().precision(), gaussian_noise(7, 3, 5, len(case.mu))
    q = dense(precision, len(case.mu))
    lower = torch.linalg.cholesky(q)
    torch.testing.assert_close(precision.solve(v), torch.linalg.solve(q, v.mT).mT)
    torch.testing.assert_close(precision.root(v), torch.linalg.solve(lower, v.mT).mT)
    torch.testing.assert_close(precision.root_transposed(v), torch.linalg.solve(lower.mT, v.mT).mT)


@pytest.mark.parametrize(
    "case", [c for c in LINEAR if not c.name.startswith("categorical")], ids=lambda c: c.name
)
def test_mode_is_where_the_gradient_vanishes(case):
    target = case.target()
    grad = target.value_and_grad(target.mode().unsqueeze(1))[1]
    assert grad.abs().max() < 1e-6


@cases
def test_largest_curvature(case):
    z = gaussian_noise(8, 3, 1, len(case.mu))
    found = case.target().largest_curvature(z, iterations=50)
    for i in range(3):
        true = torch.linalg.eigvalsh(minus_hessian(case, i, z[i, 0]))
        if case.name.startswith("normal"):
            torch.testing.assert_close(found[i], true[-1])
        elif case.model.linear:
            assert found[i] > 0.999 * true[-1] or case.name.startswith("poisson")  # no bound there
        else:  # by power iteration: the largest in absolute value
            torch.testing.assert_close(found[i], true.abs().max().clamp(min=1 / 0.8), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", gaussian_cases(), ids=lambda c: c.name)
def test_moments_of_a_conjugate_posterior(case):
    mean, cov = case.target().moments()
    torch.testing.assert_close(mean, case.gaussian.mean)
    torch.testing.assert_close(cov, case.gaussian.cov)


def test_an_ill_conditioned_precision_is_factorised():
    v = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-7]])
    precision = BlockPrecision.of(v[None, None])
    assert torch.isfinite(precision.inverse_root).all()


def test_modes_of_extreme_counts_are_found():
    case = make_case("poisson", "isotropic")
    x, _ = case.clients[2]
    case.clients[2] = (x, torch.full((8, 1), 1000.0, dtype=x.dtype))
    target = case.target()
    grad = target.value_and_grad(target.mode().unsqueeze(1))[1]
    assert grad.abs().max() < 1e-3
