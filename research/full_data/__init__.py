"""The paper's main table: all images of CIFAR-10 and CIFAR-100 over 100 clients with some classes each.

Every method has four budgets, for accuracy depends on nothing as it does on them, and the published numbers
are those of long runs. Beside the methods stands the network's own limit: the same one on all images at once,
for as many passes, which is given each client's classes when it is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import stdev
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
from fedpop.report.results import Record, Results, mean, values
from fedpop.run.simulate import fit
from fedpop.server.optimisers import Cosine
from research import figures
from research.experiment import Asked, Experiment, Job
from research.images import (
    COLUMNS,
    LEGEND,
    Build,
    Cell,
    Run,
    budgets_of,
    constant,
    in_search,
    in_words,
    jobs_of,
    methods,
    missing,
    rows,
    scores_of,
    searched,
    settings_of,
    shown,
)

NAME = "full-data"
PASSES = 500_000
"""The budget that a column has first of all."""
BUDGETS = (100_000, PASSES, 1_000_000, 3_000_000)
LONG_FROM = 1_000_000
"""Passes from which methods have the settings of long runs."""
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
PAPERS = "The paper's: the accuracy that it reports; after how many passes it does not say."
NEVER = -1e30
"""The head's output for a class that cannot be; minus infinity times nothing would be no number."""
LIMIT = "pooled"
"""The network on everybody's images."""
METHODS = methods("full_data")
IN_LONG_RUNS = methods("full_data", long=True)
FIRST_METHODS = ("FedSOUL", "FedRep", "FedAvg-FT", "FedSOUL-local", "Ditto", "APFL", "Local")
AT_LENGTH = FIRST_METHODS[:3]
"""Those whose longest runs have ``SEEDS`` seeds, and whose other budgets come first."""
SEEDS = 3
TODAY = ("FedBABU", "FedDBE", "pFedFDA", "pFedVEM", "pFedBayes")
"""Methods that the paper does not have, for the images that ``TODAYS`` names."""
TODAYS = "cifar10"
IMAGES = 50_000
"""Images that are trained on, in either set."""
LATER_METHODS = tuple(n for n in METHODS if n not in (*FIRST_METHODS, *TODAY))
ALL = (*FIRST_METHODS, LIMIT, *LATER_METHODS, *TODAY)
SHORT_BY = 3.0
"""Points below the paper's number from which a line says what was tried."""


def build_of(name: str, passes: int) -> Build:
    return (IN_LONG_RUNS if passes >= LONG_FROM else METHODS)[name]


def methods_of(task: FullImageTask) -> tuple[str, ...]:
    """Those of a column, in order."""
    return tuple(n for n in ALL if task.images == TODAYS or n not in TODAY)


def setting_of(task: FullImageTask, passes: int | None = None) -> dict[str, Any]:
    return {
        "dataset": task.images,
        "classes_per_client": task.classes,
        "b": task.b,
        "passes": PASSES if passes is None else passes,
    }


def cell(task: FullImageTask, budgets: Sequence[int], name: str) -> Cell:
    """One run, of the largest of these budgets, with the records of the others on its way."""
    *smaller, passes = budgets
    label = f"{task.images} S={task.classes}, {passes:,} passes"
    others = tuple(setting_of(task, n) for n in smaller)
    return Cell(task, setting_of(task, passes), name, label, smaller=others)


def job(run: Run) -> list[Record]:
    """The records of one method on one task and seed."""
    task, passes = run.cell.task, run.cell.setting["passes"]
    federation = task.make(run.data, run.seed)
    if run.cell.method == LIMIT:
        return [limit(run, federation)]
    return run.measured(build_of(run.cell.method, passes)(task.model(run.seed)), federation)


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


def shared(task: FullImageTask, name: str, budgets: Sequence[int]) -> list[tuple[int, ...]]:
    """Budgets by runs: those before long runs are one run of methods whose rates do not fall."""
    short, long = ([n for n in budgets if (n >= LONG_FROM) == which] for which in (False, True))
    groups = [(n,) for n in long]
    if name in METHODS and short and one_run(name):
        return [tuple(short), *groups]
    return [*[(n,) for n in short], *groups]


@cache
def one_run(name: str) -> bool:
    """The same in every column."""
    return constant(METHODS[name](TASKS[0].model(0)))


