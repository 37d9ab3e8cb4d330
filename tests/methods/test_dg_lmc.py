"""DG-LMC: the law of theta on Gaussian potentials, with its bias of rho and of the step, in closed form; and
FedSOUK's mean is the mode of theta's marginal."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.methods.base import Facts
from tests.helpers import (
    answers,
    asked,
    begun,
    by_name,
    cohort_of,
    generator,
    linear_model,
    ragged,
    seeded,
    train_key,
)
from tests.methods.gaussian_sites import WIDE, Sites, assert_centre, assert_variance, chain

RHO = (0.5, 0.2, 1.0)


def sites() -> Sites:
    return Sites(d=150, h=[1.0, 2.0, 0.5])


def marginal(s: Sites, rho: tuple[float, ...], prior: float = 0.0) -> tuple[Tensor, float]:
    """Mean and precision of theta: z_i integrated out leaves N(theta; m_i, 1/h_i + rho_i)."""
    each = 1 / (1 / s.curvatures + torch.tensor(rho, dtype=WIDE))
    return each @ s.m / (each.sum() + prior), float(each.sum() + prior)


def discretised(
    s: Sites, rho: tuple[float, ...], gamma: float, steps: int, prior: float = 0.0
) -> tuple[float, float]:
    """Stationary variance of theta, and its correlation per round, of one coordinate of the chain itself.

    z' = A z + B theta + noise, theta = r' z / R + noise / sqrt(R), r_i = 1/rho_i: a linear recursion in z.
    """
    r = 1 / torch.tensor(rho, dtype=WIDE)
    total = float(r.sum()) + prior
    one = 1 - gamma * (s.curvatures + r)
    keep = one**steps
    to = r / (s.curvatures + r) * (1 - keep)  # how far z_i follows theta
    noise = torch.diag(2 * gamma * (1 - one ** (2 * steps)) / (1 - one**2))
    a = torch.diag(keep) + torch.outer(to, r / total)
    noise = noise + torch.outer(to, to) / total
    z = torch.eye(len(rho), dtype=WIDE)
    for _ in range(5000):
        z = a @ z @ a.T + noise
    variance = float(r @ z @ r) / total**2 + 1 / total
    lagged = float(r @ a @ z @ r) / total**2 + float(r @ to) / total**2
    return variance, lagged / variance


def test_the_closed_forms_agree_as_the_step_vanishes() -> None:
    s = sites()
    variance, _ = discretised(s, RHO, 1e-4, 3000)
    _, precision = marginal(s, RHO)
    assert abs(variance * precision - 1) < 1e-3  # the step's bias is gamma times curvature / 2, at most
    assert precision < 0.7 * s.precision  # and rho's is there


@pytest.mark.parametrize("prior", [0.0, 2.0])
def test_theta_has_its_marginal(prior: float) -> None:
    s = sites()
    gamma, steps, rounds = 0.1, 5, 300
    method = fp.DGLMC(s.model, rho=by_name(RHO), step=gamma, local_steps=steps, prior_precision=prior)
    mean, precision = marginal(s, RHO, prior)
    draws = chain(method, s, rounds, mean, burn_in=40)
    variance, c = discretised(s, RHO, gamma, steps, prior)
    error = assert_variance(draws, mean, torch.full((s.d,), variance, dtype=WIDE), c, "theta")
    assert_centre(draws, mean, torch.full((s.d,), variance, dtype=WIDE), c)
    # With the posterior's own variance, without rho's bias, the prediction would fail.
    assert abs(variance * (s.precision + prior) - 1) > 10 * error
    # Steps on z_i given theta inflate it by gamma / 2 times their largest curvature, at most.
    assert 0 < variance * precision - 1 < gamma / 2 * (2 + 5)


def test_the_population_mean_is_the_mode_of_its_marginal() -> None:
    """FedSOUK with phi empty and sigma^2 = rho fixed, run by EM until it stands still."""
    g = generator(7)
    model = fp.Composition(None, seeded(nn.Linear(3, 1, bias=False).to(WIDE), 1), fp.likelihoods.Normal(0.5))
    clients = [
        (torch.randn(n, 3, generator=g, dtype=WIDE), 2 * torch.randn(n, generator=g, dtype=WIDE))
        for n in (8, 5, 2, 11)
    ]
    rho = 0.4
    precision, pull = torch.zeros(3, 3, dtype=WIDE), torch.zeros(3, dtype=WIDE)
    for x, y in clients:
        # y given theta is N(x theta, rho x x' + s2): its score and information.
        spread = torch.linalg.inv(rho * x @ x.T + 0.5 * torch.eye(len(x), dtype=WIDE))
        precision += x.T @ spread @ x
        pull += x.T @ spread @ y
    mode = torch.linalg.solve(precision, pull)
    prior = fp.priors.Normal(scale=rho**0.5, learn_scale=False)
    souk = fp.FedSOUL(model, prior=prior, chain=fp.chains.Chain(rao_blackwell=True)).fit(clients, rounds=150)
    torch.testing.assert_close(souk.prior_mean, mode, rtol=1e-4, atol=1e-4)
    method = fp.DGLMC(model, rho=rho, local_steps=5, samples=200, burn_in=20, thin=1)
    population = method.fit(clients, rounds=220)
    draws = population.published["samples"]
    # Rounds are correlated: measured at lag one, as of an AR(1).
    centred = draws - draws.mean(0)
    c = float((centred[1:] * centred[:-1]).sum() / centred.square().sum())
    size = len(draws) * (1 - c) / (1 + c)
    off = draws.mean(0) - mode
    # Chi-square of three dimensions, 25 has probability 2e-5; the step's bias is in the covariance alone, by
    # a factor of at most 1 / (1 - gamma_i q_i / 2), gamma_i q_i = 1/4.
    assert float(off @ precision @ off) * size < 25 * 8 / 7
    assert float(mode @ precision @ mode) * size > 10 * 25  # zero, say, is far from it


def test_what_is_sent_are_the_sums_of_the_gibbs_step() -> None:
    s = sites()
    method = fp.DGLMC(s.model, rho=by_name(RHO), step=0.1, local_steps=2)
    cohort, key = s.cohort(), train_key()
    server, local = begun(method, cohort, s.facts, key)
    done = answers(method, cohort, local, method.broadcast(server), key)
    r = 1 / torch.tensor(RHO, dtype=WIDE)
    torch.testing.assert_close(done.total.plain["1/rho"], r.sum().reshape(1))
    torch.testing.assert_close(done.total.plain["z/rho"], r @ done.local["z"])
    assert method.private == ()
    after = method.server_round(server, done.total, s.facts, key)["w"]
    xi = key.at(purpose="theta").normal(key.server(), (s.d,), WIDE)[0]
    torch.testing.assert_close(after, (r @ done.local["z"]) / r.sum() + xi / r.sum().sqrt())


def test_what_nobody_gave_comes_from_the_curvature() -> None:
    s = sites()
    method = fp.DGLMC(s.model)
    cohort, key = s.cohort(), train_key()
    (question,) = method.questions(s.facts, key)
    known, done = asked(question, cohort, {}, key)
    assert known == {}  # it stays with the client
    assert (done.total.weighted, done.total.plain, done.bytes_up) == ({}, {}, 0)
    torch.testing.assert_close(done.local["curvature"], s.curvatures)
    server, local = begun(method, cohort, s.facts, key)
    sent = answers(method, cohort, local, method.broadcast(server), key).total.plain
    torch.testing.assert_close(sent["1/rho"], s.curvatures.sum().reshape(1))


def test_clients_without_data_and_everyone_always() -> None:
    """With rho from the curvature such a client has no say; with a given one its z follows theta."""
    population = fp.DGLMC(linear_model(), samples=4).fit(ragged((4, 0, 6)), rounds=8)
    held = population.store.get(torch.arange(3), torch.device("cpu"))  # type: ignore[union-attr]
    assert torch.equal(held["z"][1], fp.DGLMC(linear_model()).initial_w())
    assert bool(torch.isfinite(population.published["samples"]).all())
    given = fp.DGLMC(linear_model(), samples=4, rho=0.1, step=0.01).fit(ragged((4, 0, 6)), rounds=8)
    held = given.store.get(torch.arange(3), torch.device("cpu"))  # type: ignore[union-attr]
    assert not torch.equal(held["z"][1], fp.DGLMC(linear_model()).initial_w())
    with pytest.raises(SettingsError, match="every client in every round"):
        fp.DGLMC(linear_model()).fit(ragged((4, 6)), rounds=8, participation=0.5)


def test_a_client_that_is_not_finite_is_left_out_and_keeps_its_model() -> None:
    method = fp.DGLMC(linear_model(), rho=0.1, step=1e-3, local_steps=2)
    clients = ragged((3, 4))
    clients[1] = (clients[1][0] * 1e30, clients[1][1] * 1e30)
    cohort = cohort_of(method.model, clients)
    server, local = begun(method, cohort, Facts(2, 10), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    assert done.left_out == (1,)
    assert float(done.total.plain["1/rho"]) == pytest.approx(10)
    assert torch.equal(done.local["z"][1], local["z"][1])
    assert not torch.equal(done.local["z"][0], local["z"][0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"local_steps": 0}, "local_steps"),
        ({"rho": 0.0}, "rho.* must be a positive"),
        ({"rho": {"a": 0.1, "b": -1.0}}, "rho.* must be a positive"),
        ({"rho": [0.1, 0.2]}, "rho must be a positive finite number or a mapping"),
        ({"step": 0.0}, "step must be a positive"),
        ({"batch": 0}, "batch must be a whole number"),
        ({"prior_precision": float("inf")}, "prior_precision"),
        ({"compressor": "qsgd"}, "does not compress"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        fp.DGLMC(linear_model(), **settings)


def test_one_rho_for_each_client() -> None:
    named = by_name(RHO)
    with pytest.raises(SettingsError, match="rho: there is no client 'client-2'"):
        fp.DGLMC(linear_model(), rho=named).fit(ragged((4, 6)), rounds=8)
    with pytest.raises(SettingsError, match="rho: no value for client 'client-3'"):
        fp.DGLMC(linear_model(), rho=named).fit(ragged((4, 6, 2, 3)), rounds=8)
