"""Does a model know what it has never seen? Digits against clothes, CIFAR-10 against house numbers.

Every client predicts its own test images and as many of another set, no image for two clients. A model that
knows its limits is less sure of the latter: its predictive entropy tells them apart, and so may the epistemic
part of it, which is what draws of z disagree about. The distribution of entropies of each client is kept
beside the records, for the paper's figure: one curve for each client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.data.catalogue import DATASETS
from fedpop.data.image_task import FullImageTask
from fedpop.data.images import open_images
from fedpop.evaluation.outliers import histogram
from fedpop.evaluation.scores import worst_tenth
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_methods import methods
from fedpop.experiments.image_runs import average, jobs_of, measured, missing, shown
from fedpop.experiments.runner import Job
from fedpop.federation.clients import Federation
from fedpop.files import read_json, writable_folder, write_json
from fedpop.population import Population
from fedpop.population.outside import Outside, evaluate_outside
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.looks import BLUE, ORANGE
from fedpop.report.results import Record, Results
from fedpop.report.side_by_side import densities

NAME = "ood"
SIDES = ("inside", "outside")
PARTS = 24
"""Of the range of entropies, in curves."""
METHODS = {n: build for n, build in methods("full-data").items() if n in ("FedSOUL", "FedRep", "FedAvg-FT")}


@dataclass(frozen=True)
class Pair:
    """Clients with images of one set, which are shown those of another."""

    task: FullImageTask
    out: str
    passes: int


PAIRS = tuple(
    Pair(FullImageTask(inside, classes), out, passes)
    for inside, out, passes in (("mnist", "fashionmnist", 300_000), ("cifar10", "svhn", 500_000))
    for classes in (2, 5)
)


def setting_of(pair: Pair) -> dict[str, Any]:
    task = pair.task
    return {
        "dataset": task.images,
        "out": pair.out,
        "classes_per_client": task.classes,
        "b": task.b,
        "passes": pair.passes,
    }


def name_of(setting: dict[str, Any]) -> str:
    return f"{setting['dataset']} in, {setting['out']} out, S={setting['classes_per_client']}"


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The record of one method on one pair of sets and one seed, and its curves beside it."""
    torch.set_num_threads(1)
    pair = PAIRS[index]
    setting, federation = setting_of(pair), pair.task.make(data, seed)
    elsewhere = dealt(open_images(pair.out, data).test.x, federation)

    def more(population: Population) -> dict[str, float]:
        found = evaluate_outside(population, elsewhere)
        file = curves_file(Path(folder), setting, name, seed)
        writable_folder(file.parent)
        write_json(file, curves(found, most(setting)))
        return scores(found)

    method = METHODS[name](pair.task.model(seed))
    return measured(NAME, setting, name, method, federation, seed, Path(folder), more)


def dealt(images: Tensor, federation: Federation) -> list[Tensor]:
    """For each client as many of these images as it has test images, where there are enough for all; nobody
    has another's."""
    b = len(federation)
    return [images[i::b][: int(n)] for i, n in enumerate(federation.splits["test"].sizes)]


def scores(found: Sequence[Outside]) -> dict[str, float]:
    """Means over clients of the area under the ROC curve, and of the entropies themselves."""
    each = torch.tensor([client.auroc for client in found], dtype=torch.float64)
    out = {
        "auroc": float(each.mean()),
        "auroc_std": float(each.std(correction=0)),
        "auroc_worst_decile": worst_tenth(each, high_is_good=True),
        "entropy_in": _mean([client.inside for client in found]),
        "entropy_out": _mean([client.outside for client in found]),
    }
    parts = [client.auroc_epistemic for client in found if client.auroc_epistemic is not None]
    return out | ({"auroc_epistemic": sum(parts) / len(parts)} if parts else {})


def _mean(entropies: Sequence[Tensor]) -> float:
    return float(torch.stack([e.double().mean() for e in entropies]).mean())


def most(setting: dict[str, Any]) -> float:
    """The largest entropy that there can be."""
    return math.log(len(DATASETS[setting["dataset"]].classes))


