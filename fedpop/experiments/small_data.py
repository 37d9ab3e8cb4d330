"""The paper's figure on small clients: 100 of them with some classes of CIFAR each, most with few images.

A share of the clients has 5 or 10 images and the rest 25, ten take part in a round, and every method may
spend the same number of backbone passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedpop.data.image_task import ImageTask
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_methods import methods, settings_of
from fedpop.experiments.image_runs import COLUMNS, LEGEND, jobs_of, measured, rows
from fedpop.experiments.runner import Job
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, interval95, values

NAME = "small-data"
PASSES = 60_000
CLIENTS = 100
RIVAL = "FedRep"
FIRST_METHODS = ("FedSOUL", RIVAL, "APFL", "FedAvg-FT")
METHODS = methods(NAME)
GROUPS = (("cifar10", 5), ("cifar10", 2), ("cifar100", 20))
"""Images, and how many classes a client has."""
TASKS = tuple(
    ImageTask(images, classes, small=share, n_small=n, large=CLIENTS - share, n_large=25, validation=0)
    for images, classes in GROUPS
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


def group_of(setting: dict[str, Any]) -> str:
    return f"{setting['dataset']} S={setting['classes_per_client']}"


def name_of(setting: dict[str, Any]) -> str:
    return f"{100 * setting['share_small']:.0f} % with {setting['n_small']}"


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The record of one method on one task and seed."""
    torch.set_num_threads(1)
    task = TASKS[index]
    method = METHODS[name](task.model(seed))
    return measured(NAME, setting_of(task), name, method, task.make(data, seed), seed, Path(folder))


def jobs(asked: Asked) -> list[Job]:
    """The first stage for all seeds; then its tasks with the other methods; then the other tasks."""
    told = [setting_of(task) for task in TASKS]
    labels = [f"{group_of(s)}, {name_of(s)}" for s in told]
    first = [t for t, s in enumerate(told) if group_of(s) == group_of(told[0])]
    stages = (
        [(t, name) for t in first for name in FIRST_METHODS],
        [(t, name) for t in first for name in METHODS if name not in FIRST_METHODS],
        [(t, name) for t in range(len(TASKS)) if t not in first for name in METHODS],
    )
    return [j for cells in stages for j in jobs_of(asked, job, TASKS, labels, told, cells, methods=METHODS)]


# --- what is told of it ----------------------------------------------------------------------


Settings = Sequence[dict[str, Any]]


def groups() -> dict[str, Settings]:
    """The settings of each set of images and number of classes."""
    out: dict[str, list[dict[str, Any]]] = {}
    for setting in map(setting_of, TASKS):
        out.setdefault(group_of(setting), []).append(setting)
    return dict(out)


def everything(results: Results, settings: Settings) -> Sheet:
    """One row for each share, size and method."""
    out = [(name_of(s), *row) for s in settings for row in rows(results, s, METHODS)]
    return Sheet(("clients", *COLUMNS), out, frozenset(i for i, r in enumerate(out) if r[1] == "FedSOUL"))


def gains(results: Results, settings: Settings) -> Sheet:
    """FedSOUL's accuracy less each rival's, paired by seed."""
    columns = ("clients", "rival", "seeds", "points", "95 % interval", "ECE over the rival's")
    out = []
    for setting in settings:
        ours = _scores(results, setting, "FedSOUL")
        for rival in METHODS:
            theirs = _scores(results, setting, rival)
            seeds = sorted(ours.keys() & theirs.keys())
            if rival == "FedSOUL" or not seeds:
                continue
            points = [100 * (ours[s]["accuracy"] - theirs[s]["accuracy"]) for s in seeds]
            eces = [ours[s]["ece"] / theirs[s]["ece"] for s in seeds]
            centre, low, high = interval95(points)
            reach = f"{low:+.1f} to {high:+.1f}" if len(points) > 1 else "-"
            ratio = sum(eces) / len(eces)
            out.append((name_of(setting), rival, str(len(seeds)), f"{centre:+.1f}", reach, f"{ratio:.2f}"))
    return Sheet(columns, out)


def _scores(results: Results, setting: dict[str, Any], name: str) -> dict[int, dict[str, float]]:
    """By seed, of the runs that did not break down."""
    found = {r["seed"]: r["metrics"] for r in results.of(setting, name)}
    return {seed: m for seed, m in found.items() if m.get("accuracy") is not None}


def sheets(results: Results) -> dict[str, Sheet]:
    out = {}
    for group, settings in groups().items():
        out[f"{group}: FedSOUL less the others"] = gains(results, settings)
        out[f"{group}: all numbers"] = everything(results, settings)
    return out


def figures(results: Results, settings: Settings) -> list[Figure]:
    out = []
    for score, scale, label in (("accuracy", 100.0, "test accuracy, %"), ("ece", 1.0, "ECE")):
        shown = {
            name_of(s).replace(" with ", "\nN = "): {
                m: [scale * v for v in values(results.of(s, m), score)] for m in METHODS
            }
            for s in settings
        }
        if any(v for methods in shown.values() for v in methods.values()):
            drawn = plots.spread(shown, "share and size of the small clients", label, log_y=False)
            out.append(Figure(drawn, "Every dot is a seed."))
    return out


def page(results: Results) -> Page:
    lead = (
        "CIFAR over 100 clients with the same number of classes (S) each: a share of them has 5 or 10 "
        f"images, the rest 25. Ten are active per round, and every method may spend {PASSES:,} backbone "
        "passes. FedSOUL has its default settings; those of the others stand at the end."
    )
    sections = []
    for group, settings in groups().items():
        sections += [
            Section(f"{group}: accuracy and calibration", figures=figures(results, settings), wide=True),
            Section(
                f"{group}: FedSOUL less the others",
                "Differences in points, paired by seed.",
                gains(results, settings),
            ),
            Section(f"{group}: all numbers", LEGEND, everything(results, settings)),
        ]
    sections.append(Section("Settings", sheet=settings_of(NAME)))
    return Page("fedpop: small clients", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=3, data="cifar10", jobs=jobs, sheets=sheets, page=page)
