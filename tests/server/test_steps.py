"""Schedules, optimisers and averages, against formulas and against torch's own."""

import math

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.priors.normal import Normal
from fedpop.server.averaging import Averaging, Gauge, aligner
from fedpop.server.optimisers import Schedule
from tests.helpers import generator, seeded

WIDE = torch.float64


# --- schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (fp.steps.Constant(), lambda k: 1.0),
        (fp.steps.Polynomial(0.6), lambda k: (1 + k) ** -0.6),
        (fp.steps.Polynomial(0.0), lambda k: 1.0),
        (fp.steps.Cosine(), lambda k: 0.5 * (1 + math.cos(math.pi * k / 100))),
        (fp.steps.Cosine(0.1), lambda k: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 100))),
        (fp.steps.Decay(), lambda k: 1.0 if k < 50 else 1 - (k - 50) / 50),
        (fp.steps.Decay(0.2, 0.1), lambda k: 1.0 if k < 20 else 0.1 + 0.9 * (1 - (k - 20) / 80)),
    ],
    ids=lambda value: str(value) if isinstance(value, Schedule) else "",
)
def test_schedules(schedule: Schedule, expected: object) -> None:
    for k in (0, 1, 19, 20, 49, 50, 51, 99):
        assert schedule.factor(k, 100) == pytest.approx(expected(k))


def test_the_scale_takes_quick_steps_where_no_features_are_learned() -> None:
    """By what a step of beta keeps: Adam's moments of the scale, or nothing."""
    beta, step = torch.tensor([0.0, 0.0, 0.0]), fp.steps.BetaStep()
    backbones = (None, nn.ReLU(), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    quick = []
    for backbone in backbones:
        model = fp.Composition(backbone, nn.Linear(2, 1, bias=False), "bernoulli")
        quick.append(bool(step.init(fp.FedSOUL(model).hierarchy, beta)))
    assert quick == [True, True, False, False]
    exact = fp.Composition(None, nn.Linear(2, 1, bias=False), "normal")
    assert not step.init(fp.FedSOUL(exact).hierarchy, beta)


def test_em_rates_fall_in_the_second_half() -> None:
    em = fp.steps.EM(1.0, 0.1)
    assert [em.at(k, 100) for k in (0, 49, 50, 75, 100)] == pytest.approx([1.0, 1.0, 1.0, 0.55, 0.1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: fp.steps.Polynomial(-1.0),
        lambda: fp.steps.Decay(1.0),
        lambda: fp.steps.Decay(-0.1),
        lambda: fp.steps.SGD(0.0),
        lambda: fp.steps.SGD(-1.0),
        lambda: fp.steps.Adam(0.0),
        lambda: fp.steps.Adam(beta1=1.0),
        lambda: fp.steps.AdamW(decay=-0.1),
        lambda: fp.steps.AdamW(0.5, decay=2.0),
        lambda: fp.steps.Adam(beta2=-0.1),
        lambda: fp.steps.EM(1.5),
        lambda: fp.steps.EM(0.1, 0.5),
        lambda: fp.steps.EM(0.0, 0.0),
        lambda: Averaging("mean"),
        lambda: Averaging(tail=0.0),
        lambda: Averaging(tail=1.1),
    ],
)
def test_impossible_steps_are_refused(make: object) -> None:
    with pytest.raises(SettingsError):
        make()


# --- optimisers ---------------------------------------------------------------------------------


def gradients(steps: int = 15) -> Tensor:
    return torch.randn(steps, 4, generator=generator(0), dtype=WIDE) * torch.tensor([1.0, 10.0, 0.1, 0.0])


def test_sgd_is_plain_ascent_with_a_schedule() -> None:
    x = start = torch.ones(4, dtype=WIDE)
    step, state = fp.steps.SGD(0.1, fp.steps.Polynomial(0.5)), {}
    for k, g in enumerate(gradients()):
        x, state = step.step(x, g, state, torch.full_like(x, 7.0), k, 15)
    factors = (1 + torch.arange(15, dtype=WIDE)) ** -0.5
    torch.testing.assert_close(x, start + 0.1 * factors @ gradients())


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.9)])
def test_adam_is_torchs_adam_in_relative_units(betas: tuple[float, float]) -> None:
    """One coordinate after the other, each with its own unit as learning rate; ascent; no epsilon."""
    unit = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=WIDE)
    mine = fp.steps.Adam(0.1, fp.steps.Constant(), *betas)
    x, state = torch.ones(4, dtype=WIDE), mine.init(torch.ones(4, dtype=WIDE))
    theirs = [torch.ones(1, dtype=WIDE, requires_grad=True) for _ in range(4)]
    groups = [{"params": [p], "lr": 0.1 * float(u)} for p, u in zip(theirs, unit, strict=True)]
    adam = torch.optim.Adam(groups, betas=betas, eps=1e-30, maximize=True)
    for k, g in enumerate(gradients()):
        x, state = mine.step(x, g, state, unit, k, 15)
        for p, one in zip(theirs, g, strict=True):
            p.grad = one.reshape(1)
        adam.step()
        torch.testing.assert_close(x, torch.cat(theirs).detach())
    assert float(x[3]) == 1.0  # a coordinate that never had a gradient stays


