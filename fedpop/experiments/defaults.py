"""Why the defaults for networks are what they are: one setting changed at a time, on small image clients.

CIFAR-10 and MNIST, five classes per client, 50 clients with 5 images and 50 with 25, ten active per round,
every method with the same number of backbone passes. Settings are compared on validation images, which no
client holds; test images are reported beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedpop.algorithms.base import Algorithm
from fedpop.algorithms.fedavg import FedAvg
from fedpop.algorithms.fedavg_ft import FedAvgFT
from fedpop.algorithms.fedrep import FedRep
from fedpop.algorithms.fedsouk import Final
from fedpop.algorithms.fedsoul import FedSOUL
from fedpop.client.local_sgd import LocalSGD
from fedpop.data.image_task import ImageTask
from fedpop.evaluation.protocol import evaluate
from fedpop.kernels import HMC, Exponential
from fedpop.models.base import Model
from fedpop.population import Population
from fedpop.priors.em import EM
from fedpop.priors.normal import Normal
from fedpop.report.results import Record, record
from fedpop.server.optimisers import Adam, Average
from fedpop.server.schedules import Cosine

EXPERIMENT = "defaults"
PASSES = 60_000
ACTIVE = 10
IMAGES = ("cifar10", "mnist")
DEFAULT = "default"
"""The row of FedSOUL(model) without any setting, from which the others differ."""
SHORT = Final(draws=50, burn_in=100)
"""A shorter final pass than users get: scores over 100 clients do not need more."""

Build = Callable[[Model], Algorithm]


@dataclass(frozen=True)
class Variant:
    """A method, what it costs per example and round in backbone passes, and the question it answers."""

    build: Build
    question: str
    cost: float = 1.0


def fedsoul(**changes: Any) -> Build:
    """FedSOUL with these settings changed."""
    return lambda model: FedSOUL(model, final=SHORT, **changes)


def local(rate: float, epochs: int = 1, **changes: Any) -> Variant:
    settings: dict[str, Any] = {
        "phi_step": Average(),
        "phi_epochs": epochs,
        "phi_rate": rate,
        "phi_batch": 10,
        "phi_schedule": Cosine(),
    }
    # The chain needs features once more: a forward pass is a third.
    return Variant(fedsoul(**(settings | changes)), "local epochs on phi", epochs + 1 / 3)


def fedavg(epochs: int, rate: float) -> Build:
    return lambda model: FedAvgFT(
        model,
        local=LocalSGD(epochs, rate, batch=10, momentum=0.9),
        fine_tune=LocalSGD(10, 0.01, batch=10),
    )


def fedrep(epochs: int, rate: float) -> Build:
    heads, body = LocalSGD(10, rate, batch=10, momentum=0.9), LocalSGD(epochs, rate, batch=10, momentum=0.9)
    return lambda model: FedRep(model, head=heads, body=body)


VARIANTS: dict[str, Variant] = {
    DEFAULT: Variant(fedsoul(), "FedSOUL(model), as it is"),
    "phi rate .1": Variant(fedsoul(phi_step=Adam(0.1, Cosine())), "the server's step on phi"),
    "left form": Variant(fedsoul(form="left"), "form of I"),
    "EM .2": Variant(fedsoul(beta_step=EM(0.2, 0.1)), "how the prior is learned"),
    "Adam on the prior": Variant(fedsoul(beta_step=Adam(0.03, Cosine())), "how the prior is learned"),
    "mean fixed at 0": Variant(fedsoul(prior=Normal(learn_mean=False)), "how the prior is learned"),
    "scale fixed": Variant(fedsoul(prior=Normal(learn_scale=False)), "how the prior is learned"),
    "2 transitions": Variant(fedsoul(local_steps=2), "draws per round"),
    "20 transitions": Variant(fedsoul(local_steps=20), "draws per round"),
    "antithetic pairs": Variant(fedsoul(local_steps=5, chains=2, antithetic=True), "antithetic pairs"),
    "one leapfrog step": Variant(fedsoul(kernel=HMC(leapfrog=1), local_steps=50), "kernel"),
    "exponential h=.5": Variant(fedsoul(kernel=Exponential(0.5), local_steps=50), "kernel"),
    "local epoch .02": local(0.02, phi_momentum=0.9),
    "local epoch .1": local(0.1),
    "local epoch, Adam": local(0.02, phi_step=Adam(0.03, Cosine())),
}
BASELINES: dict[str, Variant] = {
    "FedAvg 1 x .02": Variant(fedavg(1, 0.02), "baseline"),
    "FedAvg 5 x .01": Variant(fedavg(5, 0.01), "baseline", 5.0),
    "FedRep 1 x .02": Variant(fedrep(1, 0.02), "baseline", 4 / 3),
    "FedRep 5 x .01": Variant(fedrep(5, 0.01), "baseline", 5 + 1 / 3),
}
ALL: Mapping[str, Variant] = VARIANTS | BASELINES


def setting_of(task: ImageTask) -> dict[str, Any]:
    return asdict(task) | {"active": ACTIVE, "passes": PASSES}


def rounds_for(task: ImageTask, cost: float) -> int:
    """Rounds that spend the budget of backbone passes."""
    per_round = ACTIVE * sum(task.sizes) / len(task.sizes)
    return max(1, math.floor(PASSES / (per_round * cost)))


def judged(population: Population, split: str) -> dict[str, float]:
    """Scores over all clients' held-out images; accuracy also by size of client."""
    found = evaluate(population, split)
    accuracy, images = found.scores["accuracy"], found.examples
    out = {"accuracy": float((accuracy * images).sum() / images.sum())}
    out |= {"log_score": found.pooled["nll"], "brier": found.pooled["brier"], "ece": found.pooled["ece"]}
    assert population.federation is not None
    own = dict(zip(population.names, population.federation.train.sizes.tolist(), strict=True))
    sizes = torch.tensor([own[name] for name in found.names])
    out |= {f"accuracy_{n}": float(accuracy[sizes == n].mean()) for n in sizes.unique().tolist()}
    return {f"{split}_{name}": value for name, value in out.items()}


def job(images: str, name: str, seed: int, folder: str) -> list[Record]:
    """The records of one variant on one set of images and one seed."""
    torch.set_num_threads(1)
    task, variant = ImageTask(images), ALL[name]
    clients = task.make(folder, seed)
    method = variant.build(task.model(seed))
    rounds = rounds_for(task, variant.cost)
    population = method.fit(clients, rounds=rounds, seed=seed, participation=ACTIVE, progress=False)
    out = [_record(population, task, name, seed)]
    if isinstance(population.algorithm, FedAvgFT):  # the same training serves both
        plain = FedAvg(population.model, local=population.algorithm.local)
        same = Population(
            plain,
            population.published,
            population.key,
            population.federation,
            population.store,
            population.history,
            population.totals,
            population.rounds,
        )
        out = [
            _record(same, task, name, seed),
            _record(population, task, f"{name} + tuning", seed),
        ]
    return out


def _record(population: Population, task: ImageTask, name: str, seed: int) -> Record:
    metrics = judged(population, "validation") | judged(population, "test")
    last = population.history[-1]
    metrics |= {k: last[k] for k in ("loss", "acceptance", "prior_mean_norm", "prior_sd") if k in last}
    cost = population.totals | {"rounds": population.rounds}
    return record(EXPERIMENT, setting_of(task), name, seed, metrics, cost, population.algorithm.describe())


def methods_of(name: str) -> tuple[str, ...]:
    """The records that a variant's job makes."""
    return (name, f"{name} + tuning") if name.startswith("FedAvg") else (name,)
