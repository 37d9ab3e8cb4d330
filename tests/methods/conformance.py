"""What all methods are made of in tests that ask the same of each one in ``METHODS``.

Methods are made with the settings of ``SETTINGS``, where theirs are not the default ones, and run on a few
clients with tiny models in double precision.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.federation.participation import Active, Participation
from fedpop.message import Tensors, Total
from fedpop.methods import METHODS
from fedpop.methods.base import Algorithm, Round, usual_participation
from fedpop.run.run import Run, Settings
from fedpop.site.work import Update
from tests.helpers import generator, seeded

WIDE = torch.float64
CPU = torch.device("cpu")
NAMES = ("ada", "bea", "cem", "dag", "eve", "fay", "gus")
SIZES = (4, 3, 6, 5, 2, 3, 4)
"""Seven, so that there are two sums over three, and enough for the guard."""
EVERYONE = torch.arange(len(NAMES))

SHORT = {"local_steps": 3, "batch": 2, "chain": fp.chains.Chain(burn_in=4), "final": fp.chains.Final(2, 3, 2)}
SETTINGS: dict[str, dict[str, Any]] = {
    "FedSOUL": SHORT,
    "FedSOUK": SHORT,
    "FedRep": {"head": fp.LocalSGD(epochs=2)},
    "L2GD": {"p": 0.5, "local": fp.LocalSGD(rate=0.1)},
    "PFedMe": {"local": fp.LocalSGD(epochs=2, rate=0.01)},
    "PerFedAvg": {"alpha": 0.1, "local": fp.LocalSGD(rate=0.1)},
}
"""What is not left at its default: passes that would be long, and rates at which a few rounds show."""

ONLY: dict[str, tuple[str, ...]] = {
    "MaximumMarginalLikelihood": ("linear",),
    "FedDBE": ("linear", "softmax"),
    "PFedFDA": ("softmax",),
}
"""The models that a method is for, where these are not all."""

ADAPTED: dict[str, set[str]] = {n: {"log_step", "updates"} for n in ("FedSOUL", "FedSOUK")}
"""Local state that is to change when a round fails: a chain that diverged tries a shorter step."""


def linear() -> fp.Composition:
    return fp.Composition(
        seeded(nn.Linear(3, 2, bias=False).to(WIDE), 1),
        seeded(nn.Linear(2, 1, bias=False).to(WIDE), 2),
        fp.likelihoods.Normal(0.5),
    )


def softmax() -> fp.Composition:
    body, head = seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 3).to(WIDE), 2)
    return fp.Composition(body, head, "categorical")


def curved() -> fp.Composition:
    """A head that is not linear: some states exist for such heads only."""
    head = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3))
    return fp.Composition(seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(head.to(WIDE), 2), "categorical")


def network() -> fp.Composition:
    """So many weights that rounds of FedSOUL work on a batch of a client's examples."""
    body = nn.Sequential(nn.Linear(3, 120), nn.Tanh(), nn.Linear(120, 2))
    return fp.Composition(seeded(body.to(WIDE), 1), seeded(nn.Linear(2, 3).to(WIDE), 2), "categorical")


MODELS = {"linear": linear, "softmax": softmax, "curved": curved, "network": network}


def clients(kind: str, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    g = generator(seed)
    out = {}
    for name, n in zip(NAMES, SIZES, strict=True):
        x = torch.randn(n, 3, generator=g, dtype=WIDE)
        noise = torch.randn(n, generator=g, dtype=WIDE)
        out[name] = (x, x.sum(1) + noise if kind == "linear" else torch.randint(3, (n,), generator=g))
    return out


FOUR = NAMES[:4]


def four(kind: str, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """The first of them, where that is enough."""
    every = clients(kind, seed)
    return {name: every[name] for name in FOUR}


def made(name: str, kind: str, **settings: Any) -> Algorithm:
    return METHODS[name](MODELS[kind](), **SETTINGS.get(name, {}) | settings)


def partial(name: str) -> Participation:
    """A rule under which not everyone is there, where the method allows one."""
    return {
        "any": fp.participation.Uniform(2),
        "one": fp.participation.Uniform(1),
        "full": fp.participation.Everyone(),
    }[METHODS[name].participation]


def fit(name: str, kind: str, rounds: int = 3, seed: int = 0, **options: Any) -> fp.Population:
    options = {"participation": partial(name), "progress": False} | options
    return made(name, kind).fit(clients(kind), rounds=rounds, seed=seed, **options)


@functools.cache
def fitted(name: str, kind: str, rounds: int = 3, seed: int = 0) -> fp.Population:
    """A short run, which several tests look at."""
    return fit(name, kind, rounds, seed)


class Done(NamedTuple):
    """A round's total, its bytes, and what units would keep."""

    total: Total
    bytes_up: int
    updates: list[Update]

    @property
    def left_out(self) -> tuple[int, ...]:
        return self.total.left_out


class Stage:
    """A method in the middle of a run."""

    def __init__(
        self, method: Algorithm, kind: str, rounds: int = 1, rule: Participation | None = None
    ) -> None:
        federation = fp.Federation.of(clients(kind))
        method = method.prepared(federation.example)
        settings = Settings(20, 0, usual_participation(method) if rule is None else rule)
        self.run = Run(method, method.model.checked(federation), settings)
        self.run.begin()
        for _ in range(rounds):
            self.run.train_round()
        self.method = self.run.algorithm

    def now(self) -> Round:
        """The next round, as sites see it."""
        keys = (k.at(round=self.run.round, purpose="train") for k in (self.run.secret, self.run.key))
        return Round(self.run.round, self.method.broadcast(self.run.server), *keys)

    def before(self, ids: Tensor) -> Tensors:
        now = self.now()
        return {
            n: t.clone() for n, t in self.run.sites.states(self.method, ids, now.broadcast, now.key).items()
        }

    def work(self, ids: Tensor, weights: Tensor | None = None, ratio: bool = True) -> Done:
        """The next round's work of these clients; the run itself stays where it is."""
        active = Active(ids, torch.ones(len(ids)) if weights is None else weights, ratio)
        total = self.run.sites.round(self.method, self.now(), active, self.run.plan)
        return Done(total, total.bytes_up, self.run.sites.updates)

    def after(self, done: Done) -> Tensors:
        """What the clients of a round would keep."""
        return joined([state for _, state in done.updates])


def able(name: str, *kinds: str) -> list[str]:
    """Those of these models that the method is for."""
    return [kind for kind in kinds if kind in ONLY.get(name, tuple(MODELS))]


def every(*kinds: str, participation: tuple[str, ...] = ("any", "one", "full")) -> Any:
    cases = [(n, k) for n, m in METHODS.items() if m.participation in participation for k in able(n, *kinds)]
    return pytest.mark.parametrize(("name", "kind"), cases)


def same(one: Tensors, other: Tensors) -> None:
    """Alike to rounding: sums are formed in another order."""
    assert one.keys() == other.keys()
    for n in one:
        torch.testing.assert_close(one[n], other[n], rtol=1e-9, atol=1e-10, equal_nan=True)


def joined(parts: list[Tensors]) -> Tensors:
    return {n: torch.cat([p[n] for p in parts]) for n in parts[0]}
