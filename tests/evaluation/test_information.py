"""Uncertainty about theta: the information, its gauge directions, and draws from its law."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.errors import EstimateError
from fedpop.evaluation.information import gauge_directions, information, theta_draws
from fedpop.evaluation.oracle import exact_optimum
from fedpop.federation.cohort import Cohort
from fedpop.runtime.random import Key
from tests.helpers import cohort_of, linear_model, population_data, ragged

WIDE = torch.float64


def setting(**options: object) -> tuple[fp.FedSOUL, list[tuple[Tensor, Tensor]], Cohort]:
    clients, _, _ = population_data(15, 6, 3, 2, 0.3)
    method = fp.FedSOUL(linear_model(3, 2, 0.3), prior=fp.NormalPrior(scale=1.0, **options))
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
    torch.testing.assert_close(information(method, phi, beta, cohort), expected)


def test_the_likelihood_does_not_change_along_the_gauge() -> None:
    method, clients, _ = setting()
    phi, beta = method.model.initial_phi(), torch.tensor([0.3, -0.2, 0.1])
    theta = torch.cat((phi, beta)).to(WIDE)
    gradient = torch.autograd.functional.jacobian(lambda t: by_hand(t, clients), theta)
    gauge = gauge_directions(method, phi, beta)
    assert gauge.shape == (9, 2)  # one rotation, one scale
    torch.testing.assert_close(gauge.T @ gauge, torch.eye(2, dtype=WIDE))
    torch.testing.assert_close(gradient @ gauge, torch.zeros(2, dtype=WIDE), atol=1e-9, rtol=0)
    assert float(gradient.norm()) > 0.1


def at_the_optimum(method: fp.FedSOUL, clients: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    federation = method.model.prepare(fp.Federation.of(clients))
    best = exact_optimum(method, federation, [(method.model.initial_phi(), torch.zeros(3))])
    return {"phi": best.phi.float(), "beta": best.beta.float()}


def test_draws_have_the_inverse_information_as_covariance() -> None:
    """Along each eigenvector: 200 draws with mean 0 and variance 1 / eigenvalue, within five errors."""
    method, clients, cohort = setting()
    theta = at_the_optimum(method, clients)
    draws = theta_draws(method, theta, [cohort], Key(0))
    moved = torch.stack([torch.cat(d) for d in draws]).to(WIDE) - torch.cat(tuple(theta.values())).to(WIDE)
    values, vectors = torch.linalg.eigh(information(method, theta["phi"], theta["beta"], cohort))
    gauge = gauge_directions(method, theta["phi"], theta["beta"])
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
    parts = sum(information(method, phi, beta, half) for half in halves)
    torch.testing.assert_close(parts, information(method, phi, beta, cohort))


def test_what_is_fixed_is_not_drawn() -> None:
    method, clients, cohort = setting(learn_scale=False)
    theta = at_the_optimum(method.but(prior=fp.NormalPrior(scale=1.0)), clients)
    draws = theta_draws(method, theta, [cohort], Key(0))
    assert all(torch.allclose(beta[2], theta["beta"][2]) for _, beta in draws)
    assert float(torch.stack([beta[0] for _, beta in draws]).std()) > 1e-3


@pytest.mark.parametrize(
    "model",
    [
        fp.Composition(None, nn.Linear(3, 2), "categorical"),
        fp.Composition(
            None, nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), fp.likelihoods.Normal(1.0)
        ),
    ],
    ids=["softmax", "network head"],
)
def test_models_without_a_closed_form_are_refused(model: fp.Composition) -> None:
    clients = [(x, torch.zeros(len(x), dtype=torch.int64)) for x, _ in ragged((3, 2))]
    population = fp.FedSOUL(model, local_steps=1).fit(clients, rounds=1)
    with pytest.raises(EstimateError, match="linear head with a normal likelihood"):
        population.predict(0, torch.zeros(1, 3), theta_uncertainty=True)


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
