"""The server's step: weights, hyperprior, empty rounds, EM and projections, to the letter."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.message import Total
from fedpop.methods.base import Facts
from fedpop.priors.normal import Normal
from tests.helpers import generator, linear_model, train_key

CLIENTS, ACTIVE, RATE = 10, 4, 0.01
FACTS = Facts(CLIENTS, 100)
HYPER = fp.priors.Hyperprior(phi_scale=2.0, mean_scale=0.5, log_scale=(0.3, 0.7))


def method(**options: Any) -> fp.FedSOUL:
    settings = {
        "phi_step": fp.steps.SGD(RATE),
        "beta_step": fp.steps.SGD(RATE),
        "prior": Normal(scale=1.5, mean=0.4),
    }
    return fp.FedSOUL(linear_model(), **(settings | options))


def summed(count: int = ACTIVE, ratio: bool = True, **sums: Tensor) -> Total:
    """What the server sees of so many clients."""
    return Total(sums, sums, {}, count, float(count), CLIENTS, ratio)


def message(ratio: bool = True, count: int = ACTIVE) -> Total:
    g = generator(0)
    return summed(count, ratio, I=torch.randn(3, generator=g), J=torch.randn(6, generator=g))


def step(m: fp.FedSOUL, total: Total, k: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    server = m.init(FACTS, train_key(), {})
    return server, m.server_round(server, total, FACTS, train_key(k))


def hyper_gradients(server: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of log p(theta), by autograd from the densities as documented."""
    phi, beta = server["phi"].clone().requires_grad_(), server["beta"].clone().requires_grad_()
    log_p = torch.distributions.Normal(0.0, 2.0).log_prob(phi).sum()
    log_p = log_p + torch.distributions.Normal(0.0, 0.5).log_prob(beta[:2]).sum()
    log_p = log_p + torch.distributions.Normal(0.3, 0.7).log_prob(beta[2])
    return torch.autograd.grad(log_p, (phi, beta))


@pytest.mark.parametrize("ratio", [True, False])
def test_plain_steps_are_those_of_the_algorithm(ratio: bool) -> None:
    """b/|A| or 1/p weights on the clients' sums; one gradient of the hyperprior, not b of them."""
    total = message(ratio)
    server, new = step(method(hyperprior=HYPER), total)
    phi_hyper, beta_hyper = hyper_gradients(server)
    weight = CLIENTS / ACTIVE if ratio else 1.0
    torch.testing.assert_close(new["phi"], server["phi"] + RATE * (weight * total.weighted["J"] + phi_hyper))
    torch.testing.assert_close(
        new["beta"], server["beta"] + RATE * (weight * total.weighted["I"] + beta_hyper)
    )


def test_an_empty_round_makes_no_step_under_ratio_weights() -> None:
    for m in (method(hyperprior=HYPER), fp.FedSOUL(linear_model(), hyperprior=HYPER)):
        server, new = step(m, Total.of_nobody(CLIENTS))
        assert all(torch.equal(new[name], server[name]) for name in server)


def test_an_empty_round_makes_the_hyperpriors_step_under_inverse_weights() -> None:
    server, new = step(method(hyperprior=HYPER), Total.of_nobody(CLIENTS, ratio=False))
    phi_hyper, beta_hyper = hyper_gradients(server)
    torch.testing.assert_close(new["phi"], server["phi"] + RATE * phi_hyper)
    torch.testing.assert_close(new["beta"], server["beta"] + RATE * beta_hyper)
    flat, same = step(method(), Total.of_nobody(CLIENTS, ratio=False))
    assert torch.equal(flat["phi"], same["phi"])
    assert torch.equal(flat["beta"], same["beta"])


# --- EM -----------------------------------------------------------------------------------------


