"""What the experiments on images share: runs on a budget of passes, scores, and tables of them.

Every method sees the same clients, networks, augmentation and draws of active clients, and may spend the
same number of backbone example-passes. Nothing is chosen on test images: a run ends where its budget does. A
run is kept in a folder while it lasts, so that an experiment that was stopped goes on in its midst.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedpop.data.image_task import PictureTask
from fedpop.errors import OtherSettingsError, TrainingError, warn_user
from fedpop.evaluation.scores import Evaluation
from fedpop.experiments.budget import rounds_within
from fedpop.experiments.experiment import Asked
from fedpop.experiments.image_methods import Build
from fedpop.experiments.runner import Job
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Everyone, Uniform
from fedpop.methods.base import Algorithm
from fedpop.population import Population, evaluate
from fedpop.report.results import Record, Results, mean, record, values
from fedpop.run.simulate import fit

ACTIVE = 10
"""Clients of a round, as in the paper."""


def jobs_of(
    asked: Asked,
    call: Callable[..., list[Record]],
    tasks: Sequence[PictureTask],
    labels: Sequence[str],
    settings: Sequence[dict[str, Any]],
    cells: Sequence[tuple[int, str]],
    also: Sequence[tuple[str, str]] = (),
    methods: Mapping[str, Build] | None = None,
) -> list[Job]:
    """A job for each seed and each (task, method), in this order; ``call`` is given the task's number, the
    method's name, the seed, and the folders of data and of records. ``also`` are further splits of images
    that the jobs of a task read. With ``methods``, what was run with other settings is run again."""
    data = None if asked.data is None else str(asked.data)
    wanted = {
        (images, name): settings_in(methods[name](tasks[t].model(0)))
        for (images, name), t in {(tasks[t].images, name): t for t, name in cells}.items()
        if methods is not None and name in methods
    }
    return [
        Job(
            call,
            (t, name, seed, data, str(asked.folder)),
            f"{labels[t]}, {name}, seed {seed}",
            settings[t],
            seed,
            (name,),
            wanted.get((tasks[t].images, name)),
            needs=((tasks[t].images, "train"), (tasks[t].images, "test"), *also[t : t + 1]),
        )
        for seed in range(asked.seeds)
        for t, name in cells
    ]


def settings_in(method: Algorithm) -> dict[str, Any]:
    """What a record tells of the method before it has run: not which engine ran."""
    told: dict[str, Any] = json.loads(json.dumps(method.describe()))
    return {k: v for k, v in told.items() if k != "engine"}


def trained(
    method: Algorithm, federation: Federation, passes: float, seed: int, out: Path, active: int = ACTIVE
) -> Population:
    """A run of as many rounds as the budget pays for; some methods need everybody in each."""
    rule = Everyone() if method.participation == "full" else Uniform(min(active, len(federation)))
    rounds = rounds_within(method, federation, passes, seed, rule)

    def go_on() -> Population:
        return fit(
            method,
            federation,
            rounds=rounds,
            seed=seed,
            participation=rule,
            out=out,
            resume=True,
            progress=False,
        )

    try:
        return go_on()
    except OtherSettingsError as error:  # a run that is in use, or a full disk, is another matter
        warn_user(f"the run in {out} was left by other settings and is begun anew ({error})")
        shutil.rmtree(out)
        return go_on()


def told(found: Evaluation) -> dict[str, float]:
    """The scores that records of images have: accuracy over clients, the others over all test images."""
    summary = found.summary()
    out = {
        "accuracy": summary["accuracy"],
        "accuracy_std": summary["accuracy_sd"],
        "accuracy_worst_decile": summary["accuracy_worst"],
        **{name: found.pooled[name] for name in ("nll", "brier", "ece")},
        "ece_per_client": summary["ece"],
    }
    for i, b in enumerate(found.reliability):
        out |= {f"bin{i}_confidence": b.confidence, f"bin{i}_accuracy": b.accuracy, f"bin{i}_count": b.count}
    return out


def run_folder(folder: Path, setting: Mapping[str, Any], name: str, seed: int) -> Path:
    """Where a run is kept while it lasts."""
    where = "-".join(str(v) for v in setting.values())
    return folder / "runs" / f"{where}-{name}-{seed}"


def measured(
    experiment: str,
    setting: dict[str, Any],
    name: str,
    method: Algorithm,
    federation: Federation,
    seed: int,
    folder: Path,
    more: Callable[[Population], Mapping[str, float]] | None = None,
    active: int = ACTIVE,
) -> list[Record]:
    """The record of one run, which has ``more`` scores than the usual ones if told; its folder goes once the
    record is there. A run that broke down has a record without scores."""
    torch.set_num_threads(1)
    out = run_folder(folder, setting, name, seed)
    try:
        population = trained(method, federation, setting["passes"], seed, out, active)
    except TrainingError:
        shutil.rmtree(out, ignore_errors=True)
        return [record(experiment, setting, name, seed, {"accuracy": None}, {}, method.describe())]
    scores = told(evaluate(population, "test", widths=False))
    scores |= more(population) if more else {}
    last: Mapping[str, Any] = population.history[-1]
    scores |= {n: last[n] for n in ("loss", "prior_sd") if last.get(n) is not None}
    cost = population.totals | {"rounds": population.rounds}
    config = population.algorithm.describe()
    shutil.rmtree(out)
    return [record(experiment, setting, name, seed, scores, cost, config)]


# --- what is told of it ----------------------------------------------------------------------

NOT_RUN, BROKE = "not run", "broke down"
COLUMNS = (
    "method",
    "seeds",
    "accuracy",
    "over clients",
    "worst tenth",
    "NLL",
    "Brier",
    "ECE",
    "rounds",
    "passes",
    "MB up",
    "sec.",
)
LEGEND = (
    "accuracy: mean over clients of the share of their test images that is right, with its standard "
    "deviation over clients and the mean of the worst tenth of them; NLL, Brier, ECE (15 bins): over all "
    "test images; passes: backbone example-passes in training (a forward alone is a third); sec.: of one "
    "core, of whatever machine a run was made on."
)


def missing(found: Sequence[Record], cells: int, score: str = "accuracy") -> tuple[str, ...]:
    """The last so many cells of a row whose runs have no such score; none where there is one.

    >>> missing([], 3)
    ('not run', '-', '-')
    """
    return () if values(found, score) else (BROKE if found else NOT_RUN, *["-"] * (cells - 1))


def rows(results: Results, setting: dict[str, Any], names: Iterable[str]) -> list[tuple[str, ...]]:
    """A row for every method, empty where it has not been run."""
    out = []
    for name in names:
        found = results.of(setting, name)
        if none := missing(found, len(COLUMNS) - 2):
            out.append((name, str(len(found)), *none))
            continue
        out.append(
            (
                name,
                str(len(found)),
                f"{average(found, 'accuracy', scale=100):.1f} %",
                f"{average(found, 'accuracy_std', scale=100):.1f}",
                f"{average(found, 'accuracy_worst_decile', scale=100):.1f} %",
                *[shown(found, score) for score in ("nll", "brier", "ece")],
                f"{average(found, 'rounds', 'cost'):.0f}",
                f"{average(found, 'backbone_passes', 'cost'):,.0f}",
                f"{average(found, 'bytes_up', 'cost', 1e-6):,.0f}",
                f"{average(found, 'seconds', 'cost'):.0f}",
            )
        )
    return out


def shown(found: Sequence[Record], score: str) -> str:
    """The mean as it is to be read; a stroke where no record has it."""
    return f"{average(found, score):.3f}" if values(found, score) else "-"


def average(found: Sequence[Record], name: str, of: str = "metrics", scale: float = 1.0) -> float:
    """Over the records that have this number."""
    numbers = values(found, name, of)
    return scale * mean(numbers) if numbers else float("nan")
