"""What differential privacy costs: the learned subspace, and accuracy on images, against epsilon.

The paper's synthetic task with five examples a client, the same with a subspace whose directions are not of
length one (README's task), and CIFAR-10 over a thousand clients of 50 images. One client in ten takes part in
a round, and starts are random, since start questions see data; everything else is FedSOUL's default, as
``privacy=`` leaves it. On images FedAvg and FedRep have the same ledger, and the learning rates that
``small-data`` found for them without one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor

from fedpop.comparison.truth import as_matrix
from fedpop.data.image_task import FullImageTask
from fedpop.data.synthetic import SyntheticTask
from fedpop.errors import FedpopWarning, TrainingError
from fedpop.evaluation.subspace import principal_angle
from fedpop.keys import Key
from fedpop.methods.base import Algorithm
from fedpop.methods.fedavg import FedAvg
from fedpop.methods.fedavg_ft import FedAvgFT
from fedpop.methods.fedsoul import FedSOUL
from fedpop.models.base import Model
from fedpop.population import evaluate
from fedpop.priors import Normal
from fedpop.privacy import Gaussian
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, record, values
from research.experiment import Asked, Experiment, Job
from research.images import methods, missing, scores_of
from research.seeds import middle_of

NAME = "privacy"
ROUNDS, SHARE, DELTA = 400, 0.1, 1e-6
CLIENTS = (300, 1000, 3000)
EPSILONS = (8.0, 4.0, 2.0, 1.0)
OPEN = "no privacy"
ORTHONORMAL, README = "orthonormal", "README"
TASKS = (ORTHONORMAL, README)
"""Which subspace: an orthonormal basis, as in the paper, or 20 x 2 standard normal numbers."""
IMAGES = FullImageTask("cifar10", classes=5, b=1000)
IMAGE_ROUNDS, NETWORK = 100, "lenet"
"""Noise grows with the root of the number of weights: LeNet has a fifth of those of the paper's network."""
IMAGE_METHODS = ("FedSOUL", "FedAvg", "FedRep")
IMAGE_EPSILONS = (8.0, 4.0)
IMAGE_SEEDS = 1


def private_name(epsilon: float) -> str:
    return f"epsilon {epsilon:g}"


METHODS = (OPEN, *(private_name(e) for e in EPSILONS))


def setting_of(task: str, clients: int) -> dict[str, Any]:
    return {"task": task, "clients": clients, "rounds": ROUNDS, "share": SHARE, "delta": DELTA}


def image_setting(method: str) -> dict[str, Any]:
    about = {"task": "cifar10", "method": method, "clients": IMAGES.b, "network": NETWORK}
    return about | {"rounds": IMAGE_ROUNDS, "share": SHARE, "delta": DELTA}


@dataclass(frozen=True)
class ReadmeTask(SyntheticTask):
    """The same with a subspace of standard normal entries, which README has: y is larger, noise is not."""

    def _stretch(self, seed: int) -> Tensor:
        key = Key(seed, purpose="privacy/stretch")
        drawn = key.normal(key.server(), (self.k, self.d), torch.float64)[0]
        out: Tensor = torch.linalg.qr(drawn)[1]
        return out

    def _targets(self, x: Tensor, phi: Tensor, z: Tensor, key: Key) -> Tensor:
        return super()._targets(x, phi @ self._stretch(key.seed), z, key)


def task_of(name: str, clients: int) -> SyntheticTask:
    kind = {ORTHONORMAL: SyntheticTask, README: ReadmeTask}[name]
    return kind(b=clients, share_small=1.0, held_out=2)


def job(task: str, clients: int, seed: int) -> list[Record]:
    """All budgets on one draw of the task."""
    made = task_of(task, clients)
    data, out = made.make(seed), []
    for name in METHODS:
        privacy = budget_of(name)
        method = FedSOUL(made.model(seed), start="random", prior=Normal(scale=1.0))
        with warnings.catch_warnings():  # few clients are told so: that is what is measured
            warnings.simplefilter("ignore", FedpopWarning)
            population = method.fit(
                data.clients, rounds=ROUNDS, participation=SHARE, seed=seed, privacy=privacy, progress=False
            )
        phi = as_matrix(population.published["phi"], data.phi)
        metrics = {"angle": principal_angle(data.phi, phi)}
        cost = population.totals | {"rounds": population.rounds}
        out.append(record(NAME, setting_of(task, clients), name, seed, metrics, cost, method.describe()))
    return out


def budget_of(name: str) -> Gaussian | None:
    budget = next((e for e in EPSILONS if private_name(e) == name), None)
    return None if budget is None else Gaussian(epsilon=budget, delta=DELTA)


