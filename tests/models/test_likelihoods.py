"""Every family against torch.distributions, autograd and its own moments."""

import math

import pytest
import torch
from torch import Tensor
from torch import distributions as dist
from torch.func import hessian

import fedpop as fp
from fedpop.keys import Key
from fedpop.models.likelihoods import Likelihood, Params
from tests.helpers import generator, linear_model, population_data

LEARNED = {"log_variance": torch.tensor(0.7, dtype=torch.float64)}
FAMILIES: dict[str, tuple[Likelihood, Params, int]] = {
    "normal": (fp.likelihoods.Normal(0.3), {}, 2),
    "normal-learned": (fp.likelihoods.Normal(), LEARNED, 1),
    "categorical": (fp.likelihoods.Categorical(), {}, 4),
    "bernoulli": (fp.likelihoods.Bernoulli(), {}, 2),
    "poisson": (fp.likelihoods.Poisson(), {}, 1),
}
families = pytest.mark.parametrize("name", FAMILIES)


def reference(name: str, eta: Tensor) -> dist.Distribution:
    if name == "categorical":
        return dist.Categorical(logits=eta)
    if name == "bernoulli":
        return dist.Independent(dist.Bernoulli(logits=eta), 1)
    if name == "poisson":
        return dist.Independent(dist.Poisson(eta.exp()), 1)
    variance = 0.3 if name == "normal" else math.exp(0.7)
    return dist.Independent(dist.Normal(eta, variance**0.5), 1)