def test_adamw_is_torchs_adamw_in_relative_units() -> None:
    """A step shrinks x by rate * decay of itself, whatever its unit; torch's is per unit of its rate."""
    unit = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=WIDE)
    mine = fp.steps.AdamW(0.1, fp.steps.Polynomial(0.5), decay=0.3)
    x, state = torch.ones(4, dtype=WIDE), mine.init(torch.ones(4, dtype=WIDE))
    theirs = [torch.ones(1, dtype=WIDE, requires_grad=True) for _ in range(4)]
    groups = [{"params": [p], "weight_decay": 0.3 / float(u)} for p, u in zip(theirs, unit, strict=True)]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-30, maximize=True)
    for k, g in enumerate(gradients()):
        x, state = mine.step(x, g, state, unit, k, 15)
        for group, u, p, one in zip(adam.param_groups, unit, theirs, g, strict=True):
            group["lr"] = 0.1 * float(u) * (1 + k) ** -0.5
            p.grad = one.reshape(1)
        adam.step()
        torch.testing.assert_close(x, torch.cat(theirs).detach())


def test_adamw_without_decay_is_adam_and_spares_what_is_no_weight() -> None:
    x, unit, g = torch.ones(4, dtype=WIDE), torch.ones(4, dtype=WIDE), gradients(1)[0]
    adam, none, some = fp.steps.Adam(0.1), fp.steps.AdamW(0.1, decay=0.0), fp.steps.AdamW(0.1, decay=0.5)
    plain = adam.step(x, g, adam.init(x), unit, 0, 9)[0]
    assert torch.equal(none.step(x, g, none.init(x), unit, 0, 9)[0], plain)
    assert adam.for_weights(2) is adam
    spared = some.for_weights(3).step(x, g, some.init(x), unit, 0, 9)[0]
    torch.testing.assert_close(plain - spared, torch.tensor([0.05, 0.05, 0.05, 0.0], dtype=WIDE))


def test_adamw_on_the_server_decays_weights_and_not_the_noise() -> None:
    """One round from the same start: the same move, and every weight less by rate * decay of itself."""
    g = generator(0)
    clients = [(torch.randn(6, 3, generator=g), torch.randn(6, generator=g)) for _ in range(3)]
    body = seeded(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), 1)
    model = fp.Composition(body, seeded(nn.Linear(2, 1), 2), "normal")
    assert model.weights == model.phi_layout.size - 1  # the noise is learned
    ends = []
    for step in (fp.steps.Adam(0.01), fp.steps.AdamW(0.01, decay=2.0)):
        method = fp.FedSOUL(
            model, engine="sampled", start="random", phi_step=step, average=fp.steps.Averaging("last")
        )
        ends.append(method.fit(clients, rounds=1, progress=False).published["phi"])
    gap = ends[0] - ends[1]
    start = model.initial_phi()
    torch.testing.assert_close(gap[:-1], 0.02 * start[:-1], rtol=1e-4, atol=1e-6)
    assert float(gap[-1]) == 0


