"""Why the defaults for networks are what they are: one setting changed at a time, on small image clients.

CIFAR-10 and MNIST, five classes per client, 50 clients with 5 images and 50 with 25, ten active per round,
every method with the same number of backbone passes. Settings are compared on validation images, which no
client holds; test images are reported beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedpop.algorithms.base import Algorithm
from fedpop.algorithms.fedavg import FedAvg
from fedpop.algorithms.fedavg_ft import FedAvgFT
from fedpop.algorithms.fedrep import FedRep
from fedpop.algorithms.fedsoul import FedSOUL
from fedpop.client.final import Final
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.phi_step import PhiStep
from fedpop.data.image_task import ImageTask
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.runner import Job
from fedpop.kernels import HMC, Exponential
from fedpop.models.base import Model
from fedpop.population import Population, evaluate
from fedpop.priors.normal import Normal
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, record, values
from fedpop.server.beta_step import BetaStep
from fedpop.server.em import EM
from fedpop.server.optimisers import Adam, MeanMove, Optimiser
from fedpop.server.schedules import Cosine

NAME = "defaults"
PASSES = 60_000
ACTIVE = 10
IMAGES = ("cifar10", "mnist")
DEFAULT = "default"
"""The row of FedSOUL(model) without any setting, from which the others differ."""
SHORT = Final(draws=50, burn_in=100)
"""A shorter final pass than users get: scores over 100 clients do not need more."""

Build = Callable[[Model], Algorithm]


@dataclass(frozen=True)
class Variant:
    """A method, what it costs per example and round in backbone passes, and the question it answers."""

    build: Build
    question: str
    cost: float = 1.0


def fedsoul(**changes: Any) -> Build:
    """FedSOUL with these settings changed."""
    return lambda model: FedSOUL(model, final=SHORT, **changes)


def local(rate: float, epochs: int = 1, momentum: float = 0.0, optimiser: Optimiser | None = None) -> Variant:
    own = LocalSGD(epochs, rate, batch=10, momentum=momentum)
    step = PhiStep(optimiser or MeanMove(), local=own, schedule=Cosine())
    # The chain needs features once more: a forward pass is a third.
    return Variant(fedsoul(phi_step=step), "local epochs on phi", epochs + 1 / 3)


def fedavg(epochs: int, rate: float) -> Build:
    return lambda model: FedAvgFT(
        model,
        local=LocalSGD(epochs, rate, batch=10, momentum=0.9),
        fine_tune=LocalSGD(10, 0.01, batch=10),
    )


def fedrep(epochs: int, rate: float) -> Build:
    heads, body = LocalSGD(10, rate, batch=10, momentum=0.9), LocalSGD(epochs, rate, batch=10, momentum=0.9)
    return lambda model: FedRep(model, head=heads, body=body)


VARIANTS: dict[str, Variant] = {
    DEFAULT: Variant(fedsoul(), "FedSOUL(model), as it is"),
    "phi rate .1": Variant(fedsoul(phi_step=Adam(0.1, Cosine())), "the server's step on phi"),
    "left form": Variant(fedsoul(beta_step=BetaStep(form="left")), "form of I"),
    "right form": Variant(fedsoul(beta_step=BetaStep(form="right")), "form of I"),
    "EM .2": Variant(fedsoul(beta_step=EM(0.2, 0.1)), "how the prior is learned"),
    "Adam on the prior": Variant(fedsoul(beta_step=Adam(0.03, Cosine())), "how the prior is learned"),
    "mean fixed at 0": Variant(fedsoul(prior=Normal(learn_mean=False)), "how the prior is learned"),
    "scale fixed": Variant(fedsoul(prior=Normal(learn_scale=False)), "how the prior is learned"),
    "2 transitions": Variant(fedsoul(local_steps=2), "draws per round"),
    "20 transitions": Variant(fedsoul(local_steps=20), "draws per round"),
    "one leapfrog step": Variant(fedsoul(kernel=HMC(leapfrog=1), local_steps=50), "kernel"),
    "exponential h=.5": Variant(fedsoul(kernel=Exponential(0.5), local_steps=50), "kernel"),
    "local epoch .02": local(0.02, momentum=0.9),
    "local epoch .1": local(0.1),
    "local epoch, Adam": local(0.02, optimiser=Adam(0.03, Cosine())),
}
BASELINES: dict[str, Variant] = {
    "FedAvg 1 x .02": Variant(fedavg(1, 0.02), "baseline"),
    "FedAvg 5 x .01": Variant(fedavg(5, 0.01), "baseline", 5.0),
    "FedRep 1 x .02": Variant(fedrep(1, 0.02), "baseline", 4 / 3),
    "FedRep 5 x .01": Variant(fedrep(5, 0.01), "baseline", 5 + 1 / 3),
}
ALL: Mapping[str, Variant] = VARIANTS | BASELINES
GONE = {"antithetic pairs": "20 transitions"}
"""Settings that are no longer there, but in records: after which variant they are told."""


def setting_of(task: ImageTask) -> dict[str, Any]:
    return asdict(task) | {"active": ACTIVE, "passes": PASSES}


def rounds_for(task: ImageTask, cost: float) -> int:
    """Rounds that spend the budget of backbone passes."""
    per_round = ACTIVE * sum(task.sizes) / len(task.sizes)
    return max(1, math.floor(PASSES / (per_round * cost)))


def judged(population: Population, split: str) -> dict[str, float]:
    """Scores over all clients' held-out images; accuracy also by size of client."""
    found = evaluate(population, split)
    accuracy, images = found.scores["accuracy"], found.examples
    out = {"accuracy": float((accuracy * images).sum() / images.sum())}
    out |= {"log_score": found.pooled["nll"], "brier": found.pooled["brier"], "ece": found.pooled["ece"]}
    assert population.federation is not None
    own = dict(zip(population.names, population.federation.train.sizes.tolist(), strict=True))
    sizes = torch.tensor([own[name] for name in found.names])
    out |= {f"accuracy_{n}": float(accuracy[sizes == n].mean()) for n in sizes.unique().tolist()}
    return {f"{split}_{name}": value for name, value in out.items()}


