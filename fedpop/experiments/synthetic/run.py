"""The paper's synthetic experiments: how near phi and z come to the truth, and to the exact optimum."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.client.local_sgd import LocalSGD
from fedpop.data.synthetic import Synthetic, SyntheticTask
from fedpop.errors import EstimateError
from fedpop.evaluation.oracle import Optimum, exact_optimum
from fedpop.evaluation.subspace import aligned_error, principal_angle
from fedpop.experiments.experiment import Asked
from fedpop.experiments.runner import Job
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

NAME = "synthetic"
ROUNDS = 500
PAPER_ROUNDS = 1000
LOCAL_OPTIMUM = 5.0
"""A run whose log-likelihood is this far below the exact optimum's sits in another, local one."""

TASKS: tuple[SyntheticTask, ...] = (
    SyntheticTask(b=100, d=2, k=20),
    SyntheticTask(b=50, d=2, k=20),
    SyntheticTask(b=200, d=2, k=20),
    SyntheticTask(b=100, d=2, k=50),
    SyntheticTask(b=100, d=2, k=5),
    SyntheticTask(b=100, d=5, k=20),
    SyntheticTask(share_small=0.5),
    SyntheticTask(n_small=2),
    SyntheticTask(share_small=0.5, n_small=2),
)
MAIN = 6
"""The first so many tasks are the six (b, d, k) of the paper; the rest vary shares and sizes."""

SAMPLED = "FedSOUL-sampled"
"""FedSOUL by Algorithm 1: with everyone answering, the default takes the exact engine on this task."""
METHODS = ("FedSOUL", SAMPLED, "FedSOUL-paper", "FedRep-spectral", "FedRep", "FedAvg")


def setting_of(task: SyntheticTask) -> dict[str, Any]:
    keys = ("b", "d", "k", "share_small", "n_small", "n_large")
    return {k: v for k, v in asdict(task).items() if k in keys}


def name_of(setting: dict[str, Any]) -> str:
    """``100,2,20`` for (b, d, k), and what else is unusual."""
    name = f"{setting['b']},{setting['d']},{setting['k']}"
    if setting["share_small"] != 0.9:
        name += f" {100 * setting['share_small']:.0f}%"
    if setting["n_small"] != 5:
        name += f" N={setting['n_small']}"
    return name


def method_named(name: str, model: Composition) -> tuple[Algorithm, int]:
    """A method of the comparison with its number of rounds; all are given the noise variance.

    FedRep has exact local heads and the same server optimiser as FedSOUL, so that each reaches the
    optimum of its own objective; "FedRep-spectral" also has FedSOUL's start.
    """
    if name == "FedSOUL":
        return FedSOUL(model), ROUNDS
    if name == SAMPLED:
        return FedSOUL(model, engine="sampled"), ROUNDS
    if name == "FedSOUL-paper":
        return FedSOUL.paper(model), PAPER_ROUNDS
    if name in ("FedRep", "FedRep-spectral"):
        start = "spectral" if name == "FedRep-spectral" else "random"
        return FedRep(model, heads="exact", start=start, phi_step=Adam()), ROUNDS
    if name == "FedAvg":
        return FedAvg(model, local=LocalSGD(epochs=2, rate=0.005)), ROUNDS
    raise KeyError(name)


@dataclass
class AnglePath(Callback):
    """Follows the principal angle and the bytes over the rounds."""

    truth: Tensor
    every: int = 5

    def __post_init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        if run.round % self.every == 0 or run.round == 1 or run.algorithm.over(run.server):
            phi = run.algorithm.publish(run.server)["phi"]
            angle = principal_angle(self.truth, as_matrix(phi, self.truth))
            sent = metrics["bytes_up"] + metrics["bytes_down"]
            self.points.append({"round": run.round, "principal_angle": angle, "bytes": sent})
        return False


def as_matrix(phi: Tensor, truth: Tensor) -> Tensor:
    """The backbone's weights inside phi as a k x d matrix."""
    k, d = truth.shape
    return phi[: k * d].reshape(d, k).mT


# --- the exact optimum -----------------------------------------------------------------------


