"""Why the defaults for networks are what they are: one setting changed at a time, on small image clients.

CIFAR-10 and MNIST, five classes per client, 50 clients with 5 images and 50 with 25, ten active per round,
every method with the same number of backbone passes. Settings are compared on validation images, which no
client holds; test images are reported beside them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedpop.client.final import Final
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.phi_step import PhiStep
from fedpop.data.image_task import ImageTask
from fedpop.kernels import HMC, Exponential
from fedpop.methods.fedsoul import FedSOUL
from fedpop.population import Population, evaluate
from fedpop.priors.normal import Normal
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, record, values
from fedpop.server.beta_step import EM, BetaStep
from fedpop.server.optimisers import Adam, Cosine, MeanMove
from research.experiment import Asked, Experiment, Job
from research.images import Build, after_title, budgets_of

NAME = "defaults"
PASSES = 60_000
ACTIVE = 10
IMAGES = ("cifar10", "mnist")
DEFAULT = "default"
"""The row of FedSOUL(model) without any setting."""
BASE = "no weight decay"
"""The row from which all differ by one setting, the default by its weight decay: that was chosen last."""
PLAIN = Adam(0.03, Cosine(warm_up=10))
SHORT = Final(draws=50, burn_in=100)
"""A shorter final pass than users get: scores over 100 clients do not need more."""


@dataclass(frozen=True)
class Variant:
    """A method, what it costs per example and round in backbone passes, and the question it answers."""

    build: Build
    question: str
    cost: float = 1.0


def fedsoul(**changes: Any) -> Build:
    """FedSOUL without weight decay, and with these settings changed."""
    return lambda model: FedSOUL(model, final=SHORT, **{"phi_step": PLAIN} | changes)


def local(rate: float, momentum: float = 0.0) -> Variant:
    own = LocalSGD(1, rate, batch=10, momentum=momentum)
    step = PhiStep(MeanMove(), local=own, schedule=Cosine())
    # The chain needs features once more: a forward pass is a third.
    return Variant(fedsoul(phi_step=step), "local epochs on phi", 4 / 3)


VARIANTS: dict[str, Variant] = {
    DEFAULT: Variant(lambda model: FedSOUL(model, final=SHORT), "the server's step on phi"),
    BASE: Variant(fedsoul(), "what the others differ from"),
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
}


def setting_of(task: ImageTask, passes: int | None = None) -> dict[str, Any]:
    return asdict(task) | {"active": ACTIVE, "passes": PASSES if passes is None else passes}


def rounds_for(task: ImageTask, cost: float, passes: float) -> int:
    """Rounds that spend the budget of backbone passes."""
    per_round = ACTIVE * sum(task.sizes) / len(task.sizes)
    return max(1, math.floor(passes / (per_round * cost)))


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


def job(images: str, name: str, seed: int, asked: Asked) -> list[Record]:
    """The records of one variant on one set of images and one seed."""
    task, variant = ImageTask(images), VARIANTS[name]
    clients = task.make(asked.data, seed)
    method = variant.build(task.model(seed))
    setting = setting_of(task, asked.passes)
    rounds = rounds_for(task, variant.cost, setting["passes"])
    population = method.fit(clients, rounds=rounds, seed=seed, participation=ACTIVE, progress=False)
    metrics = judged(population, "validation") | judged(population, "test")
    last = population.history[-1]
    metrics |= {k: last[k] for k in ("loss", "acceptance", "prior_mean_norm", "prior_sd") if k in last}
    cost = population.totals | {"rounds": population.rounds}
    return [record(NAME, setting, name, seed, metrics, cost, population.algorithm.describe())]


def jobs(asked: Asked) -> list[Job]:
    return [
        Job(
            job,
            (images, name, seed, asked),
            f"{images}, {name}, seed {seed}",
            setting_of(ImageTask(images), asked.passes),
            seed,
            (name,),
            needs=((images, "train"), (images, "test")),
        )
        for seed in range(asked.seeds)
        for name in VARIANTS
        for images in IMAGES
    ]


# --- the report ----------------------------------------------------------------------------------

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
    "backbone example-passes (a forward alone is a third)."
)


def order(results: Results) -> list[str]:
    """Methods in the experiment's own order."""
    found = results.methods()
    return [m for m in VARIANTS if m in found] + [m for m in found if m not in VARIANTS]


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
        if method == BASE:
            continue
        cells = []
        for images in ("cifar10", "mnist"):
            for name, scale in (("validation_log_score", 1.0), ("validation_accuracy", 100.0)):
                cells.append(_paired(results, images, method, name, scale))
        asked = VARIANTS[method].question if method in VARIANTS else method
        rows.append((asked, method, *cells))
    return Sheet(columns, rows, frozenset(i for i, r in enumerate(rows) if r[1] == DEFAULT))


def _paired(results: Results, images: str, method: str, name: str, scale: float) -> str:
    """The mean difference to the base over seeds that both have, with its range."""
    of = {
        m: {r["seed"]: r["metrics"][name] for r in results.records if _is(r, images, m)}
        for m in (method, BASE)
    }
    gaps = [scale * (of[method][s] - of[BASE][s]) for s in of[method] if s in of[BASE]]
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


def budgets(results: Results) -> list[int]:
    return budgets_of(results, [PASSES])


def by_budget(results: Results) -> dict[str, Results]:
    """The records of each, by what a title says of it."""
    return {
        after_title(passes, PASSES): Results(
            results.folder, [r for r in results.records if r["setting"]["passes"] == passes]
        )
        for passes in budgets(results)
    }


def sheets(results: Results) -> dict[str, Sheet]:
    return {f"Over seeds{more}": means(own) for more, own in by_budget(results).items()}


def _figures(results: Results) -> list[Figure]:
    out = []
    for images in (s["images"] for s in results.settings()):
        out += [
            Figure(
                _dots(results, images, "test_accuracy", 100, "test accuracy, %"),
                f"{images}: every dot is a seed, the line the mean.",
            ),
            Figure(
                _dots(results, images, "test_log_score", 1, "test NLL (lower is better)"),
                f"{images}: the log-score, which also judges how sure a prediction was.",
            ),
        ]
    return out


def page(results: Results) -> Page:
    sections = []
    for more, own in by_budget(results).items():
        sections += [
            Section(
                f"One setting changed at a time{more}",
                f"Differences to '{BASE}' on validation images, paired by seed: mean, and smallest to "
                "largest. Below zero is better for NLL, above zero for accuracy (in points).",
                differences(own),
            ),
            Section(f"Every seed{more}", figures=_figures(own)),
            Section(f"All numbers{more}", LEGEND, means(own)),
        ]
    lead = (
        "100 clients with five classes each, half of them with 5 images and half with 25; ten are active per "
        "round; every method may spend the same number of backbone passes. What FedSOUL does by default for "
        f"networks is the row '{DEFAULT}'; the others differ in one setting from '{BASE}'."
    )
    return Page("fedpop: defaults for networks", lead, sections)


EXPERIMENT = Experiment(
    name=NAME,
    seeds=3,
    data="cifar10 and mnist",
    jobs=jobs,
    budgets=budgets,
    sheets=sheets,
    page=page,
)
