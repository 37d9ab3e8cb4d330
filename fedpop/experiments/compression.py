"""What compression costs: accuracy against bytes sent up, for each compressor of FedSOUL's gradients.

Small CIFAR-10 clients with five classes each, FedSOUL as it is but for the compressor. Fewer rounds without
any compression stand beside it: what the same bytes buy by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedpop.client.final import Final
from fedpop.data.image_task import ImageTask
from fedpop.experiments import small_data
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_runs import average, jobs_of, measured, missing
from fedpop.experiments.runner import Job
from fedpop.message.compressors import QSGD, Compressor, Identity, Natural, RandK
from fedpop.methods.fedsoul import FedSOUL
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.looks import BLACK, BLUE, ORANGE, Look
from fedpop.report.results import Record, Results, interval95, values

NAME = "compression"
PASSES = 30_000
TASK = ImageTask("cifar10", 5, validation=0)
FINAL = Final()
PLAIN = "none"


@dataclass(frozen=True)
class Sent:
    """A compressor, and which part of the rounds is run with it."""

    compressor: Compressor
    share: float = 1.0


VARIANTS: dict[str, Sent] = {
    PLAIN: Sent(Identity()),
    "none, a quarter of the rounds": Sent(Identity(), 1 / 4),
    "none, a sixteenth of them": Sent(Identity(), 1 / 16),
    "natural": Sent(Natural()),
    "QSGD, 127 levels": Sent(QSGD(127)),
    "QSGD, 7 levels": Sent(QSGD(7)),
    "QSGD, 1 level": Sent(QSGD(1)),
    "rand-k, 25 %": Sent(RandK(share=0.25)),
    "rand-k, 10 %": Sent(RandK(share=0.1)),
    "rand-k, 1 %": Sent(RandK(share=0.01)),
}


def setting_of(name: str) -> dict[str, Any]:
    return small_data.setting_of(TASK) | {"passes": round(PASSES * VARIANTS[name].share)}


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The record of one compressor and seed."""
    torch.set_num_threads(1)
    compressor = VARIANTS[name].compressor
    method = FedSOUL(TASK.model(seed), compressor=compressor, final=FINAL)
    omega = compressor.omega(method.compressed_size)
    return measured(
        NAME,
        setting_of(name),
        name,
        method,
        TASK.make(data, seed),
        seed,
        Path(folder),
        lambda population: {"omega": omega},
    )


def jobs(asked: Asked) -> list[Job]:
    names = list(VARIANTS)
    told, cells = [setting_of(name) for name in names], list(enumerate(names))
    return jobs_of(asked, job, [TASK] * len(names), [TASK.images] * len(names), told, cells)


# --- what is told of it ----------------------------------------------------------------------

COLUMNS = (
    "compressor", "seeds", "omega", "rounds", "MB up", "of none", "accuracy", "less none", "95 % interval",
    "NLL", "ECE", "sec.",
)  # fmt: skip
LOOKS: dict[str, Look] = {
    "none": (BLACK, "-"),
    "natural": (ORANGE, "-"),
    "QSGD": (BLUE, "-"),
    "rand-k": ("#009E73", "-"),
}
LEGEND = (
    "omega: the compressor's relative variance, E|C(v) - v|^2 <= omega |v|^2; MB up: all that clients sent; "
    "accuracy: mean over clients; less none: in points, paired by seed. "
)


def found_of(results: Results, name: str) -> list[Record]:
    return results.of(setting_of(name), name)


def difference(results: Results, name: str) -> tuple[str, str]:
    """Accuracy less that without compression, with its interval over seeds."""
    own, plain = (
        {r["seed"]: r["metrics"]["accuracy"] for r in found_of(results, n) if values([r], "accuracy")}
        for n in (name, PLAIN)
    )
    points = [100 * (own[seed] - plain[seed]) for seed in sorted(own.keys() & plain.keys())]
    if name == PLAIN or not points:
        return "-", "-"
    centre, low, high = interval95(points)
    return f"{centre:+.1f}", f"{low:+.1f} to {high:+.1f}" if len(points) > 1 else "-"


def table(results: Results) -> Sheet:
    """A row for every compressor, empty where it has not been run."""
    plain = average(found_of(results, PLAIN), "bytes_up", "cost")
    rows: list[tuple[str, ...]] = []
    for name in VARIANTS:
        found = found_of(results, name)
        if none := missing(found, len(COLUMNS) - 2):
            rows.append((name, str(len(found)), *none))
            continue
        sent = average(found, "bytes_up", "cost")
        rows.append(
            (
                name,
                str(len(found)),
                f"{average(found, 'omega'):.3g}",
                f"{average(found, 'rounds', 'cost'):.0f}",
                f"{sent / 1e6:,.1f}",
                f"{100 * sent / plain:.1f} %" if plain > 0 else "-",
                f"{average(found, 'accuracy', scale=100):.1f} %",
                *difference(results, name),
                f"{average(found, 'nll'):.3f}",
                f"{average(found, 'ece'):.3f}",
                f"{average(found, 'seconds', 'cost'):.0f}",
            )
        )
    return Sheet(COLUMNS, rows, frozenset({0}))


def by_bytes(results: Results, score: str, scale: float) -> dict[str, dict[float, list[float]]]:
    """For each kind of compressor a score against megabytes, to two digits, fewest first."""
    out: dict[str, dict[float, list[float]]] = {}
    for name in VARIANTS:
        found = found_of(results, name)
        if numbers := [scale * v for v in values(found, score)]:
            sent = float(f"{average(found, 'bytes_up', 'cost', 1e-6):.2g}")
            out.setdefault(name.split(",")[0], {}).setdefault(sent, []).extend(numbers)
    return {kind: dict(sorted(group.items())) for kind, group in out.items()}


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Compressors": table(results)}


def page(results: Results) -> Page:
    figures = []
    for score, scale, label in (("accuracy", 100.0, "test accuracy, %"), ("ece", 1.0, "ECE")):
        if groups := by_bytes(results, score, scale):
            drawn = plots.points(groups, {}, "MB sent up", label, log_y=False, joined=True, looks=LOOKS)
            figures.append(Figure(drawn, "Small dots are seeds, large ones their median."))
    setting = setting_of(PLAIN)
    lead = (
        f"{setting['dataset']}, {setting['b']} clients with {setting['classes_per_client']} classes each, "
        f"half of them with {setting['n_small']} images and half with {setting['n_large']}; ten active per "
        f"round, {PASSES:,} backbone passes. Clients' gradients of phi are compressed, those of the prior "
        "are sent as they are. Everything else is FedSOUL's default."
    )
    section = Section("Compressors", LEGEND, table(results), figures)
    return Page("fedpop: compression", lead, [section])


EXPERIMENT = Experiment(name=NAME, seeds=3, data="cifar10", jobs=jobs, sheets=sheets, page=page)
