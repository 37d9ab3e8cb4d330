"""The server's step on a network's phi: a weight decay that is worth as many examples, few or many."""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.client.phi_step import WORTH, PhiStep
from fedpop.runtime.run import Run
from fedpop.server.optimisers import Adam, AdamW
from tests.helpers import generator


def network() -> fp.Composition:
    return fp.Composition(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1), "bernoulli")


def clients(sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = generator(0)
    return [(torch.randn(n, 3, generator=g), (torch.rand(n, generator=g) < 0.5).float()) for n in sizes]


@pytest.mark.parametrize(
    ("examples", "decay"),
    [(700, WORTH / 700), (50_000, WORTH / 50_000), (20, 1.0), (0, 1.0), (math.inf, 0.0)],
)
def test_weights_decay_as_under_a_prior_that_is_worth_so_many_examples(examples: float, decay: float) -> None:
    step = PhiStep().step(network(), examples)
    assert isinstance(step, AdamW)
    assert step.decay == pytest.approx(decay)
    assert step.weights == network().weights


def test_others_have_none() -> None:
    linear = fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False), "normal")
    assert type(PhiStep().step(linear, 20)) is Adam
    assert type(PhiStep(Adam(0.03)).step(network(), 20)) is Adam


@pytest.mark.parametrize("participation", [None, 2])
def test_everyones_examples_are_counted_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch, participation: int | None
) -> None:
    seen = []
    real = Run.train_round

    def watched(self: Run) -> dict[str, float | None]:
        seen.append(float(self.server["examples"]))
        return real(self)

    monkeypatch.setattr(Run, "train_round", watched)
    fp.FedSOUL(network()).fit(clients((5, 0, 7, 3)), rounds=3, participation=participation, seed=0)
    assert seen == [15.0] * 3
    asked = fp.FedSOUL(network(), phi_step=Adam(0.03)).questions(fp.algorithms.base.Facts(3, 1), None)
    assert "examples" not in [q.name for q in asked]


def test_a_network_with_few_examples_does_not_learn_them_by_heart() -> None:
    """Labels that nothing explains: without decay it is sure of them, and wrong."""
    data = [(*c, *t) for c, t in zip(clients((10,) * 20), clients((40,) * 20), strict=True)]
    told = {}
    for name, step in (("plain", Adam(0.03)), ("default", None)):
        torch.manual_seed(0)
        model = fp.Composition(
            nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()),
            nn.Linear(32, 1),
            "bernoulli",
        )
        held = [fp.Client(x, y, test=(u, v)) for x, y, u, v in data]
        population = fp.FedSOUL(model, phi_step=step).fit(held, rounds=200, seed=0)
        told[name] = fp.evaluate(population, "test").pooled["nll"]
    assert told["plain"] > math.log(2) + 0.1
    assert told["default"] < math.log(2) + 0.05
