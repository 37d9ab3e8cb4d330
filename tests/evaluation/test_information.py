"""Uncertainty about theta: the information, its gauge directions, and draws from its law."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.errors import EstimateError
from fedpop.evaluation.information import (
    gauge_directions,
    information,
    reweighted,
    sampled_information,
    theta_draws,
)
from fedpop.evaluation.oracle import exact_optimum
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from tests.helpers import cohort_of, federation_of, linear_model, population_data, ragged

WIDE = torch.float64


def setting(**options: object) -> tuple[fp.FedSOUL, list[tuple[Tensor, Tensor]], Cohort]:
    clients, _, _ = population_data(15, 6, 3, 2, 0.3)
    method = fp.FedSOUL(linear_model(3, 2, 0.3), prior=fp.priors.Normal(scale=1.0, **options))
    return method, clients, cohort_of(method.model, clients)


def by_hand(theta: Tensor, clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The marginal log-likelihood of the isotropic model from torch's multivariate normal."""
    weight, mu, log_sd = theta[:6].reshape(2, 3), theta[6:8], theta[8]
    total = theta.new_zeros(())
    for x, y in clients:
        f = x.to(WIDE) @ weight.T
        cov = (2 * log_sd).exp() * f @ f.T + 0.3 * torch.eye(len(x), dtype=WIDE)
        total = total + MultivariateNormal(f @ mu, cov).log_prob(y.to(WIDE))
    return total


def test_the_information_is_the_curvature_of_the_marginal_likelihood() -> None:
    method, clients, cohort = setting()
    phi, beta = method.model.initial_phi(), torch.tensor([0.3, -0.2, 0.1])
    expected = -torch.autograd.functional.hessian(
        lambda t: by_hand(t, clients), torch.cat((phi, beta)).to(WIDE)
    )
    torch.testing.assert_close(information(method.hierarchy, phi, beta, cohort), expected)


def test_the_likelihood_does_not_change_along_the_gauge() -> None:
    method, clients, _ = setting()
    phi, beta = method.model.initial_phi(), torch.tensor([0.3, -0.2, 0.1])
    theta = torch.cat((phi, beta)).to(WIDE)
    gradient = torch.autograd.functional.jacobian(lambda t: by_hand(t, clients), theta)
    gauge = gauge_directions(method.hierarchy, phi, beta)
    assert gauge.shape == (9, 2)  # one rotation, one scale
    torch.testing.assert_close(gauge.T @ gauge, torch.eye(2, dtype=WIDE))
    torch.testing.assert_close(gradient @ gauge, torch.zeros(2, dtype=WIDE), atol=1e-9, rtol=0)
    assert float(gradient.norm()) > 0.1