def jobs(asked: Asked) -> list[Job]:
    """Column after column, each with one budget first, then with the others. A budget that is asked for takes
    the place of them all."""
    out: list[Job] = []
    known: dict[bool, dict[tuple[str, str], dict[str, Any]]] = {True: {}, False: {}}

    def add(task: FullImageTask, name: str, budgets: Sequence[int], seeds: int) -> None:
        long = budgets[-1] >= LONG_FROM
        made, cells = (IN_LONG_RUNS if long else METHODS), [cell(task, budgets, name)]
        out.extend(jobs_of(NAME, replace(asked, seeds=seeds), job, cells, made, known[long]))

    for task in TASKS:
        names = methods_of(task)
        if asked.passes:
            for name in names:
                add(task, name, (asked.passes,), asked.seeds)
            continue
        runs = {name: shared(task, name, BUDGETS) for name in names}
        for name in names:
            for run in runs[name]:
                if PASSES in run:
                    add(task, name, run, asked.seeds)
        for name in sorted(names, key=lambda n: n not in AT_LENGTH):
            for run in reversed(runs[name]):  # the longest says most
                if PASSES not in run:
                    more = SEEDS if name in AT_LENGTH and run[-1] == BUDGETS[-1] else 1
                    add(task, name, run, max(asked.seeds, more))
    return out


# --- the report ----------------------------------------------------------------------------------


def budgets(results: Results) -> list[int]:
    """The experiment's own, unless there are others."""
    return budgets_of(results, BUDGETS)


def name_of(setting: dict[str, Any]) -> str:
    return (
        f"{setting['dataset']}, {setting['classes_per_client']} classes per client, {setting['b']} clients, "
        f"{setting['passes']:,} passes"
    )


def published(setting: dict[str, Any], name: str) -> float | None:
    """What the paper reports."""
    tasks = [(task.images, task.classes) for task in TASKS]
    task = (setting["dataset"], setting["classes_per_client"])
    return PUBLISHED[name][tasks.index(task)] if name in PUBLISHED else None


def ran(results: Results, setting: dict[str, Any]) -> list[str]:
    """Methods with a record."""
    return [n for n in ALL if results.of(setting, n)]


def table(results: Results, setting: dict[str, Any]) -> Sheet:
    """A row for every method that has been run, with the paper's number beside ours."""
    found = []
    for row in rows(results, setting, ran(results, setting)):
        known = published(setting, row[0])
        found.append((*row[:3], "-" if known is None else f"{known:.1f} %", *row[3:]))
    ours = frozenset(i for i, row in enumerate(found) if row[0] == "FedSOUL")
    return Sheet((*COLUMNS[:3], "the paper's", *COLUMNS[3:]), found, ours)


def by_budget(results: Results, task: FullImageTask) -> Sheet:
    """Every method's accuracy, and ECE, with each budget."""
    allowed = budgets(results)
    columns = ("method", "the paper's", *[f"{passes:,} passes" for passes in allowed])
    found = []
    for name in methods_of(task):
        known = published(setting_of(task), name)
        cells = [accuracy_of(results.of(setting_of(task, passes), name)) for passes in allowed]
        found.append((name, "-" if known is None else f"{known:.1f} %", *cells))
    return Sheet(columns, found, frozenset(i for i, row in enumerate(found) if row[0] == "FedSOUL"))


def accuracy_of(found: Sequence[Record]) -> str:
    """With the standard deviation over seeds, where there are several, and the ECE."""
    if none := missing(found, 1):
        return none[0]
    scores = [100 * v for v in values(found, "accuracy")]
    spread = f" ± {stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{mean(scores):.1f}{spread} % ({shown(found, 'ece')})"


def below(results: Results, task: FullImageTask) -> Sheet:
    """Methods that stay below their published numbers, with what was tried."""
    columns = ("method", "best", "after passes", "the paper's", "points", "settings", "longer runs")
    tried, found = searched("full_data"), []
    for name in methods_of(task):
        known = published(setting_of(task), name)
        reached = {
            passes: 100 * mean(scores)
            for passes in budgets(results)
            if (scores := values(results.of(setting_of(task, passes), name), "accuracy"))
        }
        if known is None or not reached:
            continue
        passes = max(reached, key=lambda n: reached[n])
        if reached[passes] >= known - SHORT_BY:
            continue
        how = f"best of {tried[name]} tried" if tried.get(name, 0) > 1 else "not searched for"
        longer = [n for n in budgets(results) if n > max(reached)]
        told = "none" if not longer else f"{in_words(longer)} passes not run"
        epochs = f"{passes:,}, {passes / IMAGES:.0f} for each image"
        best = (f"{reached[passes]:.1f} %", epochs, f"{known:.1f} %", f"{reached[passes] - known:+.1f}")
        found.append((name, *best, how, told))
    return Sheet(columns, found)


