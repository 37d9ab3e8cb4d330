"""How near methods come to the synthetic task's truth, and to the exact optimum, which sees all data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.client.local_sgd import LocalSGD
from fedpop.data.synthetic import Synthetic, SyntheticTask
from fedpop.evaluation.oracle import Optimum, exact_optimum
from fedpop.evaluation.subspace import aligned_error, principal_angle
from fedpop.federation.clients import Federation
from fedpop.keys import Key
from fedpop.methods import FedAvg, FedRep, FedSOUL
from fedpop.methods.base import Algorithm
from fedpop.methods.hierarchical import Hierarchical
from fedpop.models.composition import Composition
from fedpop.models.predictive import Predictive
from fedpop.population import Population
from fedpop.report.results import Record, record
from fedpop.run.callbacks import Callback
from fedpop.server.optimisers import Adam

RANDOM_STARTS = 6
"""Random ones, from which the exact optimum is looked for beside the truth and what was learned."""

Contender = tuple[Callable[[Composition], Algorithm], int]
"""What makes a method on a model, and its rounds."""
METHODS: dict[str, Contender] = {
    "FedSOUL": (FedSOUL, 500),
    "FedRep-spectral": (
        lambda model: FedRep(model, heads="exact", start="spectral", phi_step=Adam()),
        500,
    ),
    "FedRep": (lambda model: FedRep(model, heads="exact", start="random", phi_step=Adam()), 500),
    "FedAvg": (lambda model: FedAvg(model, local=LocalSGD(epochs=2, rate=0.005)), 500),
}
"""All are given the noise variance. FedRep has exact local heads and the same server optimiser as FedSOUL, so
that each reaches the optimum of its own objective; "FedRep-spectral" also has FedSOUL's start."""


def setting_of(task: SyntheticTask) -> dict[str, Any]:
    """What records say of a task."""
    keys = ("b", "d", "k", "share_small", "n_small", "n_large")
    return {k: v for k, v in asdict(task).items() if k in keys}


def as_matrix(phi: Tensor, truth: Tensor) -> Tensor:
    """The backbone's weights inside phi as a k x d matrix."""
    k, d = truth.shape
    return phi[: k * d].reshape(d, k).mT


@dataclass
class AnglePath(Callback):
    """Follows the principal angle and the bytes over the rounds."""

    truth: Tensor
    every: int = 5

    def __post_init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        if run.round % self.every == 0 or run.round == 1 or run.over:
            phi = run.algorithm.publish(run.server)["phi"]
            angle = principal_angle(self.truth, as_matrix(phi, self.truth))
            sent = metrics["bytes_up"] + metrics["bytes_down"]
            self.points.append({"round": run.round, "principal_angle": angle, "bytes": sent})
        return False


def exact(task: SyntheticTask, data: Synthetic, seed: int, extra: Sequence[Population]) -> Optimum:
    """The best likelihood over many starts, one of them the truth, which no method sees."""
    method = FedSOUL(task.model(seed))
    federation = method.model.checked(Federation.of(data.clients))
    key = Key(seed, purpose="exact")
    beta = method.hierarchy.prior.init(torch.zeros(task.d, dtype=torch.float64), 1.0)
    starts = [(data.phi.mT.reshape(-1), beta)]
    for s in range(RANDOM_STARTS):
        noise = key.at(purpose=str(s)).normal(key.server(), (task.k * task.d,), torch.float64)[0]
        starts.append((noise / task.k**0.5, beta))
    starts += [(p.published["phi"], p.published["beta"]) for p in extra]
    return exact_optimum(method, federation, starts)


def scores(population: Population, data: Synthetic) -> dict[str, float]:
    """Distance to the truth, and how held-out examples of every client are predicted."""
    population.sample_all()
    phi = as_matrix(population.published["phi"], data.phi)
    z = torch.stack([population.personal(i)["weight"][0] for i in range(len(population))])
    out = {
        "principal_angle": principal_angle(data.phi, phi),
        "z_error": aligned_error(data.phi, phi, data.z, z),
    }
    return out | held_out(lambda i, x: population.predict(i, x), data)


def held_out(predict: Callable[[int, Tensor], Predictive], data: Synthetic) -> dict[str, float]:
    """Mean log-likelihood and coverage of the 90 % intervals, over all clients' held-out examples."""
    log_prob, inside, count = 0.0, 0.0, 0
    for i, client in enumerate(data.clients):
        assert client.test is not None
        x, y = client.test
        p = predict(i, x)
        log_prob += float(p.log_prob(y).sum())
        inside += float(p.covers(y, 0.9).float().sum())
        count += len(y)
    return {"log_likelihood": log_prob / count, "coverage90": inside / count}


@dataclass(frozen=True)
class Outcome:
    """A method's population on one task, its record, and its path."""

    record: Record
    population: Population
    points: list[dict[str, float]]


def run_beside_truth(
    experiment: str,
    task: SyntheticTask,
    seed: int,
    methods: Mapping[str, Contender],
    *,
    progress: bool | None = False,
) -> list[Outcome]:
    """All methods and the exact optimum on one task and seed."""
    data, fits = task.make(seed), dict[str, tuple[Population, AnglePath]]()
    for name, (build, rounds) in methods.items():
        method, path = build(task.model(seed)), AnglePath(data.phi)
        population = method.fit(data.clients, rounds=rounds, seed=seed, callbacks=[path], progress=progress)
        fits[name] = population, path
    started = time.perf_counter()
    best = exact(task, data, seed, [p for p, _ in fits.values() if isinstance(p.algorithm, Hierarchical)])
    seconds = time.perf_counter() - started
    optimum = _at_optimum(task, data, seed, best)
    reference = scores(optimum, data)
    shared = {
        "principal_angle_exact": reference["principal_angle"],
        "coverage90_exact": reference["coverage90"],
        "log_likelihood_exact": reference["log_likelihood"],
    }
    setting, outcomes = setting_of(task), []
    for name, (population, path) in fits.items():
        metrics = scores(population, data) | shared
        if isinstance(population.algorithm, Hierarchical):
            metrics["likelihood_gap"] = best.log_likelihood - population.log_likelihood().value
        cost, config = population.totals | {"rounds": population.rounds}, population.algorithm.describe()
        item = record(experiment, setting, name, seed, metrics, cost, config)
        outcomes.append(Outcome(item, population, path.points))
    metrics = reference | shared | {"marginal_log_likelihood": best.log_likelihood}
    item = record(experiment, setting, "Exact", seed, metrics, {"seconds": seconds}, {"method": "L-BFGS"})
    return [*outcomes, Outcome(item, optimum, [])]


def _at_optimum(task: SyntheticTask, data: Synthetic, seed: int, best: Optimum) -> Population:
    """A population whose theta is the exact optimum."""
    method = FedSOUL(task.model(seed))
    federation = method.model.checked(Federation.of(data.clients))
    published = {"phi": best.phi.float(), "beta": best.beta.float()}
    return Population(method, published, Key(0, purpose="exact"), federation)