def at_the_optimum(method: fp.FedSOUL, clients: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    federation = federation_of(method.model, clients)
    best = exact_optimum(method, federation, [(method.model.initial_phi(), torch.zeros(3))])
    return {"phi": best.phi.float(), "beta": best.beta.float()}


def drawn(method: fp.FedSOUL, theta: dict[str, Tensor], cohort: Cohort) -> list[tuple[Tensor, Tensor]]:
    total = information(method.hierarchy, theta["phi"], theta["beta"], cohort)
    return theta_draws(method.hierarchy, theta, total, Key(0))


def test_draws_have_the_inverse_information_as_covariance() -> None:
    """Along each eigenvector: 200 draws with mean 0 and variance 1 / eigenvalue, within five errors."""
    method, clients, cohort = setting()
    theta = at_the_optimum(method, clients)
    draws = drawn(method, theta, cohort)
    moved = torch.stack([torch.cat(d) for d in draws]).to(WIDE) - torch.cat(tuple(theta.values())).to(WIDE)
    values, vectors = torch.linalg.eigh(information(method.hierarchy, theta["phi"], theta["beta"], cohort))
    gauge = gauge_directions(method.hierarchy, theta["phi"], theta["beta"])
    assert float((moved @ gauge).abs().max()) < 1e-5
    known = values > 1e-6 * values.max()
    assert int(known.sum()) == 7
    scores = moved @ vectors[:, known] * values[known].sqrt()
    n = len(draws)
    assert bool((scores.mean(0).abs() < 5 / n**0.5).all())
    assert bool(((scores.var(0) - 1).abs() < 5 * (2 / n) ** 0.5).all())


def test_cohorts_add_up() -> None:
    method, _, cohort = setting()
    phi, beta = method.model.initial_phi(), torch.tensor([0.3, -0.2, 0.1])
    halves = [cohort.select(torch.arange(*ends)) for ends in ((0, 7), (7, 15))]
    parts = sum(information(method.hierarchy, phi, beta, half) for half in halves)
    torch.testing.assert_close(parts, information(method.hierarchy, phi, beta, cohort))


def test_what_is_fixed_is_not_drawn() -> None:
    method, clients, cohort = setting(learn_scale=False)
    theta = at_the_optimum(method.replace(prior=fp.priors.Normal(scale=1.0)), clients)
    draws = drawn(method, theta, cohort)
    assert all(torch.allclose(beta[2], theta["beta"][2]) for _, beta in draws)
    assert float(torch.stack([beta[0] for _, beta in draws]).std()) > 1e-3


def as_functions() -> fp.CustomModel:
    def outputs(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ phi["w"].mT @ z["v"]

    weight = linear_model(3, 2, 0.3).backbone.weight.detach()
    return fp.CustomModel(
        outputs=outputs, likelihood=fp.likelihoods.Normal(0.3), phi={"w": weight}, z={"v": [0.0, 0.0]}
    )


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "full"])
@pytest.mark.parametrize("custom", [True, False], ids=["functions", "modules"])
def test_louis_identity_with_draws_has_the_closed_form_as_its_mean(custom: bool, covariance: str) -> None:
    """Sets of 40 exact draws: Hessians and covariances are unbiased, so their mean is within five errors."""
    clients, _, _ = population_data(2, 6, 3, 2, 0.3)
    clients.append((torch.zeros(0, 3), torch.zeros(0)))
    prior = fp.priors.Normal(covariance, scale=1.0)
    plain = fp.FedSOUL(linear_model(3, 2, 0.3), prior=prior)
    method = fp.FedSOUL(as_functions(), prior=prior) if custom else plain
    phi = plain.model.initial_phi().to(WIDE)
    beta = 0.3 * torch.arange(1.0, prior.size(2) + 1, dtype=WIDE) / prior.size(2)
    cohort = cohort_of(plain.model, clients)
    exact = information(plain.hierarchy, phi, beta, cohort)
    wide = cohort_of(method.model, [(x.to(WIDE), y.to(WIDE)) for x, y in clients])
    features = plain.model.features(phi.float(), cohort)
    mean, cov = plain.hierarchy.target(phi.float(), beta.float(), features, cohort).moments()
    root = torch.linalg.cholesky(cov.to(WIDE))
    estimates = []
    for r in range(60):
        noise = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(r), dtype=WIDE)
        draws = mean.to(WIDE).unsqueeze(1) + noise @ root.mT
        estimates.append(sampled_information(method.hierarchy, phi, beta, wide, draws))
    every = torch.stack(estimates)
    error = every.std(0) / len(every) ** 0.5
    assert bool(((every.mean(0) - exact).abs() < 5 * error + 1e-5 * exact.abs().max()).all())
    assert float(error.max() / exact.abs().max()) < 0.1  # it could tell