def test_adam_does_not_depend_on_the_scale_of_the_gradient() -> None:
    """So the same rate serves ten clients and a million."""
    ends = []
    for scale in (1.0, 1e6):
        adam = fp.steps.Adam(0.1)
        x, state = torch.ones(4, dtype=WIDE), adam.init(torch.ones(4, dtype=WIDE))
        for k, g in enumerate(gradients()):
            x, state = adam.step(x, scale * g, state, torch.ones_like(x), k, 15)
        ends.append(x)
    torch.testing.assert_close(ends[0], ends[1])


def test_a_rate_that_was_not_found_yet_cannot_step() -> None:
    with pytest.raises(SettingsError, match="trial rounds"):
        fp.steps.SGD(None).step(torch.ones(1), torch.ones(1), {}, torch.ones(1), 0, 1)


# --- averages -----------------------------------------------------------------------------------


def run(average: Averaging, thetas: Tensor, etas: Tensor, align: object = None) -> dict[str, Tensor]:
    state = average.init(torch.zeros_like(thetas[0]))
    for k, (theta, eta) in enumerate(zip(thetas, etas, strict=True)):
        state = average.update(state, theta, float(eta), k, len(thetas), align or (lambda t, _: t))
    return state


def test_the_averages() -> None:
    thetas = torch.randn(40, 3, generator=generator(1), dtype=WIDE)
    etas = torch.rand(40, generator=generator(2), dtype=WIDE)
    last = thetas[-1]
    iterate, tail, none = Averaging("iterate"), Averaging("tail", 0.25), Averaging("last")
    torch.testing.assert_close(iterate.value(run(iterate, thetas, etas), last), etas @ thetas / etas.sum())
    state = run(tail, thetas, etas)
    torch.testing.assert_close(tail.value(state, last), thetas[30:].mean(0))
    assert torch.equal(none.value(run(none, thetas, etas), last), last)
    halves = tail.halves(state)
    assert halves is not None
    torch.testing.assert_close(halves[0], thetas[30:35].mean(0))
    torch.testing.assert_close(halves[1], thetas[35:].mean(0))


def test_before_the_tail_the_last_iterate_is_published() -> None:
    average = Averaging("tail", 0.25)
    state = average.update(average.init(torch.zeros(2)), torch.ones(2), 1.0, 0, 40, lambda t, _: t)
    assert torch.equal(average.value(state, torch.ones(2)), torch.ones(2))
    assert average.halves(state) is None


@pytest.mark.parametrize("which", ["tail", "iterate"])
def test_an_average_over_one_theta_in_many_gauges_is_that_theta(which: str) -> None:
    """theta_k turns a little every round: nothing changes, and nothing may be averaged away."""
    model = fp.Composition(
        seeded(nn.Linear(3, 2, bias=False).to(WIDE), 1),
        nn.Linear(2, 1, bias=False).to(WIDE),
        fp.likelihoods.Normal(0.3),
    )
    prior = Normal()
    gauge = Gauge.of(model, prior)
    assert gauge is not None
    phi, beta = model.initial_phi(), torch.tensor([0.5, -0.3, 0.2], dtype=WIDE)
    thetas = []
    for k in range(40):
        c, s = math.cos(0.1 * k), math.sin(0.1 * k)
        a = (1 + 0.01 * k) * torch.tensor([[c, -s], [s, c]], dtype=WIDE)
        thetas.append(torch.cat(gauge.transform(phi, beta, a)))
    average = Averaging(which, 0.5)
    state = run(average, torch.stack(thetas), torch.ones(40, dtype=WIDE), aligner(model, prior))
    value = average.value(state, thetas[-1])
    reference = thetas[0] if which == "iterate" else thetas[20]
    torch.testing.assert_close(value, reference)
