"""L2GD: one coin for all, steps towards the mean taken when it arrives, and the closed-form minimiser."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Total
from fedpop.methods.base import Facts
from tests.helpers import FRAME, answers, cohort_of, generator, seeded, train_key

WIDE = torch.float64
RATE, LAM, P = 0.3, 0.8, 0.4
SIZES = (4, 7, 5)


def quadratic(k: int = 2) -> fp.Composition:
    return fp.Composition(None, seeded(nn.Linear(k, 1, bias=False).to(WIDE), 1), fp.likelihoods.Normal(1.0))


def clients_of(*sizes: int, k: int = 2) -> list[tuple[Tensor, Tensor]]:
    g = generator(7)
    out = []
    for n in sizes:
        x = torch.randn(n, k, generator=g, dtype=WIDE)
        out.append((x, 2 * torch.randn(n, generator=g, dtype=WIDE)))
    return out


def curvature(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """H and c of f(w) = w' H w / 2 - c' w + constant."""
    return x.mT @ x / len(y), x.mT @ y / len(y)


def method(**settings: Any) -> fp.L2GD:
    settings = {"lam": LAM, "p": P, "local": fp.LocalSGD(rate=RATE)} | settings
    return fp.L2GD(quadratic(), **settings)


def gradients(clients: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """grad f_i(x_i), ``[b, D]``."""
    pairs = [curvature(*c) for c in clients]
    return torch.stack([h @ own - c for (h, c), own in zip(pairs, x, strict=True)])


def one_toss(l2gd: fp.L2GD, clients: Any, x: Tensor, averaging: bool) -> Tensor:
    """Everyone's x after this coin, the step that is due at its end included."""
    facts, cohort = Facts(len(x), 10), cohort_of(l2gd.model, clients)
    w = l2gd.initial_w()
    server = l2gd.init(facts, train_key(), {}) | {
        "due": torch.tensor(False),
        "averaging": torch.tensor(averaging),
        "rate": w.new_tensor(RATE),
    }
    broadcast = l2gd.broadcast(server)
    assert set(broadcast) == {"averaging", "rate"}
    done = answers(l2gd, cohort, {"x": x}, broadcast, train_key())
    server = l2gd.server_round(server, done.total, facts, train_key())
    return l2gd.personalise(l2gd.publish(server), cohort, done.local, train_key())["z"]