def scores(prior: Normal, beta: Tensor, z: Tensor) -> Tensor:
    """Summed I of clients whose posterior is one point each."""
    return prior.score(beta, z.unsqueeze(1), z.unsqueeze(1), "left").sum(0)


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "full"])
def test_one_em_step_at_rate_one_is_the_maximum_of_the_complete_data_likelihood(covariance: str) -> None:
    """Mean and second moments of the z that the clients drew, whatever beta was before."""
    prior = Normal(covariance, scale=1.5, mean=0.4)
    z = torch.randn(CLIENTS, 2, generator=generator(1)) * torch.tensor([1.0, 2.0]) + 0.7
    m = method(prior=prior, beta_step=fp.steps.EM())
    server = m.init(FACTS, train_key(), {})
    total = summed(CLIENTS, I=scores(prior, server["beta"], z), J=torch.zeros(6))
    beta = m.server_round(server, total, FACTS, train_key())["beta"]
    centred = z - z.mean(0)
    second = centred.T @ centred / CLIENTS
    torch.testing.assert_close(prior.mu(beta), z.mean(0))
    if covariance == "isotropic":
        torch.testing.assert_close(prior.sd(beta)[0] ** 2, second.trace() / 2)
    elif covariance == "diagonal":
        torch.testing.assert_close(prior.sd(beta) ** 2, second.diagonal())
    else:
        torch.testing.assert_close(prior.sigma(beta), second)


def test_em_stands_still_at_the_mode_of_the_posterior_of_beta() -> None:
    """The hyperprior enters divided by b: sum_i (z_i - mu) / sigma^2 - mu / tau^2 = 0 is its fixed point."""
    prior = Normal(scale=1.5, learn_scale=False)
    z = torch.randn(CLIENTS, 2, generator=generator(1)) + 2.0
    tau, sigma = 0.5, 1.5
    mode = z.sum(0) / sigma**2 / (CLIENTS / sigma**2 + 1 / tau**2)
    m = method(prior=prior, beta_step=fp.steps.EM(), hyperprior=fp.priors.Hyperprior(mean_scale=tau))
    server = m.init(FACTS, train_key(), {})
    beta = server["beta"].clone()
    beta[:2] = mode
    total = summed(CLIENTS, I=scores(prior, beta, z), J=torch.zeros(6))
    new = m.server_round(server | {"beta": beta}, total, FACTS, train_key())["beta"]
    torch.testing.assert_close(new, beta)


def test_em_weights_partial_rounds() -> None:
    """The sum over |A| clients stands for b of them, so the mean moves to the mean of those who came."""
    prior = Normal(scale=1.0)
    z = torch.randn(ACTIVE, 2, generator=generator(1))
    m = method(prior=prior, beta_step=fp.steps.EM())
    server = m.init(FACTS, train_key(), {})
    total = summed(ACTIVE, I=scores(prior, server["beta"], z), J=torch.zeros(6))
    new = m.server_round(server, total, FACTS, train_key())["beta"]
    torch.testing.assert_close(new[:2], z.mean(0))


# --- what is fixed, and projections -------------------------------------------------------------


@pytest.mark.parametrize("beta_step", [fp.steps.SGD(RATE), fp.steps.Adam(), fp.steps.EM()])
@pytest.mark.parametrize(("mean", "scale"), [(True, False), (False, True), (False, False)])
def test_what_is_fixed_does_not_move(beta_step: Any, mean: bool, scale: bool) -> None:
    prior = Normal(scale=1.5, mean=0.4, learn_mean=mean, learn_scale=scale)
    server, new = step(method(prior=prior, beta_step=beta_step), message())
    assert torch.equal(new["beta"][:2], server["beta"][:2]) is not mean
    assert torch.equal(new["beta"][2:], server["beta"][2:]) is not scale


def test_theta_stays_in_its_projection_sets() -> None:
    prior = Normal(scale=1.5, bounds=(1.0, 2.0), ball=0.3)
    m = method(
        prior=prior, phi_step=fp.steps.PhiStep(fp.steps.SGD(1e3), ball=5.0), beta_step=fp.steps.SGD(1e3)
    )
    for sign in (1.0, -1.0):
        total = summed(ACTIVE, I=sign * torch.ones(3), J=sign * torch.ones(6))
        _, new = step(m, total)
        assert float(new["phi"].norm()) == pytest.approx(5.0)
        assert float(new["beta"][:2].norm()) == pytest.approx(0.3)
        assert float(new["beta"][2].exp()) == pytest.approx(2.0 if sign > 0 else 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fp.priors.Hyperprior(phi_scale=0.0),
        lambda: fp.priors.Hyperprior(mean_scale=-1.0),
        lambda: fp.priors.Hyperprior(log_scale=(0.0, 0.0)),
        lambda: method(prior="full", hyperprior=fp.priors.Hyperprior(log_scale=(0.0, 1.0))),
    ],
)
def test_impossible_hyperpriors_are_refused(make: Any) -> None:
    with pytest.raises(SettingsError):
        make()
