"""The paper's main table: all images of CIFAR-10 and CIFAR-100 over 100 clients with some classes each.

Beside the methods stands the network's own limit: the same one on all images at once, for as many passes,
which is told each client's classes when it is scored. FedSOUL, with plain rounds and with local epochs, has
other budgets too: what pays when passes are few need not when they are many, and the published numbers are
those of long runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.client.local_sgd import LocalSGD
from fedpop.data.image_task import FullImageTask
from fedpop.evaluation.scores import scored
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_methods import methods, settings_of
from fedpop.experiments.image_runs import COLUMNS, LEGEND, jobs_of, measured, rows, told
from fedpop.experiments.runner import Job
from fedpop.federation.clients import Client, Federation, Packed
from fedpop.methods.fedavg import FedAvg
from fedpop.models.predictive import Predictive
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, record, values
from fedpop.run.simulate import fit
from fedpop.server.schedules import Cosine

NAME = "full-data"
PASSES = 500_000
OURS = ("FedSOUL", "FedSOUL-local")
PUBLISHED = {
    "FedSOUL": (79.48, 91.12, 79.56, 59.73),
    "FedRep": (75.68, 87.70, 79.15, 56.10),
    "FedAvg-FT": (71.32, 85.63, 79.03, 56.19),
    "Ditto": (70.34, 85.39, 78.91, 56.34),
    "APFL": (72.29, 83.77, 78.20, 55.44),
    "Local": (70.68, 89.79, 75.29, 41.29),
    "FedAvg": (51.78, 42.65, 23.94, 31.97),
    "SCAFFOLD": (47.33, 37.72, 20.32, 22.52),
    "LG-FedAvg": (63.02, 84.14, 72.44, 38.76),
    "Per-FedAvg": (67.20, 82.27, 72.05, 52.49),
    "L2GD": (59.98, 81.04, 72.13, 42.84),
}
"""The paper's accuracies in percent, task by task."""
OWN = LocalSGD(1, 0.02, 50, momentum=0.9, decay=1e-3)
"""The steps of those who have no settings in the file: the network's limit, and the Bayesian rivals."""
TASKS = (
    FullImageTask("cifar10", 5),
    FullImageTask("cifar10", 2),
    FullImageTask("cifar100", 5),
    FullImageTask("cifar100", 20),
)
FIRST = 2
"""Tasks of the first stage, which is run before anything else."""
OTHERS = {t: (100_000, 1_000_000, 3_000_000) if t in TASKS[:FIRST] else (3_000_000,) for t in TASKS}
"""Further budgets of FedSOUL alone."""
PAPERS = "The paper's: the accuracy that it reports; after how many passes it does not say."
NEVER = -1e30
"""The head's output for a class that cannot be; minus infinity times nothing would be no number."""
LIMIT = "pooled"
"""The network on everybody's images."""
METHODS = methods(NAME)
FIRST_METHODS = ("FedSOUL", "FedSOUL-local", "FedRep", "FedAvg-FT", "Ditto", "APFL", "Local")
LATER_METHODS = tuple(n for n in METHODS if n not in FIRST_METHODS)
ALL = (*FIRST_METHODS, LIMIT, *LATER_METHODS)


@dataclass(frozen=True)
class Column:
    """A task, and what every method may spend on it."""

    task: FullImageTask
    passes: int


def columns() -> list[Column]:
    """The table's, then those with other budgets."""
    own = [Column(task, PASSES) for task in TASKS]
    return own + [Column(task, passes) for task in TASKS for passes in OTHERS[task]]