def exact(task: SyntheticTask, data: Synthetic, seed: int, extra: Sequence[Population]) -> Optimum:
    """The best likelihood over many starts, one of them the truth, which no method sees."""
    method = FedSOUL(task.model(seed))
    federation = method.model.checked(Federation.of(data.clients))
    key = Key(seed, purpose="exact")
    beta = method.hierarchy.prior.init(torch.zeros(task.d, dtype=torch.float64), 1.0)
    starts = [(data.phi.mT.reshape(-1), beta)]
    for s in range(6):
        noise = key.at(purpose=str(s)).normal(key.server(), (task.k * task.d,), torch.float64)[0]
        starts.append((noise / task.k**0.5, beta))
    starts += [(p.published["phi"], p.published["beta"]) for p in extra]
    return exact_optimum(method, federation, starts)


def at_optimum(method: Hierarchical, federation: Federation, best: Optimum) -> Population:
    """A population whose theta is the exact optimum."""
    published = {"phi": best.phi.float(), "beta": best.beta.float()}
    return Population(method, published, Key(0, purpose="exact"), federation)


# --- scores ----------------------------------------------------------------------------------


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


def theta_coverage(population: Population, data: Synthetic) -> float:
    """Coverage when theta is drawn from its asymptotic law too; NaN where its information is not
    positive."""
    try:
        predict = lambda i, x: population.predict(i, x, theta_uncertainty=True)  # noqa: E731
        return held_out(predict, data)["coverage90"]
    except EstimateError:
        return math.nan


# --- a job -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskOutcome:
    """A method's population on one task, its record, and its path."""

    record: Record
    population: Population | None
    points: list[dict[str, float]]


def fit(
    name: str, task: SyntheticTask, data: Synthetic, seed: int, progress: bool | None = False
) -> tuple[Population, list[dict[str, float]], dict[str, Any]]:
    """Run one method on drawn data."""
    method, rounds = method_named(name, task.model(seed))
    trace = AnglePath(data.phi)
    population = method.fit(data.clients, rounds=rounds, seed=seed, callbacks=[trace], progress=progress)
    return population, trace.points, population.algorithm.describe()


def run_task(
    task: SyntheticTask,
    seed: int,
    methods: Sequence[str] = METHODS,
    *,
    progress: bool | None = False,
    theta: bool = True,
) -> list[TaskOutcome]:
    """All methods and the exact optimum on one task and seed."""
    data = task.make(seed)
    fits = {name: fit(name, task, data, seed, progress) for name in methods}
    started = time.perf_counter()
    mixed = [p for p, _, _ in fits.values() if isinstance(p.algorithm, Hierarchical)]
    best = exact(task, data, seed, mixed)
    seconds = time.perf_counter() - started
    method = FedSOUL(task.model(seed))
    federation = method.model.checked(Federation.of(data.clients))
    optimum = at_optimum(method, federation, best)
    reference = scores(optimum, data)
    shared = {
        "principal_angle_exact": reference["principal_angle"],
        "coverage90_exact": reference["coverage90"],
        "log_likelihood_exact": reference["log_likelihood"],
    }
    setting = setting_of(task)
    outcomes = []
    for name, (population, points, config) in fits.items():
        metrics = scores(population, data) | shared
        if isinstance(population.algorithm, Hierarchical):
            gap = best.log_likelihood - population.log_likelihood().value
            metrics["likelihood_gap"] = gap
            if name in ("FedSOUL", SAMPLED):
                metrics["local_optimum"] = float(gap > LOCAL_OPTIMUM)
            if theta and name == "FedSOUL":
                metrics["coverage90_theta"] = theta_coverage(population, data)
        cost = population.totals | {"rounds": population.rounds}
        item = record(NAME, setting, name, seed, metrics, cost, config)
        outcomes.append(TaskOutcome(item, population, points))
    metrics = reference | shared | {"marginal_log_likelihood": best.log_likelihood}
    item = record(NAME, setting, "Exact", seed, metrics, {"seconds": seconds}, {"method": "L-BFGS"})
    outcomes.append(TaskOutcome(item, optimum, []))
    return outcomes


def job(index: int, seed: int) -> list[Record]:
    """The records of one task and seed, for a worker process."""
    torch.set_num_threads(1)
    return [outcome.record for outcome in run_task(TASKS[index], seed)]


def jobs(asked: Asked) -> list[Job]:
    """The paper's six settings over all seeds, then the variants."""
    out = []
    for kind, part in (("main", range(MAIN)), ("variant", range(MAIN, len(TASKS)))):
        for seed in range(asked.seeds):
            for t in part:
                setting = setting_of(TASKS[t])
                label = f"{kind} {name_of(setting)}, seed {seed}"
                out.append(Job(job, (t, seed), label, setting, seed, (*METHODS, "Exact")))
    return out