def test_the_direction_is_unbiased_over_the_coin() -> None:
    """p times one move and 1 - p times the other is a step along b grad F, exactly."""
    clients = clients_of(*SIZES)
    x = torch.randn(3, 2, generator=generator(1), dtype=WIDE)
    moves = {coin: one_toss(method(), clients, x, coin) - x for coin in (True, False)}
    slope = gradients(clients, x)
    torch.testing.assert_close(moves[False], -RATE / (1 - P) * slope, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(moves[True], -RATE * LAM / P * (x - x.mean(0)), rtol=1e-13, atol=1e-14)
    expected = -RATE * (slope + LAM * (x - x.mean(0)))
    torch.testing.assert_close(P * moves[True] + (1 - P) * moves[False], expected, rtol=1e-13, atol=1e-14)
    # b grad F, by autograd of F itself
    leaf = x.clone().requires_grad_()
    losses = [0.5 * (a @ own - y).square().mean() for (a, y), own in zip(clients, leaf, strict=True)]
    whole = sum(losses) / 3 + LAM / 6 * (leaf - leaf.mean(0)).square().sum()
    (g,) = torch.autograd.grad(whole, leaf)
    torch.testing.assert_close(expected, -RATE * 3 * g, rtol=1e-13, atol=1e-14)


def coins(population: fp.Population) -> list[bool]:
    """Whether a round averaged, seen from outside: only then are bytes sent."""
    sent = [0, *(m["bytes_up"] for m in population.history)]
    return [now > before for before, now in pairwise(sent)]


@pytest.mark.parametrize("rounds", [1, 2, 5, 16, 17, 18, 19])
def test_the_protocol_computes_the_method_as_written(rounds: int) -> None:
    """The paper's loop with the same coins; the last round may be of either kind."""
    clients = clients_of(*SIZES)
    schedule = fp.steps.Polynomial(0.3)
    population = method(schedule=schedule).fit(clients, rounds=rounds, seed=3)
    x = method().initial_w().expand(3, -1)
    for k, averaging in enumerate(coins(population)):
        rate = RATE * schedule.factor(k, rounds)
        slope = LAM / P * (x - x.mean(0)) if averaging else gradients(clients, x) / (1 - P)
        x = x - rate * slope
    for i, (a, _) in enumerate(clients):
        torch.testing.assert_close(population.predict(i, a).mean, a @ x[i], rtol=1e-12, atol=1e-13)
    # What is left to do after the last round is done by personalise, and not twice.
    again = population.predict(0, clients[0][0]).mean
    assert torch.equal(again, population.predict(0, clients[0][0]).mean)


def test_coins_are_keyed_by_seed_and_round() -> None:
    clients = clients_of(*SIZES)
    seen = [coins(method().fit(clients, rounds=24, seed=s)) for s in (0, 0, 1)]
    assert seen[0] == seen[1] != seen[2]
    assert {True, False} == set(seen[0])
    # A longer run tosses the same coins, and so does one of other clients.
    assert coins(method().fit(clients[:2], rounds=30, seed=0))[:24] == seen[0]
    tossed = 1000
    l2gd, w = method(), method().initial_w()
    heads = sum(bool(l2gd._next(k, w, Facts(3, 1), Key(5))["averaging"]) for k in range(tossed))
    assert abs(heads / tossed - P) < 4 * (P * (1 - P) / tossed) ** 0.5


def error_moments(
    h: Tensor, c: Tensor, rounds: int, rate: Any, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The minimiser of F for scalar x_i, and the exact mean and second moment of the error over coins."""
    b = len(h)
    towards = torch.eye(b, dtype=WIDE) - 1 / b
    best = torch.linalg.solve(h.diag() + LAM * towards, c)
    mean = start - best
    second = torch.outer(mean, mean)
    for k in range(rounds):
        new_mean, new_second = torch.zeros_like(mean), torch.zeros_like(second)
        for chance, matrix, slope in (
            (1 - P, rate(k) / (1 - P) * h.diag(), rate(k) / (1 - P) * (h * best - c)),
            (P, rate(k) * LAM / P * towards, rate(k) * LAM / P * towards @ best),
        ):
            a = torch.eye(b, dtype=WIDE) - matrix
            cross = torch.outer(a @ mean, -slope)
            new_mean = new_mean + chance * (a @ mean - slope)
            new_second = new_second + chance * (
                a @ second @ a.mT + cross + cross.mT + torch.outer(slope, slope)
            )
        mean, second = new_mean, new_second
    return best, mean, second


def test_decreasing_steps_reach_the_closed_form_minimiser() -> None:
    """The tolerance is derived: the exact root mean square error over coins, which falls towards zero."""
    clients = clients_of(4, 7, 5, k=1)
    pairs = [curvature(*c) for c in clients]
    h, c = (torch.stack([p[j].flatten()[0] for p in pairs]) for j in (0, 1))
    schedule = fp.steps.Polynomial(0.9)
    l2gd = fp.L2GD(quadratic(1), lam=LAM, p=P, local=fp.LocalSGD(rate=0.7), schedule=schedule)
    start = l2gd.initial_w().expand(3)
    sizes = []
    for rounds in (30, 1000):
        best, mean, second = error_moments(h, c, rounds, lambda k: 0.7 * schedule.factor(k, 1), start)
        rms = float(second.trace().sqrt())
        population = l2gd.fit(clients, rounds=rounds, seed=1)
        found = torch.stack([population.predict(i, [[1.0]]).mean[0] for i in range(3)])
        # Chebyshev: four root mean squares are exceeded by one seed in sixteen at most.
        assert float((found - best).norm()) < 4 * rms
        sizes.append(rms)
    assert float(mean.norm()) < 0.02 * float((start - best).norm())
    assert sizes[1] < 0.25 * sizes[0]
    assert sizes[1] < 0.05 * float((start - best).norm())


def test_every_client_is_in_the_mean_once() -> None:
    clients = clients_of(*SIZES)
    for seed in range(20):
        population = method().fit(clients, rounds=4, seed=seed)
        if coins(population)[-1]:
            break
    own = population.store.get(torch.arange(3), torch.device("cpu"))["x"]
    torch.testing.assert_close(population.published["z"], own.mean(0), rtol=1e-14, atol=1e-15)
    assert float(own.var(0).sum()) > 0.01
    assert float(population.published["pull"]) == pytest.approx(RATE * LAM / P, rel=1e-15)


def test_bytes_are_those_of_averaging_rounds() -> None:
    clients = clients_of(*SIZES)
    population = method().fit(clients, rounds=12, seed=2)
    averaged = coins(population)
    assert population.totals["bytes_up"] == sum(averaged) * 3 * (FRAME + 2 * 8)
    # Down: the coin and the rate always; the mean and its pull in the first round and after averaging.
    means = 1 + sum(averaged[:-1])
    assert population.totals["bytes_down"] == 3 * (12 * (1 + 8) + means * (2 + 1) * 8)
    # Averaging costs no pass through the model, and has no loss to tell.
    assert population.totals["head_steps"] == sum(SIZES) * (12 - sum(averaged))
    assert [m["loss"] is None for m in population.history] == averaged


def test_a_broken_client_is_left_out_of_the_mean_and_keeps_its_model() -> None:
    clients = clients_of(*SIZES)
    l2gd, facts = method(), Facts(3, 10)
    cohort = cohort_of(l2gd.model, clients)
    server = l2gd.init(facts, train_key(), {}) | {"averaging": torch.tensor(True)}
    x = torch.tensor([[1.0, 2.0], [float("inf"), 0.0], [3.0, -2.0]], dtype=WIDE)
    done = answers(l2gd, cohort, {"x": x}, l2gd.broadcast(server), train_key())
    assert done.left_out == (1,)
    assert torch.equal(done.local["x"], x)
    after = l2gd.server_round(server, done.total, facts, train_key())
    assert torch.equal(after["w"], torch.tensor([2.0, 0.0], dtype=WIDE))
    # Nobody: the mean stays, and pulls nobody.
    empty = l2gd.server_round(server, Total.of_nobody(3), facts, train_key())
    assert torch.equal(empty["w"], server["w"])
    assert float(l2gd.publish(empty)["pull"]) == 0


def test_newcomers() -> None:
    """With data: the prox at the mean, which is what clients solve at the minimiser; without: the mean."""
    clients = clients_of(*SIZES)
    l2gd = method(newcomer=fp.LocalSGD(epochs=150, rate=0.5))
    population = l2gd.fit(clients, rounds=6)
    xbar = population.published["z"]
    x, y = clients_of(6)[0]
    h, c = curvature(x, y)
    values = torch.linalg.eigvalsh(h) + LAM
    assert float((1 - 0.5 * values).abs().max()) ** 150 < 1e-14
    expected = torch.linalg.solve(h + LAM * torch.eye(2, dtype=WIDE), c + LAM * xbar)
    torch.testing.assert_close(population.new_client(x, y).predict(x).mean, x @ expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(population.new_client().predict(x).mean, x @ xbar, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lam": 0.0}, "lam must be a positive"),
        ({"lam": 300.0, "local": fp.LocalSGD(rate=1e-4)}, "newcomer.rate 0.01 x lam 300 = 3: .* unstable"),
        ({"p": 0.0}, "L2GD: p must be"),
        ({"p": 1.0}, "L2GD: p must be"),
        ({"local": fp.LocalSGD(rate=1.0)}, "below 2 p / lam"),
        ({"compressor": "qsgd"}, "leave compressor and clip out"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        method(**settings)


def test_everyone_must_take_part() -> None:
    with pytest.raises(SettingsError, match="L2GD needs every client"):
        method().fit(clients_of(*SIZES), rounds=1, participation=0.5)