def setting_of(task: FullImageTask, passes: int | None = None) -> dict[str, Any]:
    return {
        "dataset": task.images,
        "classes_per_client": task.classes,
        "b": task.b,
        "passes": PASSES if passes is None else passes,
    }


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The record of one method on one task and seed."""
    torch.set_num_threads(1)
    column = columns()[index]
    task, federation = column.task, column.task.make(data, seed)
    if name == LIMIT:
        return [limit(task, federation, seed)]
    method, setting = METHODS[name](task.model(seed)), setting_of(task, column.passes)
    return measured(NAME, setting, name, method, federation, seed, Path(folder))


def limit(task: FullImageTask, federation: Federation, seed: int) -> Record:
    """The network on pooled images, scored on every client's test images among that client's classes."""
    train, test = federation.train, federation.splits["test"]
    assert isinstance(train.x, Tensor)
    assert isinstance(test.x, Tensor)
    epochs = max(1, round(PASSES / len(train.y)))
    method = FedAvg(task.model(seed), local=OWN, schedule=Cosine())
    population = fit(method, [Client(train.x, train.y)], rounds=epochs, seed=seed, progress=False)
    found = []
    for i, name in enumerate(federation.names):
        at, mine = _rows(test, i), _rows(train, i)
        found.append((name, among(population.predict(0, test.x[at]), train.y[mine].unique()), test.y[at]))
    metrics = told(scored(found, widths=False)) | {"loss": population.history[-1]["loss"]}
    cost = population.totals | {"rounds": population.rounds}
    return record(NAME, setting_of(task), LIMIT, seed, metrics, cost, population.algorithm.describe())


def _rows(split: Packed, i: int) -> slice:
    first = int(split.starts[i])
    return slice(first, first + int(split.sizes[i]))


def among(p: Predictive, classes: Tensor) -> Predictive:
    """The same point predictions where only these classes can be."""
    never = torch.ones(p.eta.shape[-1], dtype=torch.bool)
    never[classes] = False
    return replace(p, eta=p.eta.masked_fill(never, NEVER))


def jobs(asked: Asked) -> list[Job]:
    """The first stage for all seeds; FedSOUL with other budgets; then CIFAR-100, then the other methods of
    the table."""
    early, late = range(len(TASKS))[:FIRST], range(len(TASKS))[FIRST:]
    stages = (
        [(t, name) for name in (*FIRST_METHODS, LIMIT) for t in early],
        [(t, name) for t in range(len(TASKS), len(columns())) for name in OURS],
        [(t, name) for name in (*FIRST_METHODS, LIMIT) for t in late],
        [(t, name) for name in LATER_METHODS for t in (*early, *late)],
    )
    tasks = [c.task for c in columns()]
    told = [setting_of(c.task, c.passes) for c in columns()]
    labels = [f"{s['dataset']} S={s['classes_per_client']}, {s['passes']:,} passes" for s in told]
    return [j for cells in stages for j in jobs_of(asked, job, tasks, labels, told, cells, methods=METHODS)]


# --- what is told of it ----------------------------------------------------------------------


def name_of(setting: dict[str, Any]) -> str:
    return (
        f"{setting['dataset']}, {setting['classes_per_client']} classes per client, {setting['b']} clients, "
        f"{setting['passes']:,} passes"
    )


def budgets(task: FullImageTask) -> list[int]:
    """All of FedSOUL's, the table's among them."""
    return sorted((PASSES, *OTHERS[task]))


def published(task: FullImageTask, name: str) -> float | None:
    """What the paper reports."""
    return PUBLISHED[name][TASKS.index(task)] if name in PUBLISHED else None


def table(results: Results, task: FullImageTask) -> Sheet:
    """A row for every method, empty where it has not been run, with the paper's number beside ours."""
    found = []
    for row in rows(results, setting_of(task), ALL):
        known = published(task, row[0])
        found.append((*row[:3], "-" if known is None else f"{known:.1f} %", *row[3:]))
    ours = frozenset(i for i, row in enumerate(found) if row[0] == "FedSOUL")
    return Sheet((*COLUMNS[:3], "the paper's", *COLUMNS[3:]), found, ours)


def paced(results: Results, task: FullImageTask) -> Sheet:
    """FedSOUL's rows by budget, and the published number to reach."""
    found = [
        (f"{name}, {passes:,} passes", *rows(results, setting_of(task, passes), (name,))[0][1:])
        for name in OURS
        for passes in budgets(task)
    ]
    known = published(task, "FedSOUL")
    mark = [] if known is None else [("the paper's", "-", f"{known:.1f} %", *["-"] * (len(COLUMNS) - 3))]
    return Sheet(COLUMNS, found + mark)


def paces(results: Results, task: FullImageTask) -> str:
    """Accuracy against the budget."""
    reached: dict[str, dict[float, list[float]]] = {name: {} for name in OURS}
    for name, passes in product(OURS, budgets(task)):
        if found := values(results.of(setting_of(task, passes), name), "accuracy"):
            reached[name][passes / 1000] = [100 * v for v in found]
    known = published(task, "FedSOUL")
    mark = {} if known is None else {"the paper's": [(passes / 1000, known) for passes in budgets(task)]}
    return plots.points(reached, mark, "thousands of passes", "test accuracy, %", log_y=False, joined=True)


def sheets(results: Results) -> dict[str, Sheet]:
    own = {name_of(setting_of(t)): table(results, t) for t in TASKS}
    return own | {f"{t.images}, {t.classes} classes per client: budgets": paced(results, t) for t in TASKS}


def page(results: Results) -> Page:
    sections = []
    for task in TASKS:
        setting = setting_of(task)
        groups = {n: [100 * v for v in values(results.of(setting, n), "accuracy")] for n in ALL}
        there = {n: v for n, v in groups.items() if v}
        figures = [Figure(plots.dots(there, "test accuracy, %", {"FedSOUL"}), "Every dot is a seed.")]
        sections.append(
            Section(name_of(setting), f"{LEGEND} {PAPERS}", table(results, task), figures if there else [])
        )
    for task in TASKS:
        figures = [Figure(paces(results, task), "Each seed a dot, medians larger.")]
        title = f"{task.images}, {task.classes} classes per client: FedSOUL with other budgets"
        words = "Plain rounds send one gradient of all images; local epochs take steps on them, and drift."
        sections.append(Section(title, words, paced(results, task), figures))
    lead = (
        "All training images over 100 clients with equal shards of the same number of classes, ten of them "
        f"active per round, test images alike. Every method may spend {PASSES:,} backbone passes and shifts "
        "and mirrors its images. FedSOUL has its default settings; those of the others stand at the end. "
        "FedRep, FedAvg-FT and Ditto were searched for with fedpop tune examples/tune-full-data.toml, on "
        "images held out of training; the others' were not. Methods with a whole model of each client's own "
        "(Ditto, APFL, Local) see a client's images but a few times within this budget, and are far from "
        f"where they would end. '{LIMIT}' is the same network on all images at once, told each client's "
        "classes. L2GD has everybody in every round."
    )
    sections.append(Section("Settings", sheet=settings_of(NAME)))
    return Page("fedpop: all of CIFAR-10 and CIFAR-100", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=1, data="cifar10", jobs=jobs, sheets=sheets, page=page)
