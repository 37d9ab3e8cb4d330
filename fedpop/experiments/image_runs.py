"""What the experiments on images share: methods and their steps, runs on a budget of passes, and scores.

Every method sees the same clients, networks, augmentation and draws of active clients, and may spend the
same number of backbone example-passes. Nothing is chosen on test images: a run ends where its budget does. A
run is kept in a folder while it lasts, so that an experiment that was stopped goes on in its midst.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedpop.algorithms.apfl import APFL
from fedpop.algorithms.base import Algorithm
from fedpop.algorithms.ditto import Ditto
from fedpop.algorithms.fedavg_ft import FedAvgFT
from fedpop.algorithms.fedrep import FedRep
from fedpop.algorithms.fedsoul import FedSOUL
from fedpop.algorithms.local_only import LocalOnly
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.phi_step import PhiStep
from fedpop.data.image_task import PictureTask
from fedpop.data.images import prepare
from fedpop.evaluation.scores import Evaluation
from fedpop.experiments.budget import rounds_within
from fedpop.experiments.experiment import Asked
from fedpop.experiments.runner import Job
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Uniform
from fedpop.models.base import Model
from fedpop.population import Population, evaluate
from fedpop.report.html import Sheet
from fedpop.report.results import Record, Results, mean, record, values
from fedpop.runtime.simulate import fit

ACTIVE = 10
"""Clients of a round, as in the paper."""
TUNED = 10
"""Epochs of a client's own after training, for methods that tune: counted in nobody's budget."""

Build = Callable[[Model], Algorithm]


def methods(rate: float, batch: int) -> dict[str, Build]:
    """FedSOUL as it is, and with local epochs; the others with one local epoch a round."""
    own = LocalSGD(1, rate, batch, momentum=0.9, decay=1e-3)
    tune = LocalSGD(TUNED, rate / 2, batch)
    heads = LocalSGD(TUNED, rate, batch, momentum=0.9)
    return {
        "FedSOUL": FedSOUL,
        "FedSOUL-local": lambda model: FedSOUL(model, phi_step=PhiStep(local=own)),
        "FedRep": lambda model: FedRep(model, head=heads, body=own),
        "FedAvg-FT": lambda model: FedAvgFT(model, local=own, fine_tune=tune),
        "Ditto": lambda model: Ditto(model, local=own, personal=own),
        "APFL": lambda model: APFL(model, local=own),
        "Local": lambda model: LocalOnly(model, local=own),
    }


def jobs_of(
    asked: Asked,
    call: Callable[..., list[Record]],
    tasks: Sequence[PictureTask],
    labels: Sequence[str],
    settings: Sequence[dict[str, Any]],
    cells: Sequence[tuple[int, str]],
) -> list[Job]:
    """A job for each seed and each (task, method), in this order; ``call`` is given the task's number, the
    method's name, the seed, and the folders of data and of records."""
    for images in sorted({task.images for task in tasks}):
        prepare(images, asked.data)  # missing files are told before hours of work
    data = None if asked.data is None else str(asked.data)
    return [
        Job(
            call,
            (t, name, seed, data, str(asked.folder)),
            f"{labels[t]}, {name}, seed {seed}",
            settings[t],
            seed,
            (name,),
        )
        for seed in range(asked.seeds)
        for t, name in cells
    ]


def trained(method: Algorithm, federation: Federation, passes: float, seed: int, out: Path) -> Population:
    """A run of as many rounds as the budget pays for."""
    rule = Uniform(min(ACTIVE, len(federation)))
    rounds = rounds_within(method, federation, passes, seed, rule)
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


def measured(
    experiment: str,
    setting: dict[str, Any],
    name: str,
    method: Algorithm,
    federation: Federation,
    seed: int,
    folder: Path,
) -> list[Record]:
    """The record of one run; its folder goes once the record is there."""
    torch.set_num_threads(1)
    where = "-".join(str(v) for v in setting.values())
    out = folder / "runs" / f"{where}-{name}-{seed}"
    population = trained(method, federation, setting["passes"], seed, out)
    scores = told(evaluate(population, "test", widths=False))
    last: Mapping[str, Any] = population.history[-1]
    scores |= {n: last[n] for n in ("loss", "prior_sd") if last.get(n) is not None}
    cost = population.totals | {"rounds": population.rounds}
    config = population.algorithm.describe()
    shutil.rmtree(out)
    return [record(experiment, setting, name, seed, scores, cost, config)]


# --- what is told of it ----------------------------------------------------------------------

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
    "core."
)


def rows(results: Results, setting: dict[str, Any], names: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for every method, empty where it has not been run."""
    out = []
    for name in names:
        found = results.of(setting, name)
        if not found:
            out.append((name, "0", *["not run"], *["-"] * (len(COLUMNS) - 3)))
            continue
        out.append(
            (
                name,
                str(len(found)),
                f"{_of(found, 'accuracy', scale=100):.1f} %",
                f"{_of(found, 'accuracy_std', scale=100):.1f}",
                f"{_of(found, 'accuracy_worst_decile', scale=100):.1f} %",
                *[f"{_of(found, score):.3f}" for score in ("nll", "brier", "ece")],
                f"{_of(found, 'rounds', 'cost'):.0f}",
                f"{_of(found, 'backbone_passes', 'cost'):,.0f}",
                f"{_of(found, 'bytes_up', 'cost', 1e-6):,.0f}",
                f"{_of(found, 'seconds', 'cost'):.0f}",
            )
        )
    return out


def table(results: Results, setting: dict[str, Any], names: Mapping[str, Any]) -> Sheet:
    found = rows(results, setting, names)
    return Sheet(COLUMNS, found, frozenset(i for i, r in enumerate(found) if r[0] == "FedSOUL"))


def _of(found: list[Record], name: str, of: str = "metrics", scale: float = 1.0) -> float:
    numbers = values(found, name, of)
    return scale * mean(numbers) if numbers else float("nan")
