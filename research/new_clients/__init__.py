"""Clients never seen: a fifth of them takes no part in training and comes with 0 to 100 labelled images.

FedSOUL draws a newcomer's z from the population prior, or from its posterior given the few images, with theta
fixed; a second row has the prior as wide as the clients in training would have it for newcomers
(``Population.for_newcomers``). FedRep fits a head, FedAvg-FT tunes the whole network, each by its own rule
and as in training; without any image FedRep has no model, and FedAvg-FT the shared one.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from fedpop.data.image_task import FullImageTask
from fedpop.federation.clients import Client
from fedpop.keys import Key
from fedpop.population import Population, evaluate_few
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, record, values
from research.experiment import Asked, Experiment, Job
from research.figures import spread
from research.full_data import TODAY
from research.images import (
    Cell,
    Run,
    after_title,
    average,
    budgets_of,
    in_words,
    jobs_of,
    methods,
    missing,
    scores_of,
)

NAME = "new-clients"
PASSES = 500_000
SHARE = 0.2
"""Of the clients, who are kept out of training."""
EXAMPLES = (0, 1, 5, 25, 100)
"""Labelled images that a new client has."""
TASKS = (FullImageTask("cifar10", 5), FullImageTask("cifar10", 2))
WIDTH = "FedSOUL-width"
"""Clients in training are asked how wide the prior should be for newcomers."""
BUILDS = methods("full_data")
METHODS = {
    n: BUILDS["FedSOUL" if n == WIDTH else n] for n in ("FedSOUL", WIDTH, "FedRep", "FedAvg-FT", *TODAY)
}


def newcomers_of(task: FullImageTask) -> int:
    return round(SHARE * task.b)


def setting_of(task: FullImageTask, examples: int | None = None, passes: int | None = None) -> dict[str, Any]:
    """Of new clients with so many images; None for those in training, with all of theirs."""
    setting = {
        "dataset": task.images,
        "classes_per_client": task.classes,
        "b": task.b,
        "new": newcomers_of(task),
        "passes": PASSES if passes is None else passes,
    }
    return setting if examples is None else setting | {"examples": examples}


def name_of(task: FullImageTask) -> str:
    return f"{task.images} S={task.classes}"


def job(run: Run) -> list[Record]:
    """The records of one method on one task and seed: clients in training, and new ones with each number of
    images."""
    task, name, out = run.cell.task, run.cell.method, list[Record]()
    assert isinstance(task, FullImageTask)
    federation, new = task.split(run.data, run.seed, newcomers_of(task))
    newcomers = [shuffled(client, i, run.seed) for i, client in enumerate(new)]

    def more(population: Population) -> dict[str, float]:
        more: dict[str, float] = {}
        if name == WIDTH:
            start = time.perf_counter()
            population = population.for_newcomers(EXAMPLES, split="train")
            more = {f"width_{n}": factor for n, factor in population.newcomers.items()}
            more["seconds_to_ask"] = time.perf_counter() - start
        for examples in EXAMPLES:
            scores = few(population, newcomers, examples)
            if scores is not None:
                setting, config = run.cell.setting | {"examples": examples}, population.algorithm.describe()
                out.append(record(NAME, setting, name, run.seed, scores, {}, config))
        return more

    return run.measured(METHODS[name](task.model(run.seed)), federation, more) + out


def shuffled(client: Client, i: int, seed: int) -> Client:
    """Its images in random order, so that the first few are a draw from all."""
    key = Key(seed, purpose="new-clients")
    order = key.uniform(torch.tensor([i]), (len(client.y),), torch.float64)[0].argsort()
    return Client(client.x[order], client.y[order], test=client.test)


def few(population: Population, newcomers: list[Client], examples: int) -> dict[str, float] | None:
    """Scores of new clients with so many images each, and the seconds from these to predictions."""
    start = time.perf_counter()
    found = evaluate_few(population, newcomers, examples)
    seconds = (time.perf_counter() - start) / len(newcomers)
    return None if found is None else scores_of(found) | {"seconds_per_client": seconds}


def jobs(asked: Asked) -> list[Job]:
    cells = [
        Cell(task, setting_of(task, passes=asked.passes), name, name_of(task))
        for task in TASKS
        for name in METHODS
    ]
    return jobs_of(NAME, asked, job, cells, METHODS)


# --- the report ----------------------------------------------------------------------------------

COLUMNS = ("images", "method", "seeds", "accuracy", "worst tenth", "NLL", "ECE", "sec. per client")
LEGEND = (
    "Images: labelled ones that each new client has; 'in training' are the other clients, with all of "
    "theirs. Accuracy: mean over clients, and over the worst tenth of them; NLL and ECE (15 bins) over all "
    "their test images; seconds of one core from a new client's images to predictions of its test images. "
    "'No model': a method that has nothing to offer without data. "
    f"{WIDTH}: the clients in training were asked once how wide the prior should be for newcomers. "
)


def row(results: Results, setting: dict[str, Any], examples: int | None, name: str) -> tuple[str, ...]:
    label = "in training" if examples is None else str(examples)
    trained = results.of(setting, name)
    found = trained if examples is None else results.of(setting | {"examples": examples}, name)
    if none := missing(found, len(COLUMNS) - 3):
        word = missing(trained, 1) or ("no model",)
        return (label, name, str(len(found)), *word, *none[1:])
    seconds = values(found, "seconds_per_client")
    return (
        label,
        name,
        str(len(found)),
        f"{average(found, 'accuracy', scale=100):.1f} %",
        f"{average(found, 'accuracy_worst_decile', scale=100):.1f} %",
        f"{average(found, 'nll'):.3f}",
        f"{average(found, 'ece'):.3f}",
        f"{average(found, 'seconds_per_client'):.2f}" if seconds else "-",
    )


def table(results: Results, setting: dict[str, Any]) -> Sheet:
    """A row for every number of images and every method."""
    rows = [row(results, setting, n, name) for n in (*EXAMPLES, None) for name in METHODS]
    return Sheet(COLUMNS, rows, frozenset(i for i, r in enumerate(rows) if r[1] in ("FedSOUL", WIDTH)))


def figures(results: Results, setting: dict[str, Any]) -> list[Figure]:
    out = []
    shown = (("accuracy", 100.0, "accuracy, %"), ("nll", 1.0, "NLL"), ("ece", 1.0, "ECE"))
    for score, scale, label in shown:
        groups = {
            str(n): {
                name: [scale * v for v in values(results.of(setting | {"examples": n}, name), score)]
                for name in METHODS
            }
            for n in EXAMPLES
        }
        if any(v for group in groups.values() for v in group.values()):
            drawn = spread(groups, "labelled images of a new client", label, log_y=False)
            out.append(Figure(drawn, "Every dot is a seed."))
    return out


def budgets(results: Results) -> list[int]:
    return budgets_of(results, [PASSES])


def settings(results: Results) -> dict[str, dict[str, Any]]:
    """By their names, in which a budget stands where it is another than the experiment's own."""
    return {
        name_of(task) + after_title(passes, PASSES): setting_of(task, passes=passes)
        for passes in budgets(results)
        for task in TASKS
    }


def sheets(results: Results) -> dict[str, Sheet]:
    return {name: table(results, setting) for name, setting in settings(results).items()}


def page(results: Results) -> Page:
    sections = [
        Section(name, LEGEND, table(results, setting), figures(results, setting), wide=True)
        for name, setting in settings(results).items()
    ]
    allowed = in_words(budgets(results))
    lead = (
        f"All training images over 100 clients with equal shards of some classes (S); {SHARE:.0%} of the "
        "clients are kept out of training, of which the others, ten of them active per round, may spend "
        f"{allowed} backbone passes. A new client is then given a few of its own labelled images."
    )
    return Page("fedpop: new clients", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=1, data="cifar10", jobs=jobs, budgets=budgets, sheets=sheets, page=page
)
