"""FSGLD: with exact surrogates the drift is the full gradient at every client, so that long visits leave the
posterior's covariance right where DSGLD's is wrong, by as much as its own closed form says."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client.potential import Potential
from fedpop.errors import SettingsError
from fedpop.methods.base import Facts
from tests.helpers import answers, begun, cohort_of, generator, linear_model, seeded, train_key
from tests.methods.gaussian_sites import WIDE, Sites, assert_centre, assert_variance, chain

GAMMA, STEPS, ROUNDS = 0.1, 8, 150


def sites() -> Sites:
    return Sites(d=60, h=[1.0, 2.0, 0.5], prior=0.5)


def prepared(method: fp.FSGLD, cohort: Any, facts: Facts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The server's broadcast and everyone's q_i after they were asked for."""
    server, local = begun(method, cohort, facts, train_key())
    return method.broadcast(server), local


def heads(outputs: int = 1) -> tuple[fp.Composition, list[tuple[Tensor, Tensor]]]:
    """Sites of different sizes, one of them empty, with correlated features."""
    g = generator(3)
    model = fp.Composition(None, seeded(nn.Linear(4, outputs).to(WIDE), 2), fp.likelihoods.Normal(0.7))
    mix = torch.randn(4, 4, generator=g, dtype=WIDE)
    clients = [
        (torch.randn(n, 4, generator=g, dtype=WIDE) @ mix, torch.randn(n, outputs, generator=g, dtype=WIDE))
        for n in (9, 3, 0, 6)
    ]
    return model, clients if outputs > 1 else [(x, y[:, 0]) for x, y in clients]


@pytest.mark.parametrize("outputs", [1, 2])
def test_with_exact_surrogates_every_client_has_the_full_gradient(outputs: int) -> None:
    model, clients = heads(outputs)
    method = fp.FSGLD(model, step=0.1, prior_precision=0.3, surrogate="full")
    cohort = cohort_of(model, clients)
    given, local = prepared(method, cohort, Facts(4, 10))
    w = torch.randn(method.size, generator=generator(4), dtype=WIDE).expand(4, -1)
    full = -0.3 * w[0] - Potential(model, cohort)(w, train_key())[1].sum(0)
    _, drift = method.drift_at(w, Potential(model, cohort), given, local, train_key())
    torch.testing.assert_close(drift, full.expand(4, -1))
    _, wrong = method.replace(conducive=False).drift_at(
        w, Potential(model, cohort), given, local, train_key()
    )
    assert float((wrong - full).norm(dim=1).min()) > 0.1 * float(full.norm())
    torch.testing.assert_close(wrong.mean(0), full)  # right on average only


@pytest.mark.parametrize("surrogate", ["full", "diagonal"])
def test_whatever_the_surrogates_the_conducive_gradient_is_zero_on_average(surrogate: str) -> None:
    """A network, local SGD and curvature cut at zero: unbiased all the same."""
    net = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(WIDE), 5)
    model = fp.Composition(net[:2], net[2], "categorical")
    g = generator(6)
    clients = [(torch.randn(n, 3, generator=g, dtype=WIDE), torch.arange(n) % 2) for n in (5, 1, 8)]
    method = fp.FSGLD(model, surrogate=surrogate, local=fp.LocalSGD(epochs=5, rate=0.2), batch=3)
    cohort = cohort_of(model, clients)
    given, local = prepared(method, cohort, Facts(3, 10))
    w = method.initial_w().expand(3, -1) + 0.1
    key = train_key(3)
    u = Potential(model, cohort, 3)
    _, drift = method.drift_at(w, u, given, local, key)
    torch.testing.assert_close(drift.mean(0), -w[0] - u(w, key)[1].sum(0))
    precision = local["precision"]
    least = precision if surrogate == "diagonal" else torch.linalg.eigvalsh(precision)
    assert float(least.min()) > -1e-10
    assert float(given["gamma"]) > 0


def test_near_where_the_surrogates_were_made_the_clients_drifts_agree() -> None:
    """An expansion has U_i's gradient there: what remains is first order in the distance, 1e-3."""
    net = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(WIDE), 5)
    model = fp.Composition(net[:2], net[2], "categorical")
    g = generator(6)
    clients = [(torch.randn(n, 3, generator=g, dtype=WIDE), torch.arange(n) % 2) for n in (5, 1, 8)]
    method = fp.FSGLD(model, local=fp.LocalSGD(rate=1e-6), surrogate="diagonal")
    cohort = cohort_of(model, clients)
    given, local = prepared(method, cohort, Facts(3, 10))
    w, u = method.initial_w().expand(3, -1) + 1e-3, Potential(model, cohort)
    _, drift = method.drift_at(w, u, given, local, train_key())
    _, apart = method.replace(conducive=False).drift_at(w, u, given, local, train_key())
    assert float((drift - drift.mean(0)).norm()) < 0.02 * float((apart - apart.mean(0)).norm())


