"""The prior's scale is found from any start, whoever takes turns: it neither collapses nor runs away.

Oracle: two runs from a scale five times too small and five times too large must end at the same place, since
the likelihood has one; with many examples that is near the truth, 1/sqrt(2 b d) = .06 of it being chance.
"""

import math

import torch
from torch import nn

import fedpop as fp
from tests.helpers import run_of

TRUTH = {"categorical": 1.0, "bernoulli": 1.0, "poisson": 0.3}


def population(family: str, n: int, clients: int = 24, features: int = 4, outputs: int = 1, seed: int = 0):
    """Heads z ~ N(0, truth^2) on ReLU features."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(clients):
        x = torch.randn(n, features, generator=g).clamp(min=0)
        w = TRUTH[family] * torch.randn(outputs, features + 1, generator=g)
        eta = x @ w[:, :features].mT + w[:, features]
        if family == "categorical":
            y = torch.multinomial(eta.softmax(1), 1, generator=g).squeeze(1)
        else:
            y = torch.bernoulli(eta.sigmoid(), generator=g) if family == "bernoulli" else None
            y = torch.poisson(eta.exp(), generator=g) if y is None else y
        out.append((x, y))
    return fp.Composition(None, nn.Linear(features, outputs), family), out


def path(model, clients, start: float, rounds: int, share: float, **settings) -> list[float]:
    """The prior's standard deviation after each round."""
    method = fp.FedSOUL(model, prior=fp.priors.Normal(scale=start, learn_mean=False), **settings)
    rule = fp.participation.Everyone() if share == 1 else fp.participation.Bernoulli(share)
    run = run_of(method, clients, rounds=rounds, rule=rule)
    return [run.train_round()["prior_sd"] for _ in range(rounds)]


def bounded(seen: list[float], start: float, truth: float) -> bool:
    return min(start, truth) / 3 <= min(seen) and max(seen) <= 3 * max(start, truth)


def ends_at_one_place(family: str, n: int) -> None:
    model, clients = population(family, n, outputs=3 if family == "categorical" else 1)
    truth, ends = TRUTH[family], []
    for start in (truth / 5, truth * 5):
        seen = path(model, clients, start, rounds=60, share=0.25)
        assert bounded(seen, start, truth)
        ends.append(seen[-1])
    assert max(ends) / min(ends) < 1.2
    if n >= 25:
        assert abs(math.log(ends[0] / truth)) < 0.25


def test_both_starts_end_at_one_place() -> None:
    """The other families are in tests/statistical."""
    ends_at_one_place("poisson", 25)


def test_clients_with_much_data_that_take_turns_do_not_collapse_the_prior() -> None:
    """64 features, 10 classes, 500 examples: 650 dimensions that ten transitions do not bring home. With the
    right-hand form of I and chains that stay behind, two rounds collapse it."""
    model, clients = population("categorical", 500, clients=20, features=64, outputs=10)
    for stateful in (True, False):
        chain = fp.chains.Chain(stateful=stateful)
        assert bounded(path(model, clients, 0.2, 8, 0.1, chain=chain), 0.2, 1.0)