def image_job(method: str, name: str, seed: int, data: Path | None, folder: Path) -> list[Record]:
    """One method under one budget; it is kept in a folder while it lasts."""
    made = methods("small_data")[method] if method != "FedAvg" else fedavg
    algorithm = made(IMAGES.model(seed, NETWORK))
    setting, kept = image_setting(method), folder / "runs" / f"{method}-{name.replace(' ', '-')}-{seed}"
    metrics: dict[str, float | None] = {"accuracy": None}
    cost: dict[str, float] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedpopWarning)
            population = algorithm.fit(
                IMAGES.make(data, seed),
                rounds=IMAGE_ROUNDS,
                participation=SHARE,
                seed=seed,
                privacy=budget_of(name),
                out=kept,
                resume=True,
                progress=False,
            )
        metrics = dict(scores_of(evaluate(population, "test", widths=False)))
        cost = population.totals | {"rounds": population.rounds}
    except TrainingError:
        pass
    rmtree(kept, ignore_errors=True)
    return [record(NAME, setting, name, seed, metrics, cost, algorithm.describe())]


def fedavg(model: Model) -> Algorithm:
    """With the rate of its fine-tuned form."""
    tuned = methods("small_data")["FedAvg-FT"](model)
    assert isinstance(tuned, FedAvgFT)
    return FedAvg(model, local=tuned.local)


def jobs(asked: Asked) -> list[Job]:
    synthetic = [
        Job(
            job,
            (task, clients, seed),
            f"{task}, {clients} clients, seed {seed}",
            setting_of(task, clients),
            seed,
            METHODS,
        )
        for seed in range(asked.seeds)
        for task in TASKS
        for clients in CLIENTS
    ]
    images = [
        Job(
            image_job,
            (method, name, seed, asked.data, asked.folder),
            f"images, {method}, {name}, seed {seed}",
            image_setting(method),
            seed,
            (name,),
            needs=((IMAGES.images, "train"), (IMAGES.images, "test")),
        )
        for seed in range(IMAGE_SEEDS)
        for name in (private_name(4.0), OPEN, private_name(8.0))
        for method in IMAGE_METHODS
    ]
    return synthetic + images


# --- the report ----------------------------------------------------------------------------------


def _of_vectors(r: Record) -> bool:
    return "angle" in r["metrics"]


def angles(results: Results, task: str) -> Sheet:
    """Medians over seeds."""
    rows = []
    for clients in CLIENTS:
        found = {name: values(results.of(setting_of(task, clients), name), "angle") for name in METHODS}
        if found[OPEN]:
            cells = (f"{middle_of(v):.4f}" if v else "-" for v in found.values())
            rows.append((str(clients), str(len(found[OPEN])), *cells))
    return Sheet(("clients", "seeds", *METHODS), rows)


def accuracies(results: Results) -> Sheet:
    rows = []
    for method in IMAGE_METHODS:
        for name in (OPEN, *map(private_name, IMAGE_EPSILONS)):
            found = results.of(image_setting(method), name)
            cells = missing(found, 4)
            if not cells:
                cells = (
                    f"{100 * middle_of(values(found, 'accuracy')):.1f}",
                    f"{middle_of(values(found, 'nll')):.3f}",
                    f"{middle_of(values(found, 'ece')):.3f}",
                    str(len(found)),
                )
            rows.append((method, name, *cells))
    return Sheet(("method", "budget", "accuracy, %", "NLL", "ECE", "seeds"), rows)


def _curve(results: Results, task: str) -> str:
    lines = {}
    for clients in CLIENTS:
        of = {e: values(results.of(setting_of(task, clients), private_name(e)), "angle") for e in EPSILONS}
        if any(of.values()):
            lines[f"{clients} clients"] = [(e, middle_of(v)) for e, v in sorted(of.items()) if v]
    return plots.curves(lines, "epsilon", "principal angle to the truth", log_x=True)


TITLES = {ORTHONORMAL: "The paper's synthetic task", README: "README's task"}
ON_IMAGES = "CIFAR-10, 1,000 clients of 50 images"


def sheets(results: Results) -> dict[str, Sheet]:
    found = {f"{TITLES[task]}: angle to the true subspace": angles(results, task) for task in TASKS}
    return found | {ON_IMAGES: accuracies(results)}


def page(results: Results) -> Page:
    what = "Distance of the learned subspace to the truth against what was spent; medians over seeds."
    lead = (
        f"Five examples a client, {ROUNDS} rounds ({IMAGE_ROUNDS} on images), one client in ten a round, "
        f"from random starts; delta {DELTA:g}, against readers of theta."
    )
    sections = [
        Section(
            TITLES[task],
            "Medians over seeds.",
            angles(results, task),
            [Figure(_curve(results, task), what)],
        )
        for task in TASKS
    ]
    sections.append(
        Section(
            ON_IMAGES,
            f"Five classes a client, {NETWORK}; learning rates are those of small-data, found without "
            "privacy.",
            accuracies(results),
        )
    )
    return Page("fedpop: what differential privacy costs", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=3, data="cifar10", jobs=jobs, sheets=sheets, page=page, per_seed=_of_vectors
)