def test_long_visits_leave_fsgld_right() -> None:
    s = sites()
    method = fp.FSGLD(s.model, step=GAMMA, prior_precision=s.prior, local_steps=STEPS)
    draws = chain(method, s, ROUNDS, s.mean)
    # ULA on the full posterior, whoever is visited.
    ula = torch.full((s.d,), 1 / (s.precision * (1 - GAMMA * s.precision / 2)), dtype=WIDE)
    c = (1 - GAMMA * s.precision) ** STEPS
    assert_variance(draws, s.mean, ula, c, "FSGLD")
    assert_centre(draws, s.mean, ula, c)


def test_long_visits_make_dsgld_wrong_as_its_closed_form_says() -> None:
    """w' = a_i w + (1 - a_i) m'_i + noise, a_i = (1 - gamma (b h_i + lambda))^T, i uniform."""
    s = Sites(d=60, h=[0.3, 0.6, 0.2], prior=0.5)
    method = fp.FSGLD(s.model, step=GAMMA, prior_precision=s.prior, local_steps=STEPS, conducive=False)
    draws = chain(method, s, ROUNDS, s.mean)
    q = 3 * s.curvatures + s.prior
    one = 1 - GAMMA * q
    a, noise = one**STEPS, 2 * GAMMA * (1 - one ** (2 * STEPS)) / (1 - one**2)
    pulls = (1 - a).unsqueeze(1) * (3 * s.curvatures / q).unsqueeze(1) * s.m
    mean = pulls.mean(0) / (1 - a.mean())
    moved = pulls + (a.unsqueeze(1) - 1) * mean  # of the mean, by client
    variance = (noise.mean() + moved.square().mean(0)) / (1 - a.square().mean())
    error = assert_variance(draws, mean, variance, float(a.mean()), "DSGLD")
    right = 1 / (s.precision * (1 - GAMMA * s.precision / 2))
    assert abs(float(variance.mean()) / right - 1) > 10 * error
    fsgld = fp.FSGLD(s.model, step=GAMMA, prior_precision=s.prior, local_steps=STEPS)
    c = (1 - GAMMA * s.precision) ** STEPS
    expected = torch.full((s.d,), right, dtype=WIDE)
    assert_variance(chain(fsgld, s, ROUNDS, s.mean), s.mean, expected, c, "FSGLD on the same sites")


def test_a_run_visits_one_client_at_a_time_and_keeps_its_surrogate(tmp_path: Any) -> None:
    model, clients = heads()
    population = fp.FSGLD(model, samples=5).fit(clients, rounds=12)
    assert all(m["active"] == 1 for m in population.history)
    held = population.store.get(torch.arange(4), torch.device("cpu"))  # type: ignore[union-attr]
    assert held["precision"].shape == (4, 5, 5)
    assert float(held["precision"][2].abs().max()) == 0  # no data, no surrogate
    assert population.published["samples"].shape == (5, 5)
    with pytest.raises(SettingsError, match="one client at a time"):
        fp.FSGLD(model).fit(clients, rounds=12, participation=2)


def test_a_client_that_is_not_finite_has_no_surrogate_and_does_not_move_the_chain() -> None:
    model, clients = heads()
    clients[0] = (clients[0][0] * 1e200, clients[0][1] * 1e200)
    method = fp.FSGLD(model, step=0.01)
    cohort = cohort_of(model, clients)
    given, local = prepared(method, cohort, Facts(4, 10))
    assert bool(torch.isfinite(given["precision"]).all())
    assert float(local["precision"][0].abs().max()) == 0
    torch.testing.assert_close(local["precision"].sum(0), given["precision"])
    one, own = cohort.select(torch.tensor([0])), {n: v[:1] for n, v in local.items()}
    done = answers(method, one, own, given, train_key(), of=4)
    assert done.left_out == (0,)
    server, _ = begun(method, cohort, Facts(4, 10), train_key())
    assert method.server_round(server, done.total, Facts(4, 10), train_key()) is server


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 1.5}, "local_steps"),
        ({"step": -1.0}, "step must be a positive"),
        ({"batch": 0}, "batch must be a whole number"),
        ({"prior_precision": -1.0}, "prior_precision"),
        ({"surrogate": "banded"}, "surrogate must be one of"),
        ({"compressor": "qsgd"}, "does not compress"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        fp.FSGLD(linear_model(), **settings)


def test_a_full_surrogate_of_a_large_model_is_refused() -> None:
    with pytest.raises(SettingsError, match="use surrogate='diagonal'"):
        fp.FSGLD(linear_model(k=300, d=2), surrogate="full")
