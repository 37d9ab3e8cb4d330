"""Does a model know what it has never seen? Digits against clothes, CIFAR-10 against house numbers.

Every client predicts its own test images and as many of another set, no image for two clients. A model that
knows its limits is less sure of the latter: its predictive entropy tells them apart, and so may the epistemic
part of it, which is what draws of z disagree about. The distribution of entropies of each client is kept
beside the records, for the paper's figure: one curve for each client.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.data.catalogue import DATASETS
from fedpop.data.image_task import FullImageTask
from fedpop.data.images import open_images
from fedpop.errors import DataError
from fedpop.evaluation.scores import worst_tenth
from fedpop.federation.clients import Federation
from fedpop.files import read_json, writable_folder, write_json
from fedpop.models.predictive import Predictive
from fedpop.population import Population
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results
from fedpop.report.style import BLUE, ORANGE
from research.experiment import Asked, Experiment, Job
from research.figures import densities
from research.images import Cell, Run, after_title, average, budgets_of, jobs_of, methods, missing, shown

NAME = "ood"
SIDES = ("inside", "outside")
PARTS = 24
"""Of the range of entropies, in curves."""
METHODS = {n: build for n, build in methods("full_data").items() if n in ("FedSOUL", "FedRep", "FedAvg-FT")}


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


def setting_of(pair: Pair, passes: int | None = None) -> dict[str, Any]:
    task = pair.task
    return {
        "dataset": task.images,
        "out": pair.out,
        "classes_per_client": task.classes,
        "b": task.b,
        "passes": pair.passes if passes is None else passes,
    }


def name_of(setting: dict[str, Any]) -> str:
    return f"{setting['dataset']} in, {setting['out']} out, S={setting['classes_per_client']}"


def job(run: Run) -> list[Record]:
    """The record of one method on one pair of sets and one seed, and its curves beside it."""
    task, name, setting = run.cell.task, run.cell.method, run.cell.setting
    federation = task.make(run.data, run.seed)
    elsewhere = dealt(open_images(setting["out"], run.data).test.x, federation)

    def more(population: Population) -> dict[str, float]:
        found = evaluate_outside(population, elsewhere)
        file = curves_file(run.folder, setting, name, run.seed)
        writable_folder(file.parent)
        write_json(file, curves(found, most(setting)))
        return scores(found)

    return run.measured(METHODS[name](task.model(run.seed)), federation, more)


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

    def plain(entropies: Tensor) -> str:
        return " ".join(map(str, histogram(entropies, top, PARTS).tolist()))

    return {side: [plain(getattr(client, side)) for client in found] for side in SIDES}


def curves_file(folder: Path, setting: dict[str, Any], name: str, seed: int) -> Path:
    where = "-".join(str(setting[key]) for key in ("dataset", "out", "classes_per_client", "b", "passes"))
    return folder / "curves" / f"{where}-{name}-{seed}.json"


def jobs(asked: Asked) -> list[Job]:
    cells = [
        Cell(pair.task, setting, name, name_of(setting), also=((pair.out, "test"),))
        for pair in PAIRS
        for setting in [setting_of(pair, asked.passes)]
        for name in METHODS
    ]
    return jobs_of(NAME, asked, job, cells, METHODS)


# --- entropies -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outside:
    """One client's predictive entropies in nats, of its own test examples and of those from elsewhere.

    The epistemic part is what disagreement between draws of z adds; None for point estimates.
    """

    name: str
    inside: Tensor
    outside: Tensor
    epistemic_inside: Tensor | None
    epistemic_outside: Tensor | None

    @property
    def auroc(self) -> float:
        """The probability that an example from elsewhere has the larger entropy."""
        return auroc(self.inside, self.outside)

    @property
    def auroc_epistemic(self) -> float | None:
        if self.epistemic_inside is None or self.epistemic_outside is None:
            return None
        return auroc(self.epistemic_inside, self.epistemic_outside)


def evaluate_outside(population: Population, examples: Sequence[Any], split: str = "test") -> list[Outside]:
    """For every client that has examples in the split, and for whom the method has a model.

    Args:
        population: What ``fit`` returned.
        examples: For each client of the federation, in its order, inputs x from elsewhere.
        split: Which of the clients' own sets is distinguished from them, "test" by default.

    >>> import torch, fedpop as fp
    >>> x, y = torch.tensor([[-4.0], [4.0]]), torch.tensor([0, 1])
    >>> model = fp.Composition(None, torch.nn.Linear(1, 2), "categorical")
    >>> method = fp.LocalOnly(model, local=fp.LocalSGD(epochs=50, rate=1.0))
    >>> population = method.fit([fp.Client(x, y, test=(x, y))], rounds=1)
    >>> (client,) = evaluate_outside(population, [torch.tensor([[0.1], [0.2]])])  # between the classes
    >>> client.auroc, client.auroc_epistemic
    (1.0, None)
    """
    if len(examples) != len(population):
        raise DataError(f"{len(population)} clients, but examples from elsewhere for {len(examples)}")
    out = []
    served = ((i, own) for i, own, _ in population.held_out(split) if own is not None)
    for i, found in itertools.groupby(served, key=lambda pair: pair[0]):  # in pieces, where there are many
        inside, drawn = _entropies(own for _, own in found)
        outside, others = _entropies([population.predict(i, examples[i])])
        out.append(Outside(population.names[i], inside, outside, drawn, others))
    return out


def _entropies(pieces: Iterable[Predictive]) -> tuple[Tensor, Tensor | None]:
    """Total and epistemic; the latter None of a point estimate."""
    parts = [(p.entropy, p.plug_in) for p in pieces]
    epistemic = None if parts[0][1] else torch.cat([e.epistemic for e, _ in parts]).cpu()
    return torch.cat([e.total for e, _ in parts]).cpu(), epistemic


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that an example from outside scores higher than one from inside, ties counted half.

    That is Mann and Whitney's statistic: from the ranks of all scores together, without a threshold.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
    0.875
    """
    n, m = len(inside), len(outside)
    scores = torch.cat((inside, outside)).double()
    if not n or not m or not bool(torch.isfinite(scores).all()):
        return math.nan
    _, group, count = scores.unique(return_inverse=True, return_counts=True)
    # Equal scores share the mean of the ranks that they take up.
    rank = (count.cumsum(0) - (count - 1) / 2)[group]
    return (float(rank[n:].sum()) - m * (m + 1) / 2) / (n * m)


