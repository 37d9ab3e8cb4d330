"""Is a method as often right as it says? Reliability and calibration errors of the full-data runs.

The runs of the personalised methods are those of ``full-data``, whose records are taken from the folder
beside this one. The Bayesian rivals, which sample the whole network and are the same for all clients, are run
here, with the same clients and the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedpop.evaluation.scores import BINS
from fedpop.experiments import full_data
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_methods import BAYESIAN, bayesian
from fedpop.experiments.image_runs import average, jobs_of, measured, missing, shown
from fedpop.experiments.runner import Job
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.looks import looks
from fedpop.report.results import Record, Results
from fedpop.report.side_by_side import reliabilities

NAME = "calibration"
TASKS = full_data.TASKS[: full_data.FIRST]
TAKEN = ("FedSOUL", "FedRep", "FedAvg-FT")
"""Methods whose records are those of the full-data experiment."""
METHODS = (*TAKEN, *BAYESIAN)


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The record of one rival on one task and seed."""
    torch.set_num_threads(1)
    task = TASKS[index]
    federation, setting = task.make(data, seed), full_data.setting_of(task)
    method = bayesian(full_data.OWN, federation)[name](task.model(seed))
    return measured(NAME, setting, name, method, federation, seed, Path(folder))


def taken(found: Record) -> list[Record]:
    """The same record under this experiment's name."""
    return [found | {"experiment": NAME}]


@dataclass(frozen=True)
class Taken(Job):
    """A record of another experiment, taken again where it has changed there."""

    def done(self, results: Results, again: bool = False) -> bool:
        """Whether it is there as it is there now: what another version made is made again there."""
        return taken(*self.arguments)[0] in results.records


def jobs(asked: Asked) -> list[Job]:
    """What full-data has of it, then the rivals."""
    settings = [full_data.setting_of(task) for task in TASKS]
    labels = [f"{task.images} S={task.classes}" for task in TASKS]
    beside = Results.open(asked.folder.parent / full_data.NAME)
    there = [
        Taken(taken, (r,), f"{label}, {name}, seed {r['seed']}", setting, r["seed"], (name,))
        for setting, label in zip(settings, labels, strict=True)
        for name in TAKEN
        for r in beside.of(setting, name)
        if r["seed"] < asked.seeds
    ]
    cells = [(t, name) for name in BAYESIAN for t in range(len(TASKS))]
    return [*there, *jobs_of(asked, job, TASKS, labels, settings, cells)]


# --- what is told of it ----------------------------------------------------------------------

COLUMNS = (
    "method", "seeds", "accuracy", "NLL", "Brier", "ECE", "ECE per client", "confidence less accuracy",
    "passes", "sec.",
)  # fmt: skip
LEGEND = (
    "ECE: mean distance of confidence and accuracy over 15 bins, of all clients' test images together, and "
    "of each client's alone, averaged over clients (which is larger for any method: a client's bins hold "
    "few images). Confidence less accuracy: above 0 a method is too sure of itself. "
)


def curve(found: Sequence[Record]) -> list[tuple[float, float, int]]:
    """Confidence, accuracy and count of each bin, over all records.

    >>> one = {"bin0_confidence": 0.5, "bin0_accuracy": 0.25, "bin0_count": 4}
    >>> other = {"bin0_confidence": 0.5, "bin0_accuracy": 1.0, "bin0_count": 2}
    >>> curve([{"metrics": one}, {"metrics": other}])
    [(0.5, 0.5, 6)]
    """
    bins: dict[int, list[tuple[float, float, int]]] = {}
    for m in (r["metrics"] for r in found):
        for i in range(sum(name.endswith("_count") for name in m)):
            confidence, accuracy, count = (m[f"bin{i}_{n}"] for n in ("confidence", "accuracy", "count"))
            bins.setdefault(math.floor(confidence * BINS), []).append((confidence, accuracy, count))
    out = []
    for _, group in sorted(bins.items()):
        total = sum(n for _, _, n in group)
        sure, right = (sum(v[k] * v[2] for v in group) / total for k in (0, 1))
        out.append((sure, right, total))
    return out


def too_sure(found: Sequence[Record]) -> float:
    """Mean confidence less accuracy, over all test images."""
    bins = curve(found)
    return sum((sure - right) * n for sure, right, n in bins) / max(sum(n for _, _, n in bins), 1)


def table(results: Results, setting: dict[str, Any]) -> Sheet:
    """A row for every method, empty where it has not been run."""
    rows: list[tuple[str, ...]] = []
    for name in METHODS:
        found = results.of(setting, name)
        if none := missing(found, len(COLUMNS) - 2):
            rows.append((name, str(len(found)), *none))
            continue
        rows.append(
            (
                name,
                str(len(found)),
                f"{average(found, 'accuracy', scale=100):.1f} %",
                *[shown(found, score) for score in ("nll", "brier", "ece", "ece_per_client")],
                f"{too_sure(found):+.3f}",
                f"{average(found, 'backbone_passes', 'cost'):,.0f}",
                f"{average(found, 'seconds', 'cost'):.0f}",
            )
        )
    return Sheet(COLUMNS, rows, frozenset(i for i, r in enumerate(rows) if r[0] == "FedSOUL"))


def settings() -> list[dict[str, Any]]:
    return [full_data.setting_of(task) for task in TASKS]


def sheets(results: Results) -> dict[str, Sheet]:
    return {full_data.name_of(s): table(results, s) for s in settings()}


def page(results: Results) -> Page:
    sections = []
    for setting in settings():
        curves = {name: curve(results.of(setting, name)) for name in METHODS}
        there = {name: bins for name, bins in curves.items() if bins}
        figures = [
            Figure(
                reliabilities(there, looks(there)),
                "All clients' test images in 15 bins of confidence, larger dots for more of them. On the "
                "dotted line a method is right as often as it says; below it, it is too sure of itself.",
            )
        ]
        text = f"{LEGEND}Rows of {', '.join(TAKEN)} are made by: fedpop experiment {full_data.NAME}"
        sections.append(
            Section(full_data.name_of(setting), text, table(results, setting), figures if there else [])
        )
    lead = (
        "The clients and the budget are those of the full-data experiment. FedBE, QLSD and DG-LMC sample the "
        "whole network and give all clients the same one, which does not know a client's classes. DG-LMC has "
        "everybody in every round, of which the budget pays for few."
    )
    return Page("fedpop: calibration on CIFAR-10", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=1, data="cifar10", jobs=jobs, sheets=sheets, page=page)
