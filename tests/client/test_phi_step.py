"""The server's step on a network's phi: a weight decay that is worth as many examples, few or many."""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.client.phi_step import PhiStep
from fedpop.models.base import Model
from fedpop.server.optimisers import Adam, AdamW, Optimiser
from tests.helpers import generator

WORTH, LARGE = fp.steps.NetworkAdam().worth, fp.steps.NetworkAdam().least


def network(width: int = 32, **more: nn.Module) -> fp.Composition:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 32), nn.Tanh())
    return fp.Composition(layers, nn.Linear(32, 1), "bernoulli", **more)


def clients(sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = generator(0)
    return [(torch.randn(n, 3, generator=g), (torch.rand(n, generator=g) < 0.5).float()) for n in sizes]


@pytest.mark.parametrize(
    ("examples", "decay"),
    [(700, WORTH / 700), (1183, WORTH / 1183), (1184, 0.0), (20, 1.0), (0, 1.0), (math.inf, 0.0)],
)
def test_weights_decay_as_under_a_prior_that_is_worth_so_many_examples(examples: float, decay: float) -> None:
    """Where there are more weights (1,184) than examples."""
    step = PhiStep().step(network(), examples)
    assert isinstance(step, AdamW)
    assert step.decay == pytest.approx(decay)


def test_a_small_network_maximises_the_likelihood_that_it_is_judged_by() -> None:
    small = network(width=4)
    assert small.weights < LARGE
    step = PhiStep().step(small, 20)
    assert isinstance(step, AdamW)
    assert step.decay == 0


def test_others_have_none() -> None:
    linear = fp.Composition(nn.Linear(300, 2, bias=False), nn.Linear(2, 1, bias=False), "normal")
    assert type(PhiStep().step(linear, 20)) is Adam
    assert type(PhiStep(Adam(0.03)).step(network(), 20)) is Adam


def test_fixed_effects_are_left_alone() -> None:
    step = PhiStep().step(network(fixed=nn.Linear(3, 1, bias=False)), 20)
    assert isinstance(step, AdamW)
    assert (step.decay, step.weights) == (1.0, 1184)
    x = torch.ones(1187)
    moved, _ = step.step(x, torch.zeros(1187), step.init(x), torch.ones(1187), 10, 100)
    assert bool((moved[:1184] < 1).all())
    assert bool((moved[1184:] == 1).all())


@pytest.mark.parametrize("participation", [None, 2])
def test_the_server_knows_how_many_examples_everyone_has(
    monkeypatch: pytest.MonkeyPatch, participation: int | None
) -> None:
    seen = []
    real = PhiStep.step

    def watched(self: PhiStep, model: Model, examples: float = math.inf) -> Optimiser:
        seen.append(examples)
        return real(self, model, examples)

    monkeypatch.setattr(PhiStep, "step", watched)
    fp.FedSOUL(network()).fit(clients((5, 0, 7, 3)), rounds=3, participation=participation, seed=0)
    assert seen[-3:] == [15, 15, 15]


def test_a_network_with_few_examples_does_not_learn_them_by_heart() -> None:
    """Labels that nothing explains: without decay it is sure of them, and wrong."""
    data = [(*c, *t) for c, t in zip(clients((10,) * 20), clients((40,) * 20), strict=True)]
    told = {}
    for name, step in (("plain", Adam(0.03)), ("default", None)):
        held = [fp.Client(x, y, test=(u, v)) for x, y, u, v in data]
        population = fp.FedSOUL(network(), phi_step=step).fit(held, rounds=200, seed=0)
        told[name] = fp.evaluate(population, "test").pooled["nll"]
    assert told["plain"] > math.log(2) + 0.1
    assert told["default"] < math.log(2) + 0.05
