"""The paper's main table: all images of CIFAR-10 and CIFAR-100 over 100 clients with some classes each.

Beside the methods stands the network's own limit: the same one on all images at once, for as many passes,
which is given each client's classes when it is scored. FedSOUL, with plain rounds and with local epochs, has
other budgets too: what pays when passes are few need not when they are many, and the published numbers are
those of long runs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fedpop.client.local_sgd import LocalSGD
from fedpop.data.image_task import FullImageTask
from fedpop.evaluation.scores import scored
from fedpop.federation.clients import Client, Federation, Packed
from fedpop.methods.fedavg import FedAvg
from fedpop.models.predictive import Predictive
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, values
from fedpop.run.simulate import fit
from fedpop.server.optimisers import Cosine
from research import figures
from research.experiment import Asked, Experiment, Job
from research.images import (
    COLUMNS,
    LEGEND,
    Cell,
    Run,
    in_words,
    jobs_of,
    methods,
    rows,
    scores_of,
    settings_of,
)

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
METHODS = methods("full_data")
FIRST_METHODS = ("FedSOUL", "FedSOUL-local", "FedRep", "FedAvg-FT", "Ditto", "APFL", "Local")
LATER_METHODS = tuple(n for n in METHODS if n not in FIRST_METHODS)
ALL = (*FIRST_METHODS, LIMIT, *LATER_METHODS)


def setting_of(task: FullImageTask, passes: int | None = None) -> dict[str, Any]:
    return {
        "dataset": task.images,
        "classes_per_client": task.classes,
        "b": task.b,
        "passes": PASSES if passes is None else passes,
    }


def cell(task: FullImageTask, passes: int, name: str) -> Cell:
    label = f"{task.images} S={task.classes}, {passes:,} passes"
    return Cell(task, setting_of(task, passes), name, label)


def job(run: Run) -> list[Record]:
    """The record of one method on one task and seed."""
    task = run.cell.task
    federation = task.make(run.data, run.seed)
    if run.cell.method == LIMIT:
        return [limit(run, federation)]
    return run.measured(METHODS[run.cell.method](task.model(run.seed)), federation)


def limit(run: Run, federation: Federation) -> Record:
    """The network on pooled images, scored on every client's test images among that client's classes."""
    train, test = federation.train, federation.splits["test"]
    assert isinstance(train.x, Tensor)
    assert isinstance(test.x, Tensor)
    epochs = max(1, round(run.cell.setting["passes"] / len(train.y)))
    method = FedAvg(run.cell.task.model(run.seed), local=OWN, schedule=Cosine())
    population = fit(method, [Client(train.x, train.y)], rounds=epochs, seed=run.seed, progress=False)
    found = []
    for i, name in enumerate(federation.names):
        at, mine = _rows(test, i), _rows(train, i)
        found.append((name, among(population.predict(0, test.x[at]), train.y[mine].unique()), test.y[at]))
    metrics = scores_of(scored(found, widths=False)) | {"loss": population.history[-1]["loss"]}
    cost = population.totals | {"rounds": population.rounds}
    return run.record(metrics, cost, population.algorithm.describe())


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
    the table. A budget that is asked for takes the place of them all."""
    early, late = TASKS[:FIRST], TASKS[FIRST:]
    passes = asked.passes or PASSES
    others = {} if asked.passes else OTHERS
    stages = (
        [cell(task, passes, name) for name in (*FIRST_METHODS, LIMIT) for task in early],
        [cell(task, n, name) for task in TASKS for n in others.get(task, ()) for name in OURS],
        [cell(task, passes, name) for name in (*FIRST_METHODS, LIMIT) for task in late],
        [cell(task, passes, name) for name in LATER_METHODS for task in (*early, *late)],
    )
    return [j for cells in stages for j in jobs_of(NAME, asked, job, cells, METHODS)]


# --- the report ----------------------------------------------------------------------------------


def budgets(results: Results) -> list[int]:
    """Those of the tables: what anybody but FedSOUL had, and FedSOUL alone where it is none of its own."""
    own = {passes for others in OTHERS.values() for passes in others}
    found = {
        r["setting"]["passes"]
        for r in results.records
        if r["method"] not in OURS or r["setting"]["passes"] not in own
    }
    return sorted(found) or [PASSES]


def name_of(setting: dict[str, Any]) -> str:
    return (
        f"{setting['dataset']}, {setting['classes_per_client']} classes per client, {setting['b']} clients, "
        f"{setting['passes']:,} passes"
    )