def histogram(values: Tensor, most: float, bins: int) -> Tensor:
    """How many values lie in each of so many equal parts of [0, most]; the last one has what is above, too.

    >>> histogram(torch.tensor([0.0, 0.4, 0.6, 1.0]), 1.0, 2)
    tensor([2, 2])
    """
    place = (values / most * bins).floor().long().clamp(0, bins - 1)
    return torch.bincount(place, minlength=bins)


# --- the report ----------------------------------------------------------------------------------

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


def budgets(results: Results) -> list[int]:
    return budgets_of(results, [pair.passes for pair in PAIRS])


def settings(results: Results) -> dict[str, dict[str, Any]]:
    """By their names: each pair with its own budget and with those that are no pair's own."""
    own = {pair.passes for pair in PAIRS}
    return {
        name_of(setting_of(pair)) + after_title(passes, pair.passes): setting_of(pair, passes)
        for pair in PAIRS
        for passes in budgets(results)
        if passes == pair.passes or passes not in own
    }


def sheets(results: Results) -> dict[str, Sheet]:
    return {name: table(results, setting) for name, setting in settings(results).items()}


def page(results: Results) -> Page:
    sections = [
        Section(name, LEGEND, table(results, setting), figures(results, setting))
        for name, setting in settings(results).items()
    ]
    lead = (
        "All training images of one set over 100 clients with two or five classes each (S), ten of them "
        "active per round; afterwards every client is shown its own test images and as many of another set. "
        "Every method may spend the same number of backbone passes; steps are those of the full-data "
        "experiment."
    )
    return Page("fedpop: images of another kind", lead, sections)


EXPERIMENT = Experiment(
    name=NAME,
    seeds=1,
    data="mnist, fashionmnist, cifar10, svhn",
    jobs=jobs,
    budgets=budgets,
    sheets=sheets,
    page=page,
)
