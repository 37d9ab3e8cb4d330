"""Clients never seen: a fifth of them takes no part in training and comes with 0 to 100 labelled images.

FedSOUL draws a newcomer's z from the population prior, or from its posterior given the few images, with theta
fixed; a second row has the prior as wide as the clients in training would have it for newcomers
(``Population.for_newcomers``). FedRep fits a head, FedAvg-FT tunes the whole network, each by its own rule
and as in training; without any image FedRep has no model, and FedAvg-FT the shared one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from fedpop.data.image_task import FullImageTask
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_methods import methods
from fedpop.experiments.image_runs import average, jobs_of, measured, missing, told
from fedpop.experiments.runner import Job
from fedpop.federation.clients import Client
from fedpop.keys import Key
from fedpop.population import Population, evaluate_few
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, record, values

NAME = "new-clients"
PASSES = 500_000
SHARE = 0.2
"""Of the clients, who are kept out of training."""
EXAMPLES = (0, 1, 5, 25, 100)
"""Labelled images that a new client has."""
TASKS = (FullImageTask("cifar10", 5), FullImageTask("cifar10", 2))
WIDTH = "FedSOUL-width"
"""Clients in training are asked how wide the prior should be for newcomers."""
BUILDS = methods("full-data")
METHODS = {n: BUILDS["FedSOUL" if n == WIDTH else n] for n in ("FedSOUL", WIDTH, "FedRep", "FedAvg-FT")}


def newcomers_of(task: FullImageTask) -> int:
    return round(SHARE * task.b)


def setting_of(task: FullImageTask, examples: int | None = None) -> dict[str, Any]:
    """Of new clients with so many images; None for those in training, with all of theirs."""
    setting = {
        "dataset": task.images,
        "classes_per_client": task.classes,
        "b": task.b,
        "new": newcomers_of(task),
        "passes": PASSES,
    }
    return setting if examples is None else setting | {"examples": examples}


def name_of(task: FullImageTask) -> str:
    return f"{task.images} S={task.classes}"


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The records of one method on one task and seed: clients in training, and new ones with each number of
    images."""
    torch.set_num_threads(1)
    task, out = TASKS[index], list[Record]()
    federation, held = task.split(data, seed, newcomers_of(task))
    newcomers = [shuffled(client, i, seed) for i, client in enumerate(held)]

    def more(population: Population) -> dict[str, float]:
        told: dict[str, float] = {}
        if name == WIDTH:
            start = time.perf_counter()
            population = population.for_newcomers(EXAMPLES, split="train")
            told = {f"width_{n}": factor for n, factor in population.newcomers.items()}
            told["seconds_to_ask"] = time.perf_counter() - start
        for examples in EXAMPLES:
            scores = few(population, newcomers, examples)
            if scores is not None:
                config = population.algorithm.describe()
                out.append(record(NAME, setting_of(task, examples), name, seed, scores, {}, config))
        return told

    method = METHODS[name](task.model(seed))
    return measured(NAME, setting_of(task), name, method, federation, seed, Path(folder), more) + out


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
    return None if found is None else told(found) | {"seconds_per_client": seconds}


def jobs(asked: Asked) -> list[Job]:
    cells = [(t, name) for t in range(len(TASKS)) for name in METHODS]
    labels, told = [name_of(t) for t in TASKS], [setting_of(t) for t in TASKS]
    return jobs_of(asked, job, TASKS, labels, told, cells, methods=METHODS)


# --- what is told of it ----------------------------------------------------------------------

COLUMNS = ("images", "method", "seeds", "accuracy", "worst tenth", "NLL", "ECE", "sec. per client")
LEGEND = (
    "Images: labelled ones that each new client has; 'in training' are the other clients, with all of "
    "theirs. Accuracy: mean over clients, and over the worst tenth of them; NLL and ECE (15 bins) over all "
    "their test images; seconds of one core from a new client's images to predictions of its test images. "
    "'No model': a method that has nothing to offer without data. "
    f"{WIDTH}: the clients in training were asked once how wide the prior should be for newcomers. "
)


def row(results: Results, task: FullImageTask, examples: int | None, name: str) -> tuple[str, ...]:
    label = "in training" if examples is None else str(examples)
    found, trained = results.of(setting_of(task, examples), name), results.of(setting_of(task), name)
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


def table(results: Results, task: FullImageTask) -> Sheet:
    """A row for every number of images and every method."""
    rows = [row(results, task, n, name) for n in (*EXAMPLES, None) for name in METHODS]
    return Sheet(COLUMNS, rows, frozenset(i for i, r in enumerate(rows) if r[1] in ("FedSOUL", WIDTH)))


def figures(results: Results, task: FullImageTask) -> list[Figure]:
    out = []
    shown = (("accuracy", 100.0, "accuracy, %"), ("nll", 1.0, "NLL"), ("ece", 1.0, "ECE"))
    for score, scale, label in shown:
        groups = {
            str(n): {
                name: [scale * v for v in values(results.of(setting_of(task, n), name), score)]
                for name in METHODS
            }
            for n in EXAMPLES
        }
        if any(v for group in groups.values() for v in group.values()):
            drawn = plots.spread(groups, "labelled images of a new client", label, log_y=False)
            out.append(Figure(drawn, "Every dot is a seed."))
    return out


def sheets(results: Results) -> dict[str, Sheet]:
    return {name_of(task): table(results, task) for task in TASKS}


def page(results: Results) -> Page:
    sections = [
        Section(name_of(task), LEGEND, table(results, task), figures(results, task), wide=True)
        for task in TASKS
    ]
    lead = (
        f"All training images over 100 clients with equal shards of some classes (S); {SHARE:.0%} of the "
        "clients are kept out of training, of which the others, ten of them active per round, may spend "
        f"{PASSES:,} backbone passes. A new client is then given a few of its own labelled images."
    )
    return Page("fedpop: new clients", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=1, data="cifar10", jobs=jobs, sheets=sheets, page=page)
