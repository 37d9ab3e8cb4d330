"""The marginal likelihood: closed form, importance sampling, and where neither can be had."""

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.errors import EstimateError, SettingsError
from fedpop.evaluation.marginal import LogLikelihood, closed_form
from fedpop.evaluation.oracle import exact_optimum
from fedpop.keys import Key
from fedpop.population import Population
from fedpop.priors.normal import Normal
from tests.helpers import cohort_of, federation_of, generator, population_data, ragged, seeded

WIDE = torch.float64


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "full"])
def test_closed_form_is_a_multivariate_normal(covariance: str, bias: bool, outputs: int) -> None:
    """y_i ~ N(F mu, F Sigma F' + s2 I), with F the features of all outputs."""
    model = fp.Composition(
        seeded(nn.Linear(3, 2).to(WIDE), 1),
        nn.Linear(2, outputs, bias=bias).to(WIDE),
        fp.likelihoods.Normal(0.3),
    )
    prior = Normal(covariance)
    d = model.z_layout.size
    beta = 0.4 * torch.randn(prior.size(d), generator=generator(2), dtype=WIDE)
    clients = [(x.to(WIDE), y.to(WIDE)[:, None].expand(-1, outputs)) for x, y in ragged()]
    cohort = cohort_of(model, clients)
    phi = model.initial_phi()
    target = fp.FedSOUL(model, prior=prior).hierarchy.target(phi, beta, model.features(phi, cohort), cohort)
    expected = []
    for x, y in clients:
        f = model.backbone(x)
        f = torch.cat((f, torch.ones(len(x), 1, dtype=WIDE)), 1) if bias else f
        big = torch.kron(torch.eye(outputs, dtype=WIDE), f)  # outputs one after the other, as z is
        mean = big @ prior.mu(beta)
        cov = big @ prior.sigma(beta) @ big.T + 0.3 * torch.eye(len(mean), dtype=WIDE)
        empty = len(x) == 0
        flat = y.T.reshape(-1)
        expected.append(
            torch.zeros((), dtype=WIDE) if empty else MultivariateNormal(mean, cov).log_prob(flat)
        )
    torch.testing.assert_close(closed_form(target), torch.stack(expected))


def test_a_population_reports_the_closed_form_without_error() -> None:
    clients, _, _ = population_data(6, 4, 3, 2, 0.5)
    population = fp.FedSOUL(fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(0.5))).fit(
        clients, rounds=3
    )
    estimate = population.log_likelihood()
    assert estimate.error == 0
    assert estimate.method == "closed form"
    mean = population.prior_mean
    sigma = population.algorithm.hierarchy.prior.sigma(population.published["beta"])
    assert float(sigma.tril(-1).abs().max()) > 0.01  # without a backbone covariances are learned
    total = 0.0
    for x, y in clients:
        f = torch.cat((x, torch.ones(len(x), 1)), 1)
        cov = f @ sigma @ f.T + 0.5 * torch.eye(len(x))
        total += float(MultivariateNormal(f @ mean, cov).log_prob(y))
    assert estimate.value == pytest.approx(total, rel=1e-5)
    assert str(estimate).endswith("(closed form)")


def one_dimensional(family: str) -> tuple[fp.FedSOUL, dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    g = generator(3)
    clients = []
    for n in (4, 0, 9):
        x = torch.randn(n, 1, generator=g)
        noise = torch.rand(n, generator=g)
        y = (noise < torch.sigmoid(1.5 * x[:, 0])).float() if family == "bernoulli" else (3 * noise).floor()
        clients.append((x, y))
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), family)
    method = fp.FedSOUL(model, prior=Normal(scale=1.0))
    return method, {"phi": torch.zeros(0), "beta": torch.tensor([0.3, math.log(1.4)])}, clients