def job(images: str, name: str, seed: int, folder: str | None) -> list[Record]:
    """The records of one variant on one set of images and one seed."""
    torch.set_num_threads(1)
    task, variant = ImageTask(images), ALL[name]
    clients = task.make(folder, seed)
    method = variant.build(task.model(seed))
    rounds = rounds_for(task, variant.cost)
    population = method.fit(clients, rounds=rounds, seed=seed, participation=ACTIVE, progress=False)
    out = [_record(population, task, name, seed)]
    if isinstance(population.algorithm, FedAvgFT):  # the same training serves both
        plain = FedAvg(population.model, local=population.algorithm.local)
        same = Population(
            plain,
            population.published,
            population.key,
            population.federation,
            population.store,
            population.history,
            population.totals,
            population.rounds,
        )
        out = [
            _record(same, task, name, seed),
            _record(population, task, f"{name} + tuning", seed),
        ]
    return out


def _record(population: Population, task: ImageTask, name: str, seed: int) -> Record:
    metrics = judged(population, "validation") | judged(population, "test")
    last = population.history[-1]
    metrics |= {k: last[k] for k in ("loss", "acceptance", "prior_mean_norm", "prior_sd") if k in last}
    cost = population.totals | {"rounds": population.rounds}
    return record(NAME, setting_of(task), name, seed, metrics, cost, population.algorithm.describe())


def methods_of(name: str) -> tuple[str, ...]:
    """The records that a variant's job makes."""
    return (name, f"{name} + tuning") if name.startswith("FedAvg") else (name,)


def jobs(asked: Asked) -> list[Job]:
    return [
        Job(
            job,
            (images, name, seed, asked.data and str(asked.data)),
            f"{images}, {name}, seed {seed}",
            setting_of(ImageTask(images)),
            seed,
            methods_of(name),
            needs=((images, "train"), (images, "test")),
        )
        for seed in range(asked.seeds)
        for name in ALL
        for images in IMAGES
    ]


# --- what is told of it ----------------------------------------------------------------------

COLUMNS = (
    "images",
    "variant",
    "seeds",
    "valid. acc.",
    "valid. NLL",
    "test acc.",
    "n = 5",
    "n = 25",
    "NLL",
    "ECE",
    "scale",
    "passes",
    "sec.",
)
LEGEND = (
    "Means over seeds. valid.: images that no client holds, on which settings are compared; NLL: mean "
    "negative log-probability; ECE: expected calibration error, 15 bins, all clients pooled; n = 5, n = 25: "
    "test accuracy of clients with so many images; scale: the prior's standard deviation at the end; passes: "
    "backbone example-passes (a forward alone is a third). FedAvg '+ tuning': ten epochs of each "
    "client's own from the final model."
)


def question(method: str) -> str:
    name = method.removesuffix(" + tuning")
    return ALL[name].question if name in ALL else method