def test_draws_weighted_anew_follow_the_posterior_at_another_theta() -> None:
    """Importance resampling against the closed-form posterior; 4,000 draws, five standard errors."""
    clients, _, _ = population_data(3, 6, 3, 2, 0.3)
    method = fp.FedSOUL(linear_model(3, 2, 0.3), prior=fp.priors.Normal(scale=1.0))
    cohort = cohort_of(method.model, clients)
    phi, beta = method.model.initial_phi(), torch.tensor([0.3, -0.2, 0.1])
    other = (1.1 * phi, beta + 0.1)

    def moments(phi: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return method.hierarchy.target(phi, beta, method.model.features(phi, cohort), cohort).moments()

    mean, cov = moments(phi, beta)
    noise = torch.randn(3, 4000, 2, generator=torch.Generator().manual_seed(0))
    draws = mean.unsqueeze(1) + noise @ torch.linalg.cholesky(cov).mT
    uniform = torch.rand(3, 4000, generator=torch.Generator().manual_seed(1))
    z, size = reweighted(method.hierarchy, {"phi": phi, "beta": beta}, other, cohort, draws, uniform)
    wanted, spread = moments(*other)
    # Resampling adds the noise of its own draws to that of the weighted ones.
    error = (spread.diagonal(dim1=-2, dim2=-1) * (1 / size + 1 / 4000).unsqueeze(1)).sqrt()
    assert bool(((z.mean(1) - wanted).abs() < 5 * error).all())
    assert bool(((mean - wanted).abs() > 5 * error).any())  # it could tell
    _, size = reweighted(method.hierarchy, {"phi": phi, "beta": beta}, (phi, beta), cohort, draws, uniform)
    torch.testing.assert_close(size, torch.full_like(size, 4000.0))


def test_intervals_of_a_function_widen_with_theta() -> None:

    def outputs(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
        return z["a"] + phi["slope"] * x

    g = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(12):
        x = torch.randn(4, generator=g)
        clients.append((x, torch.randn(1, generator=g) + 2 * x + torch.randn(4, generator=g)))
    model = fp.CustomModel(
        outputs=outputs, likelihood=fp.likelihoods.Normal(1.0), phi={"slope": 2.0}, z={"a": 0.0}
    )
    population = fp.FedSOUL(
        model, chain=fp.chains.Chain(burn_in=20), local_steps=2, final=fp.chains.Final(draws=60, burn_in=30)
    ).fit(clients, rounds=10)
    x = torch.tensor([0.0, 10.0])
    plain, wider = (population.predict(3, x, theta_uncertainty=u) for u in (False, True))
    # At x = 10 the slope's own error, about 1 / sqrt(48), adds (10 / sqrt(48))^2 to a variance of 1.2.
    assert wider.sd[1] > 1.3 * plain.sd[1]
    assert wider.sd[0] < 1.2 * plain.sd[0]


def test_a_theta_that_is_too_large_for_scores_is_refused() -> None:
    model = fp.Composition(nn.Linear(30, 10), nn.Linear(10, 2), "categorical")
    clients = [(x, torch.zeros(len(x), dtype=torch.int64)) for x, _ in ragged((3, 2), k=30)]
    population = fp.FedSOUL(model, local_steps=1).fit(clients, rounds=1)
    with pytest.raises(EstimateError, match="limited to 200 for a model whose posterior"):
        population.predict(0, torch.zeros(1, 30), theta_uncertainty=True)


def test_too_many_parameters_are_refused() -> None:
    population = fp.FedSOUL(linear_model(k=1001, d=2)).fit(ragged((2, 2), k=1001), rounds=1)
    with pytest.raises(EstimateError, match="limited to 2000"):
        population.predict(0, torch.zeros(1, 1001), theta_uncertainty=True)


def test_data_that_do_not_determine_theta_are_refused_by_name() -> None:
    """Two clients with one example each say little about six weights."""
    population = fp.FedSOUL(linear_model()).fit(ragged((1, 1)), rounds=2)
    with pytest.raises(
        EstimateError, match=r"do not determine theta.*mostly in (backbone\.weight|the prior)"
    ):
        population.predict(0, torch.zeros(1, 3), theta_uncertainty=True)
