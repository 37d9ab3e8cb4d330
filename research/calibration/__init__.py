"""Is a method as often right as it says? Reliability and calibration errors of the full-data runs.

The runs of the personalised methods are those of ``full-data``, whose records are taken from its folder. The
Bayesian rivals, which sample the whole network and are the same for all clients, are run here, with the same
clients and the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpop.client.local_sgd import LocalSGD
from fedpop.evaluation.scores import CALIBRATION_BINS
from fedpop.federation.clients import Federation
from fedpop.methods.dg_lmc import DGLMC
from fedpop.methods.fedbe import FedBE
from fedpop.methods.qlsd import QLSD
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results
from fedpop.report.side_by_side import reliabilities
from fedpop.report.style import looks
from fedpop.server.optimisers import Cosine
from research import full_data
from research.experiment import Asked, Experiment, Job
from research.images import Build, Cell, Run, average, budgets_of, jobs_of, missing, shown

NAME = "calibration"
TASKS = tuple(task for task in full_data.TASKS if task.images == "cifar10")
TAKEN = ("FedSOUL", "FedRep", "FedAvg-FT")
"""Methods whose records are those of the full-data experiment."""
BAYESIAN = ("FedBE", "QLSD", "DG-LMC")
METHODS = (*TAKEN, *BAYESIAN)
MEMBERS = 20
"""Models that chains on the whole network keep: every one costs a pass over all test images."""


def bayesian(own: LocalSGD, federation: Federation) -> dict[str, Build]:
    """Methods with samples of the whole network, the same for all clients; none of them is personalised.

    Steps of chains are as long as those of SGD without momentum: asking all clients for the curvature, by
    which they are chosen by default, takes more passes than the whole budget. A client of DG-LMC is held to
    the server's model by a quarter of what its own step allows.
    """
    examples, plain = len(federation.train.y), 5 * own.rate
    step = plain * len(federation) / examples
    return {
        "FedBE": lambda model: FedBE(model, local=own, schedule=Cosine()),
        "QLSD": lambda model: QLSD(model, step=plain / examples, batch=own.batch, samples=MEMBERS),
        "DG-LMC": lambda model: DGLMC(model, step=step, rho=4 * step, batch=own.batch, samples=MEMBERS),
    }


def job(run: Run) -> list[Record]:
    """The record of one rival on one task and seed."""
    task = run.cell.task
    federation = task.make(run.data, run.seed)
    build = bayesian(full_data.OWN, federation)[run.cell.method]
    return run.measured(build(task.model(run.seed)), federation)


def taken(found: Record) -> list[Record]:
    """The same record under this experiment's name."""
    return [found | {"experiment": NAME}]


@dataclass(frozen=True)
class Taken(Job):
    """A record of another experiment, taken again where it has changed there."""

    def done(self, results: Results) -> bool:
        """Whether it is there as it is there now: what another version made is made again there."""
        return taken(*self.arguments)[0] in results.records


def beside(folder: Path) -> Path:
    """Where full-data has its records: its own folder, or that of its name beside another than ours."""
    ours = folder == EXPERIMENT.folder
    return full_data.EXPERIMENT.folder if ours else folder.parent / full_data.NAME


def jobs(asked: Asked) -> list[Job]:
    """What full-data has of it, then the rivals."""
    found = Results.open(beside(asked.folder))
    settings = [
        (task, full_data.setting_of(task, asked.passes), f"{task.images} S={task.classes}") for task in TASKS
    ]
    there = [
        Taken(taken, (r,), f"{label}, {name}, seed {r['seed']}", setting, r["seed"], (name,))
        for _, setting, label in settings
        for name in TAKEN
        for r in found.of(setting, name)
        if r["seed"] < asked.seeds
    ]
    cells = [Cell(task, setting, name, label) for name in BAYESIAN for task, setting, label in settings]
    return [*there, *jobs_of(NAME, asked, job, cells)]


# --- the report ----------------------------------------------------------------------------------

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
            bar = math.floor(confidence * CALIBRATION_BINS)
            bins.setdefault(bar, []).append((confidence, accuracy, count))
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


def budgets(results: Results) -> list[int]:
    return budgets_of(results, [full_data.PASSES])


def settings(results: Results) -> list[dict[str, Any]]:
    return [full_data.setting_of(task, passes) for passes in budgets(results) for task in TASKS]


def sheets(results: Results) -> dict[str, Sheet]:
    return {full_data.name_of(s): table(results, s) for s in settings(results)}


def page(results: Results) -> Page:
    sections = []
    for setting in settings(results):
        curves = {name: curve(results.of(setting, name)) for name in METHODS}
        there = {name: bins for name, bins in curves.items() if bins}
        figures = [
            Figure(
                reliabilities(there, looks(there)),
                "All clients' test images in 15 bins of confidence, larger dots for more of them. On the "
                "dotted line a method is right as often as it says; below it, it is too sure of itself.",
            )
        ]
        text = f"{LEGEND}Rows of {', '.join(TAKEN)} are made by: python -m research {full_data.NAME}"
        sections.append(
            Section(full_data.name_of(setting), text, table(results, setting), figures if there else [])
        )
    lead = (
        "The clients and the budget are those of the full-data experiment. FedBE, QLSD and DG-LMC sample the "
        "whole network and give all clients the same one, which does not know a client's classes. DG-LMC has "
        "everybody in every round, of which the budget pays for few."
    )
    return Page("fedpop: calibration on CIFAR-10", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=1, data="cifar10", jobs=jobs, budgets=budgets, sheets=sheets, page=page
)