def curves(found: Sequence[Outside], top: float) -> dict[str, list[str]]:
    """Histograms of every client's entropies."""

    def told(entropies: Tensor) -> str:
        return " ".join(map(str, histogram(entropies, top, PARTS).tolist()))

    return {side: [told(getattr(client, side)) for client in found] for side in SIDES}


def curves_file(folder: Path, setting: dict[str, Any], name: str, seed: int) -> Path:
    where = "-".join(str(setting[key]) for key in ("dataset", "out", "classes_per_client", "b", "passes"))
    return folder / "curves" / f"{where}-{name}-{seed}.json"


def jobs(asked: Asked) -> list[Job]:
    told, tasks = [setting_of(pair) for pair in PAIRS], [pair.task for pair in PAIRS]
    cells = [(t, name) for t in range(len(PAIRS)) for name in METHODS]
    also = [(pair.out, "test") for pair in PAIRS]
    return jobs_of(asked, job, tasks, [name_of(s) for s in told], told, cells, also, METHODS)


# --- what is told of it ----------------------------------------------------------------------

COLUMNS = (
    "method", "seeds", "AUROC", "over clients", "worst tenth", "AUROC, epistemic", "entropy in",
    "entropy out", "accuracy", "ECE", "passes", "sec.",
)  # fmt: skip
LEGEND = (
    "AUROC: the probability that an image of the other set has the larger predictive entropy (in nats) than "
    "one of the client's own test images, mean over clients, with its standard deviation over clients and "
    "the mean of the worst tenth of them; epistemic: the same by what draws of z disagree about, which point "
    "estimates do not have. "
)


def table(results: Results, setting: dict[str, Any]) -> Sheet:
    """A row for every method, empty where it has not been run."""
    rows: list[tuple[str, ...]] = []
    for name in METHODS:
        found = results.of(setting, name)
        if none := missing(found, len(COLUMNS) - 2, "auroc"):
            rows.append((name, str(len(found)), *none))
            continue
        rows.append(
            (
                name,
                str(len(found)),
                *[shown(found, m) for m in ("auroc", "auroc_std", "auroc_worst_decile")],
                shown(found, "auroc_epistemic"),
                *[shown(found, m) for m in ("entropy_in", "entropy_out")],
                f"{average(found, 'accuracy', scale=100):.1f} %",
                shown(found, "ece"),
                f"{average(found, 'backbone_passes', 'cost'):,.0f}",
                f"{average(found, 'seconds', 'cost'):.0f}",
            )
        )
    return Sheet(COLUMNS, rows, frozenset(i for i, r in enumerate(rows) if r[0] == "FedSOUL"))


def figures(results: Results, setting: dict[str, Any]) -> list[Figure]:
    """The entropies of seed 0's clients, a figure for each method that has them."""
    out = []
    looks = {"own images": (BLUE, "-"), setting["out"]: (ORANGE, "-")}
    for name in METHODS:
        file = curves_file(results.folder, setting, name, 0)
        if not file.exists():
            continue
        found = read_json(file)
        rows = ([[int(n) for n in row.split()] for row in found[side]] for side in SIDES)
        groups = dict(zip(looks, rows, strict=True))
        drawn = densities(groups, looks, most(setting), "predictive entropy, nats")
        out.append(Figure(drawn, f"{name}: one thin curve for each client, their mean a thick one (seed 0)."))
    return out


def sheets(results: Results) -> dict[str, Sheet]:
    return {name_of(s): table(results, s) for s in map(setting_of, PAIRS)}


def page(results: Results) -> Page:
    sections = [
        Section(name_of(s), LEGEND, table(results, s), figures(results, s)) for s in map(setting_of, PAIRS)
    ]
    lead = (
        "All training images of one set over 100 clients with two or five classes each (S), ten of them "
        "active per round; afterwards every client is shown its own test images and as many of another set. "
        "Every method may spend the same number of backbone passes; steps are those of the full-data "
        "experiment."
    )
    return Page("fedpop: images of another kind", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=1, data="mnist, fashionmnist, cifar10, svhn", jobs=jobs, sheets=sheets, page=page
)