def example(name: str) -> tuple[Likelihood, Params, Tensor, Tensor, Tensor]:
    """A family with eta, targets as the reference wants them, and targets encoded."""
    family, params, outputs = FAMILIES[name]
    eta = torch.randn(50, outputs, generator=generator(0), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        y = reference(name, eta).sample()
    checked = family.check_targets(y, outputs, "test")
    return family, params, eta, y, family.encode(checked, outputs, torch.float64)


@families
def test_log_density(name: str) -> None:
    family, params, eta, y, encoded = example(name)
    expected = reference(name, eta).log_prob(y)
    torch.testing.assert_close(family.log_prob(eta, encoded, params), expected)


@families
def test_gradient(name: str) -> None:
    family, params, eta, y, encoded = example(name)
    free = eta.clone().requires_grad_()
    reference(name, free).log_prob(y).sum().backward()
    value, grad = family.value_and_grad(eta, encoded, params)
    torch.testing.assert_close(value, reference(name, eta).log_prob(y))
    torch.testing.assert_close(grad, free.grad)
    across = family.slope_across(eta.mT, encoded.mT, params)
    torch.testing.assert_close(across, grad.mT)


def test_gradient_in_the_learned_log_variance() -> None:
    family, params, eta, y, encoded = example("normal-learned")
    free = params["log_variance"].clone().requires_grad_()
    family.log_prob(eta, encoded, {"log_variance": free}).sum().backward()
    residual = (y - eta).square().sum()
    expected = 0.5 * (residual / math.exp(0.7) - eta.numel())
    torch.testing.assert_close(free.grad, expected)


@families
def test_curvature_and_its_bound(name: str) -> None:
    family, params, eta, _, encoded = example(name)
    curvature = family.curvature(eta, params)
    bound = family.bound(params)
    for row in range(10):
        full = -hessian(lambda e, r=row: family.log_prob(e, encoded[r], params))(eta[row])
        torch.testing.assert_close(curvature[row], full.diagonal())
        if bound is None:
            assert name == "poisson"
        else:
            assert float(torch.linalg.eigvalsh(full)[-1]) <= float(bound) + 1e-12


def test_the_bounds_are_attained() -> None:
    """A bound that is too generous would cost the chains their step."""
    zero = torch.zeros(2, dtype=torch.float64)
    y = torch.tensor([1.0, 0.0], dtype=torch.float64)
    softmax = -hessian(lambda e: fp.likelihoods.Categorical().log_prob(e, y, {}))(zero)
    assert float(torch.linalg.eigvalsh(softmax)[-1]) == pytest.approx(0.5)
    assert float(fp.likelihoods.Bernoulli().curvature(zero, {}).max()) == pytest.approx(0.25)


@families
def test_mean_of_y(name: str) -> None:
    family, params, eta, _, _ = example(name)
    expected = torch.softmax(eta, -1) if name == "categorical" else reference(name, eta).mean
    torch.testing.assert_close(family.mean(eta, params), expected)


def test_cdf_of_a_normal() -> None:
    y, eta = torch.linspace(-3, 3, 13), torch.full((13,), 0.4)
    expected = dist.Normal(0.4, 0.3**0.5).cdf(y)
    torch.testing.assert_close(fp.likelihoods.Normal(0.3).cdf(eta, y, {}), expected)


def test_cdf_of_a_poisson_is_a_sum_of_its_masses() -> None:
    eta = torch.tensor(1.3, dtype=torch.float64)
    counts = torch.arange(0.0, 12.0, dtype=torch.float64)
    expected = dist.Poisson(eta.exp()).log_prob(counts).exp().cumsum(0)
    family = fp.likelihoods.Poisson()
    torch.testing.assert_close(family.cdf(eta.expand(12), counts, {}), expected)
    torch.testing.assert_close(family.cdf(eta.expand(12), counts + 0.5, {}), expected)
    assert float(family.cdf(eta, torch.tensor(-1.0, dtype=torch.float64), {})) == 0


@families
def test_draws_have_the_right_moments(name: str) -> None:
    """Means within five standard errors, variances within five of theirs (from fourth moments)."""
    family, params, outputs = FAMILIES[name]
    n = 20_000
    eta = torch.randn(outputs, generator=generator(2), dtype=torch.float64).expand(n, outputs)
    ids, key = torch.arange(n), Key(3)
    uniform = key.at(purpose="u").uniform(ids, (outputs,), torch.float64)
    normal = key.at(purpose="n").normal(ids, (outputs,), torch.float64)
    y = family.draw(eta, params, uniform, normal)
    if name == "categorical":
        y = torch.nn.functional.one_hot(y, outputs).double()
        p = torch.softmax(eta[0], -1)
        mean, variance = p, p * (1 - p)
    else:
        law = reference(name, eta[0])
        mean, variance = law.mean, law.variance
    error = (variance / n).sqrt()
    assert bool(((y.mean(0) - mean).abs() < 5 * error).all())
    square = (y - mean).square()
    assert bool(((square.mean(0) - variance).abs() < 5 * square.std(0) / n**0.5).all())


def test_draws_of_a_poisson_invert_its_cdf() -> None:
    family = fp.likelihoods.Poisson()
    eta = torch.full((99,), 3.0, dtype=torch.float64)
    u = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    y = family.draw(eta, {}, u, u)
    assert bool((family.cdf(eta, y, {}) >= u).all())
    assert bool((family.cdf(eta, y - 1, {}) < u).all())


@pytest.mark.parametrize("variance", [0.0, -1.0, float("inf"), "unknown"])
def test_an_impossible_variance_is_refused(variance: float | str) -> None:
    with pytest.raises(fp.errors.SettingsError, match="variance"):
        fp.likelihoods.Normal(variance)


def test_an_unknown_likelihood_names_the_known_ones() -> None:
    with pytest.raises(fp.errors.SettingsError, match="'categorical'"):
        fp.likelihoods.resolve("gamma")


def test_a_learned_noise_variance_recovers_the_truth() -> None:
    """log(variance) has an asymptotic standard error of sqrt(2 / degrees of freedom)."""
    b, n, d, truth = 40, 15, 2, 0.3
    clients, _, _ = population_data(b, n, 5, d, truth)
    population = fp.FedSOUL(linear_model(5, d, "learned")).fit(clients, rounds=200)
    learned = float(population.phi["likelihood.log_variance"])
    freedom = b * n - b * d - 5 * d
    assert learned == pytest.approx(math.log(truth), abs=4 * (2 / freedom) ** 0.5)
    assert learned != 0.0
