"""The paper's figure on small clients: 100 of them with five classes of CIFAR-10 each, most with few images.

A share of the clients has 5 or 10 images and the rest 25, ten take part in a round, and every method may
spend the same number of backbone passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedpop.data.image_task import ImageTask
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_runs import COLUMNS, LEGEND, jobs_of, measured, methods, rows
from fedpop.experiments.runner import Job
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, interval95, values

NAME = "small-data"
PASSES = 60_000
RATE, BATCH = 0.02, 10
CLIENTS = 100
RIVAL = "FedRep"
METHODS = {n: b for n, b in methods(RATE, BATCH).items() if n in ("FedSOUL", RIVAL, "APFL", "FedAvg-FT")}
TASKS = tuple(
    ImageTask("cifar10", 5, small=share, n_small=n, large=CLIENTS - share, n_large=25, validation=0)
    for n in (5, 10)
    for share in (10, 50, 90)
)


def setting_of(task: ImageTask) -> dict[str, Any]:
    return {
        "dataset": task.images,
        "classes_per_client": task.classes,
        "b": task.small + task.large,
        "share_small": task.small / (task.small + task.large),
        "n_small": task.n_small,
        "n_large": task.n_large,
        "passes": PASSES,
    }


def name_of(setting: dict[str, Any]) -> str:
    return f"{100 * setting['share_small']:.0f} % with {setting['n_small']}"


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The record of one method on one task and seed."""
    torch.set_num_threads(1)
    task = TASKS[index]
    method = METHODS[name](task.model(seed))
    return measured(NAME, setting_of(task), name, method, task.make(data, seed), seed, Path(folder))


def jobs(asked: Asked) -> list[Job]:
    cells, told = [(t, name) for t in range(len(TASKS)) for name in METHODS], [setting_of(t) for t in TASKS]
    return jobs_of(asked, job, TASKS, [name_of(s) for s in told], told, cells)


# --- what is told of it ----------------------------------------------------------------------


def everything(results: Results) -> Sheet:
    """One row for each share, size and method."""
    out = [(name_of(s), *row) for s in (setting_of(t) for t in TASKS) for row in rows(results, s, METHODS)]
    return Sheet(("clients", *COLUMNS), out, frozenset(i for i, r in enumerate(out) if r[1] == "FedSOUL"))


def gains(results: Results) -> Sheet:
    """FedSOUL's accuracy less each rival's, paired by seed."""
    columns = ("clients", "rival", "seeds", "points", "95 % interval", "ECE over the rival's")
    out = []
    for task in TASKS:
        setting = setting_of(task)
        for rival in METHODS:
            of = {n: {r["seed"]: r["metrics"] for r in results.of(setting, n)} for n in ("FedSOUL", rival)}
            seeds = sorted(of["FedSOUL"].keys() & of[rival].keys())
            if rival == "FedSOUL" or not seeds:
                continue
            points = [100 * (of["FedSOUL"][s]["accuracy"] - of[rival][s]["accuracy"]) for s in seeds]
            eces = [of["FedSOUL"][s]["ece"] / of[rival][s]["ece"] for s in seeds]
            centre, low, high = interval95(points)
            reach = f"{low:+.1f} to {high:+.1f}" if len(points) > 1 else "-"
            ratio = sum(eces) / len(eces)
            out.append((name_of(setting), rival, str(len(seeds)), f"{centre:+.1f}", reach, f"{ratio:.2f}"))
    return Sheet(columns, out)


def sheets(results: Results) -> dict[str, Sheet]:
    return {"FedSOUL less the others": gains(results), "All numbers": everything(results)}


def page(results: Results) -> Page:
    figures = []
    for score, scale, label in (("accuracy", 100.0, "test accuracy, %"), ("ece", 1.0, "ECE")):
        groups = {
            name_of(s).replace(" with ", "\nN = "): {
                m: [scale * v for v in values(results.of(s, m), score)] for m in METHODS
            }
            for s in (setting_of(t) for t in TASKS)
        }
        figures.append(
            Figure(
                plots.spread(groups, "share and size of the small clients", label, log_y=False),
                "Every dot is a seed.",
            )
        )
    lead = (
        "CIFAR-10 over 100 clients with five classes each: a share of them has 5 or 10 images, the rest 25. "
        f"Ten are active per round, and every method may spend {PASSES:,} backbone passes. FedSOUL has its "
        f"default settings; all steps of local SGD are of {RATE:g} with momentum .9 and batches of {BATCH}."
    )
    sections = [
        Section("Accuracy and calibration", figures=figures, wide=True),
        Section("FedSOUL less the others", "Differences in points, paired by seed.", gains(results)),
        Section("All numbers", LEGEND, everything(results)),
    ]
    return Page("fedpop: small clients", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=3, data="cifar10", jobs=jobs, sheets=sheets, page=page)