def quadrature(family: str, x: Tensor, y: Tensor, mean: float, sd: float) -> float:
    def density(z: float) -> float:
        eta = z * x[:, 0].double()
        if family == "bernoulli":
            log_p = torch.distributions.Bernoulli(logits=eta).log_prob(y.double()).sum()
        else:
            log_p = torch.distributions.Poisson(eta.exp()).log_prob(y.double()).sum()
        return (
            float(torch.exp(log_p)) * math.exp(-0.5 * ((z - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
        )

    return math.log(integrate.quad(density, mean - 10 * sd, mean + 10 * sd, epsabs=1e-14, limit=200)[0])


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_importance_sampling_against_quadrature(family: str) -> None:
    method, theta, clients = one_dimensional(family)
    population = Population(method, theta, Key(0), federation_of(method.model, clients))
    estimate = population.log_likelihood()
    expected = sum(quadrature(family, x, y, 0.3, 1.4) for x, y in clients if len(x))
    assert estimate.method == "importance sampling"
    assert 0 < estimate.error < 0.1
    assert abs(estimate.value - expected) < 4 * estimate.error
    assert "+-" in str(estimate)


def test_more_proposals_make_the_error_smaller_by_their_root() -> None:
    method, theta, clients = one_dimensional("poisson")
    population = Population(method, theta, Key(0), federation_of(method.model, clients))
    few, many = (population.log_likelihood(proposals=n) for n in (500, 8000))
    assert many.error == pytest.approx(few.error / 4, rel=0.25)
    assert abs(few.value - many.value) < 4 * few.error
    assert population.log_likelihood(1000) == population.log_likelihood()
    with pytest.raises(SettingsError, match="proposals"):
        population.log_likelihood(0)


def test_refused_where_the_weights_fail() -> None:
    """A softmax head of 200 dimensions and few data: no simple proposal covers the posterior."""
    model = fp.Composition(None, seeded(nn.Linear(39, 5), 4), "categorical")
    clients = {"a": (torch.randn(3, 39, generator=generator(5)), torch.tensor([0, 1, 2]))}
    population = fp.FedSOUL(model, local_steps=1).fit(clients, rounds=1)
    with pytest.raises(
        EstimateError, match=r"1 client\(s\), with a Pareto shape above 0\.7.*200\s+dimensions"
    ):
        population.log_likelihood()


def test_estimates_print_readably() -> None:
    assert str(LogLikelihood(-12.345, 0.0, "closed form")) == "-12.35 (closed form)"
    assert str(LogLikelihood(-12.345, 0.5, "importance sampling")) == "-12.35 +- 0.50 (importance sampling)"


# --- the exact optimum against a textbook --------------------------------------------------------


def one_way(b: int = 12, n: int = 5) -> tuple[fp.FedSOUL, list[tuple[Tensor, Tensor]], dict[str, float]]:
    """Balanced one-way random effects y_ij = z_i + e_ij, whose ML estimates are sums of squares."""
    g = generator(6)
    z = 1.0 + 0.8 * torch.randn(b, 1, generator=g)
    y = z + 0.5 * torch.randn(b, n, generator=g)
    mean, group = y.mean(), y.mean(1)
    noise = float((y - group[:, None]).square().sum()) / (b * (n - 1))
    between = (float(n * (group - mean).square().sum()) / b - noise) / n
    assert between > 0
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), "normal")
    ones = torch.ones(n, 1)
    truth = {"mean": float(mean), "noise": noise, "between": between}
    return fp.FedSOUL(model, prior=Normal(scale=1.0)), [(ones, row) for row in y], truth


def test_exact_optimum_is_the_textbook_estimate() -> None:
    method, clients, truth = one_way()
    federation = federation_of(method.model, clients)
    best = exact_optimum(method, federation, [(torch.zeros(1), torch.zeros(2))])
    assert float(best.phi.exp()) == pytest.approx(truth["noise"], rel=1e-4)
    assert float(best.beta[0]) == pytest.approx(truth["mean"], rel=1e-4)
    assert float(best.beta[1].exp()) == pytest.approx(truth["between"] ** 0.5, rel=1e-4)


def test_fedsoul_finds_the_textbook_estimate_too() -> None:
    """Closed-form I and J leave no noise, so that 200 rounds come within two percent."""
    method, clients, truth = one_way()
    population = method.replace(chain=fp.chains.Chain(rao_blackwell=True)).fit(clients, rounds=200)
    assert float(population.phi["likelihood.log_variance"].exp()) == pytest.approx(truth["noise"], rel=0.02)
    assert float(population.prior_mean) == pytest.approx(truth["mean"], rel=0.02)
    assert float(population.prior_sd) == pytest.approx(truth["between"] ** 0.5, rel=0.02)


def test_the_best_of_several_starts_is_kept() -> None:
    clients, _, _ = population_data(8, 4, 4, 2, 0.1)
    model = fp.Composition(
        nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False), fp.likelihoods.Normal(0.1)
    )
    method = fp.FedSOUL(model, prior=Normal(scale=1.0))
    federation = federation_of(model, clients)
    starts = [(torch.randn(8, generator=generator(s)), torch.zeros(3)) for s in range(3)]
    each = [exact_optimum(method, federation, [s]).log_likelihood for s in starts]
    assert exact_optimum(method, federation, starts).log_likelihood == pytest.approx(max(each))