def curves(results: Results, task: FullImageTask) -> str:
    """Accuracy against passes, of every method."""
    reached: dict[str, dict[float, list[float]]] = {}
    allowed = budgets(results)
    for name in methods_of(task):
        for passes in allowed:
            if found := values(results.of(setting_of(task, passes), name), "accuracy"):
                reached.setdefault(name, {})[passes / 1000] = [100 * v for v in found]
    known = published(setting_of(task), "FedSOUL")
    mark = {} if known is None else {"the paper's FedSOUL": [(passes / 1000, known) for passes in allowed]}
    words = ("thousands of passes", "test accuracy, %")
    return figures.points(reached, mark, *words, log_y=False, joined=True, large=True)


def settings(results: Results) -> list[dict[str, Any]]:
    """Of which there are records."""
    found = [setting_of(task, passes) for task in TASKS for passes in budgets(results)]
    return [s for s in found if ran(results, s)]


def column(task: FullImageTask) -> str:
    return f"{task.images}, {task.classes} classes per client"


def sheets(results: Results) -> dict[str, Sheet]:
    out = {}
    for task in TASKS:
        out[f"{column(task)}: accuracy (ECE) by budget"] = by_budget(results, task)
        if (lines := below(results, task)).rows:
            out[f"{column(task)}: below the paper's"] = lines
    return out | {name_of(s): table(results, s) for s in settings(results)}


def page(results: Results) -> Page:
    sections = []
    for task in TASKS:
        drawn = [Figure(curves(results, task), "Each seed a dot, medians larger.")]
        words = (
            "Accuracy in percent, with its standard deviation over seeds where there are several, and the "
            f"ECE of pooled predictions in brackets. {PAPERS}"
        )
        title = f"{column(task)}: accuracy by budget"
        there = any(ran(results, setting_of(task, passes)) for passes in budgets(results))
        sections.append(Section(title, words, by_budget(results, task), drawn if there else [], wide=True))
        if (lines := below(results, task)).rows:
            words = (
                f"Methods that end more than {SHORT_BY:g} points below the paper's number, and what was "
                "tried: how many settings, for how long. Where a client trains a whole model by itself, it "
                "sees its images as often as the passes per image say, however many clients there are."
            )
            sections.append(Section(f"{column(task)}: below the paper's", words, lines))
    for setting in settings(results):
        groups = {n: [100 * v for v in values(results.of(setting, n), "accuracy")] for n in ALL}
        with_scores = {n: v for n, v in groups.items() if v}
        drawn = [Figure(plots.dots(with_scores, "test accuracy, %", {"FedSOUL"}), "Every dot is a seed.")]
        text = f"{LEGEND} {PAPERS}"
        sections.append(
            Section(name_of(setting), text, table(results, setting), drawn if with_scores else [])
        )
    allowed = in_words(budgets(results))
    lead = (
        "All training images over 100 clients with equal shards of the same number of classes, ten of them "
        f"active per round, test images alike. Every method may spend {allowed} backbone passes and shifts "
        "and mirrors its images. FedSOUL has its default settings; those of the others stand at the end, "
        "with what they have otherwise in runs of a million passes or more, where rates fall along a cosine. "
        f"{in_search('full_data', METHODS)} "
        f"'{LIMIT}' is the same network on all images at once, told each client's classes. L2GD has "
        "everybody in every round. Three million passes of FedSOUL, FedRep and FedAvg-FT are to have three "
        "seeds, all else has one."
    )
    sections.append(Section("Settings", sheet=settings_of("full_data")))
    return Page("fedpop: all of CIFAR-10 and CIFAR-100", lead, sections)


def pictures(results: Results) -> dict[str, str]:
    """Of the columns that have a record."""
    found = [t for t in TASKS if any(ran(results, setting_of(t, passes)) for passes in budgets(results))]
    return {f"{task.images}-{task.classes}": curves(results, task) for task in found}


def at_length(r: Record) -> bool:
    return r["method"] in AT_LENGTH and r["setting"]["passes"] == BUDGETS[-1]


EXPERIMENT = Experiment(
    name=NAME,
    seeds=1,
    data="cifar10",
    jobs=jobs,
    budgets=budgets,
    pictures=pictures,
    per_seed=lambda r: not at_length(r),
    sheets=sheets,
    page=page,
)