def paces_of(results: Results, task: FullImageTask) -> list[int]:
    """All of FedSOUL's budgets, the tables' among them."""
    return sorted({*budgets(results), *OTHERS[task]})


def published(setting: dict[str, Any], name: str) -> float | None:
    """What the paper reports."""
    tasks = [(task.images, task.classes) for task in TASKS]
    task = (setting["dataset"], setting["classes_per_client"])
    return PUBLISHED[name][tasks.index(task)] if name in PUBLISHED else None


def table(results: Results, setting: dict[str, Any]) -> Sheet:
    """A row for every method, empty where it has not been run, with the paper's number beside ours."""
    found = []
    for row in rows(results, setting, ALL):
        known = published(setting, row[0])
        found.append((*row[:3], "-" if known is None else f"{known:.1f} %", *row[3:]))
    ours = frozenset(i for i, row in enumerate(found) if row[0] == "FedSOUL")
    return Sheet((*COLUMNS[:3], "the paper's", *COLUMNS[3:]), found, ours)


def paced(results: Results, task: FullImageTask) -> Sheet:
    """FedSOUL's rows by budget, and the published number to reach."""
    found = [
        (f"{name}, {passes:,} passes", *rows(results, setting_of(task, passes), (name,))[0][1:])
        for name in OURS
        for passes in paces_of(results, task)
    ]
    known = published(setting_of(task), "FedSOUL")
    mark = [] if known is None else [("the paper's", "-", f"{known:.1f} %", *["-"] * (len(COLUMNS) - 3))]
    return Sheet(COLUMNS, found + mark)


def paces(results: Results, task: FullImageTask) -> str:
    """Accuracy against the budget."""
    reached: dict[str, dict[float, list[float]]] = {name: {} for name in OURS}
    budgets = paces_of(results, task)
    for name, passes in product(OURS, budgets):
        if found := values(results.of(setting_of(task, passes), name), "accuracy"):
            reached[name][passes / 1000] = [100 * v for v in found]
    known = published(setting_of(task), "FedSOUL")
    mark = {} if known is None else {"the paper's": [(passes / 1000, known) for passes in budgets]}
    return figures.points(reached, mark, "thousands of passes", "test accuracy, %", log_y=False, joined=True)


def settings(results: Results) -> list[dict[str, Any]]:
    return [setting_of(task, passes) for passes in budgets(results) for task in TASKS]


def sheets(results: Results) -> dict[str, Sheet]:
    own = {name_of(s): table(results, s) for s in settings(results)}
    return own | {f"{t.images}, {t.classes} classes per client: budgets": paced(results, t) for t in TASKS}


def page(results: Results) -> Page:
    sections = []
    for setting in settings(results):
        groups = {n: [100 * v for v in values(results.of(setting, n), "accuracy")] for n in ALL}
        there = {n: v for n, v in groups.items() if v}
        drawn = [Figure(plots.dots(there, "test accuracy, %", {"FedSOUL"}), "Every dot is a seed.")]
        text = f"{LEGEND} {PAPERS}"
        sections.append(Section(name_of(setting), text, table(results, setting), drawn if there else []))
    for task in TASKS:
        drawn = [Figure(paces(results, task), "Each seed a dot, medians larger.")]
        title = f"{task.images}, {task.classes} classes per client: FedSOUL with other budgets"
        words = "Plain rounds send one gradient of all images; local epochs take steps on them, and drift."
        sections.append(Section(title, words, paced(results, task), drawn))
    allowed = in_words(budgets(results))
    lead = (
        "All training images over 100 clients with equal shards of the same number of classes, ten of them "
        f"active per round, test images alike. Every method may spend {allowed} backbone passes and shifts "
        "and mirrors its images. FedSOUL has its default settings; those of the others stand at the end. "
        "FedRep, FedAvg-FT and Ditto were searched for with fedpop tune research/full_data/tune.toml, on "
        "images held out of training; the others' were not. Methods with a whole model of each client's own "
        "(Ditto, APFL, Local) see a client's images but a few times within this budget, and are far from "
        f"where they would end. '{LIMIT}' is the same network on all images at once, told each client's "
        "classes. L2GD has everybody in every round."
    )
    sections.append(Section("Settings", sheet=settings_of("full_data")))
    return Page("fedpop: all of CIFAR-10 and CIFAR-100", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=1, data="cifar10", jobs=jobs, budgets=budgets, sheets=sheets, page=page
)
