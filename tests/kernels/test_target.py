"""The log-posterior and its preconditioner, against densities and Hessians written out by autograd."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from fedpop import Composition
from fedpop.kernels.target import POWER_ITERATIONS, BlockPrecision, Target
from fedpop.keys import Key
from fedpop.models.local import LocalLikelihood
from fedpop.priors import Normal
from tests.oracles import DOUBLE, Case, cohort_of, gaussian_cases, gaussian_noise, make_case, other_cases

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
    torch.testing.assert_close(case.target().grad(z), grad)
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


# --- power iteration, for heads without a bound ------------------------------------------------


class Quadratic(LocalLikelihood):
    """z' H z / 2 of every client, H ``[C, d, d]`` symmetric and of any sign."""

    def __init__(self, hessian: Tensor) -> None:
        self.hessian = hessian

    def value(self, z: Tensor) -> Tensor:
        return self.value_and_grad(z)[0]

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        grad = torch.einsum("cij,ckj->cki", self.hessian, z)
        return 0.5 * (grad * z).sum(-1), grad


def largest(hessian: Tensor, prior_sd: float, iterations: int = POWER_ITERATIONS) -> Tensor:
    d = hessian.shape[-1]
    prior = Normal(scale=prior_sd, bounds=(1e-30, 1e30))
    target = Target(Quadratic(hessian), prior, prior.init(hessian.new_zeros(d), prior_sd))
    out: Tensor = target.largest_curvature(hessian.new_ones(len(hessian), 2, d), iterations)
    return out


@pytest.mark.parametrize("iterations", [5, POWER_ITERATIONS, 200])
def test_power_iteration_on_any_spectrum(iterations):
    """|H v_k| lies between |lambda_1| |c_1|^(1/k), c_1 the start's share of the top, and |lambda_1|."""
    d, clients = 30, 40
    root = gaussian_noise(1, clients, d, d)
    hessian = (root + root.mT) / 2  # eigenvalues of both signs, the largest ones close together
    found = largest(hessian, 1e6, iterations)
    values, vectors = torch.linalg.eigh(hessian)
    top = values.abs().argmax(1)
    exact = values.abs().amax(1)
    key = Key(0, purpose="power iteration")
    start = key.normal(key.server(), (d,), hessian.dtype)[0]
    share = (vectors.mT @ (start / start.norm())).abs()[torch.arange(clients), top]
    assert (found <= exact * (1 + 1e-9)).all()
    assert (found >= exact * share ** (1 / iterations) * (1 - 1e-9)).all()
    # Steps of 0.8 / L are stable as long as L is at least 0.4 of the truth.
    assert (found > 0.5 * exact).all()


def test_power_iteration_where_the_likelihood_is_concave_convex_or_flat():
    eye = torch.eye(3, dtype=DOUBLE)
    hessian = torch.stack((-5 * eye, 5 * eye, 0 * eye, eye))
    # With a prior of precision one: -6, 4, -1, and a likelihood that cancels the prior exactly, where the
    # prior's own precision is what remains to go by.
    torch.testing.assert_close(largest(hessian, 1.0), torch.tensor([6.0, 4.0, 1.0, 1.0], dtype=DOUBLE))


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_power_iteration_in_single_precision_neither_over_nor_underflows(size):
    hessian = -size * torch.diag(torch.tensor([1.0, 2.0, 3.0]))[None]
    found = largest(hessian, (100 / size) ** 0.5)
    torch.testing.assert_close(found, torch.tensor([3.01 * size]), rtol=1e-3, atol=0.0)


def test_a_curvature_that_is_not_a_number_is_not_hidden():
    hessian = torch.full((1, 2, 2), math.nan)
    assert not torch.isfinite(largest(hessian, 1.0)).any()


def test_power_iteration_sees_past_what_leaves_a_softmax_alone():
    """(1, ..., 1) shifts all logits alike: a start there would find the prior's precision only."""
    model = Composition(None, nn.Sequential(nn.Linear(1, 3, bias=False)).double(), "categorical")
    x = 10 * gaussian_noise(1, 50, 1)
    cohort = cohort_of(model, [(x, torch.arange(50) % 3)])
    prior = Normal(scale=1.0)
    target = Target(
        model.bind(model.initial_phi(), cohort.x, cohort),
        prior,
        prior.init(torch.zeros(3, dtype=DOUBLE), 1.0),
    )
    # At z = 0 all probabilities are 1/3: the Hessian is sum x^2 (I - 11'/3) / 3 plus the prior's.
    found = target.largest_curvature(torch.zeros(1, 1, 3, dtype=DOUBLE))
    torch.testing.assert_close(found, x.square().sum()[None] / 3 + 1)