def order(results: Results) -> list[str]:
    """Methods in the experiment's own order."""
    found = results.methods()
    after = {variant: gone for gone, variant in GONE.items()}
    known = [m for name in ALL for m in (name, f"{name} + tuning", after.get(name, "")) if m in found]
    return known + [m for m in found if m not in known]


def _mean(records: list[Record], name: str, digits: int = 3, of: str = "metrics", scale: float = 1.0) -> str:
    numbers = values(records, name, of)
    return f"{scale * mean(numbers):.{digits}f}" if numbers else "-"


def means(results: Results) -> Sheet:
    """One row per set of images and variant."""
    rows = []
    for setting in results.settings():
        for method in order(results):
            records = results.of(setting, method)
            if not records:
                continue
            rows.append(
                (
                    setting["images"],
                    method,
                    str(len(records)),
                    _mean(records, "validation_accuracy", 1, scale=100) + " %",
                    _mean(records, "validation_log_score"),
                    _mean(records, "test_accuracy", 1, scale=100) + " %",
                    _mean(records, "test_accuracy_5", 1, scale=100) + " %",
                    _mean(records, "test_accuracy_25", 1, scale=100) + " %",
                    _mean(records, "test_log_score"),
                    _mean(records, "test_ece"),
                    _mean(records, "prior_sd", 2),
                    _mean(records, "backbone_passes", 0, "cost"),
                    _mean(records, "seconds", 0, "cost"),
                )
            )
    return Sheet(COLUMNS, rows, frozenset(i for i, r in enumerate(rows) if r[1] == DEFAULT))


def differences(results: Results) -> Sheet:
    """What changing one setting does to the validation log-score, seed by seed, over both sets of images."""
    columns = ("question", "variant", "cifar10: NLL", "accuracy", "mnist: NLL", "accuracy")
    rows = []
    for method in order(results):
        if method == DEFAULT:
            continue
        cells = []
        for images in ("cifar10", "mnist"):
            for name, scale in (("validation_log_score", 1.0), ("validation_accuracy", 100.0)):
                cells.append(_paired(results, images, method, name, scale))
        rows.append((question(method), method, *cells))
    return Sheet(columns, rows, frozenset(i for i, r in enumerate(rows) if r[1] == DEFAULT))


def _paired(results: Results, images: str, method: str, name: str, scale: float) -> str:
    """The mean difference to the default over seeds that both have, with its range."""
    of = {
        m: {r["seed"]: r["metrics"][name] for r in results.records if _is(r, images, m)}
        for m in (method, DEFAULT)
    }
    gaps = [scale * (of[method][s] - of[DEFAULT][s]) for s in of[method] if s in of[DEFAULT]]
    if not gaps:
        return "-"
    digits = 1 if scale > 1 else 3
    return f"{mean(gaps):+.{digits}f} ({min(gaps):+.{digits}f} to {max(gaps):+.{digits}f})"


def _is(item: Record, images: str, method: str) -> bool:
    return bool(item["setting"]["images"] == images and item["method"] == method)


def _dots(results: Results, images: str, metric: str, scale: float, label: str) -> str:
    groups: dict[str, list[float]] = {}
    for method in order(results):
        groups[method] = [scale * r["metrics"][metric] for r in results.records if _is(r, images, method)]
    return plots.dots({m: v for m, v in groups.items() if v}, label, {DEFAULT})


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Over seeds": means(results)}


def page(results: Results) -> Page:
    present = [s["images"] for s in results.settings()]
    figures: list[Any] = []
    for images in present:
        figures += [
            Figure(
                _dots(results, images, "test_accuracy", 100, "test accuracy, %"),
                f"{images}: every dot is a seed, the line the mean.",
            ),
            Figure(
                _dots(results, images, "test_log_score", 1, "test NLL (lower is better)"),
                f"{images}: the log-score, which also judges how sure a prediction was.",
            ),
        ]
    sections = [
        Section(
            "One setting changed at a time",
            f"Differences to '{DEFAULT}' on validation images, paired by seed: mean, and smallest to "
            "largest. Below zero is better for NLL, above zero for accuracy (in points).",
            differences(results),
        ),
        Section("Every seed", figures=figures),
        Section("All numbers", LEGEND, means(results)),
    ]
    lead = (
        "100 clients with five classes each, half of them with 5 images and half with 25; ten are active per "
        "round; every method may spend the same number of backbone passes. What FedSOUL does by default for "
        f"networks is the row '{DEFAULT}'."
    )
    return Page("fedpop: defaults for networks", lead, sections)


EXPERIMENT = Experiment(
    name=NAME,
    seeds=3,
    data="cifar10 and mnist",
    jobs=jobs,
    sheets=sheets,
    page=page,
)
