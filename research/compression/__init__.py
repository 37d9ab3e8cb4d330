"""What compression costs: accuracy against bytes sent up, for each compressor of FedSOUL's gradients.

Small CIFAR-10 clients with five classes each, FedSOUL as it is but for the compressor. Fewer rounds without
any compression stand beside it: what the same bytes buy by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedpop.client.final import Final
from fedpop.data.image_task import ImageTask
from fedpop.message.compressors import QSGD, Compressor, Identity, Natural, RandK
from fedpop.methods.fedsoul import FedSOUL
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, values
from fedpop.report.style import BLACK, BLUE, ORANGE, Look
from research import small_data
from research.experiment import Asked, Experiment, Job
from research.figures import points
from research.images import Cell, Run, after_title, average, budgets_of, in_words, jobs_of, missing
from research.seeds import interval95

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


def setting_of(name: str, passes: int | None = None) -> dict[str, Any]:
    whole = PASSES if passes is None else passes
    return small_data.setting_of(TASK, round(whole * VARIANTS[name].share))


def job(run: Run) -> list[Record]:
    """The record of one compressor and seed."""
    task, compressor = run.cell.task, VARIANTS[run.cell.method].compressor
    method = FedSOUL(task.model(run.seed), compressor=compressor, final=FINAL)
    omega = compressor.omega(method.footprint.compressed)
    return run.measured(method, task.make(run.data, run.seed), lambda population: {"omega": omega})


def jobs(asked: Asked) -> list[Job]:
    cells = [Cell(TASK, setting_of(name, asked.passes), name, TASK.images) for name in VARIANTS]
    return jobs_of(NAME, asked, job, cells)


# --- the report ----------------------------------------------------------------------------------

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


def budgets(results: Results) -> list[int]:
    """Of those who have all rounds."""
    parts = {name for name, sent in VARIANTS.items() if sent.share < 1}
    whole = [r for r in results.records if r["method"] not in parts]
    return budgets_of(Results(results.folder, whole), [PASSES])


def found_of(results: Results, name: str, passes: int | None = None) -> list[Record]:
    return results.of(setting_of(name, passes), name)


def difference(results: Results, name: str, passes: int | None = None) -> tuple[str, str]:
    """Accuracy less that without compression, with its interval over seeds."""
    own, plain = (
        {r["seed"]: r["metrics"]["accuracy"] for r in found_of(results, n, passes) if values([r], "accuracy")}
        for n in (name, PLAIN)
    )
    points = [100 * (own[seed] - plain[seed]) for seed in sorted(own.keys() & plain.keys())]
    if name == PLAIN or not points:
        return "-", "-"
    centre, low, high = interval95(points)
    return f"{centre:+.1f}", f"{low:+.1f} to {high:+.1f}" if len(points) > 1 else "-"


def table(results: Results, passes: int | None = None) -> Sheet:
    """A row for every compressor, empty where it has not been run."""
    plain = average(found_of(results, PLAIN, passes), "bytes_up", "cost")
    rows: list[tuple[str, ...]] = []
    for name in VARIANTS:
        found = found_of(results, name, passes)
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
                *difference(results, name, passes),
                f"{average(found, 'nll'):.3f}",
                f"{average(found, 'ece'):.3f}",
                f"{average(found, 'seconds', 'cost'):.0f}",
            )
        )
    return Sheet(COLUMNS, rows, frozenset({0}))


def by_bytes(
    results: Results, score: str, scale: float, passes: int | None = None
) -> dict[str, dict[float, list[float]]]:
    """For each kind of compressor a score against megabytes, to two digits, fewest first."""
    out: dict[str, dict[float, list[float]]] = {}
    for name in VARIANTS:
        found = found_of(results, name, passes)
        if numbers := [scale * v for v in values(found, score)]:
            sent = float(f"{average(found, 'bytes_up', 'cost', 1e-6):.2g}")
            out.setdefault(name.split(",")[0], {}).setdefault(sent, []).extend(numbers)
    return {kind: dict(sorted(group.items())) for kind, group in out.items()}


def sheets(results: Results) -> dict[str, Sheet]:
    return {f"Compressors{after_title(n, PASSES)}": table(results, n) for n in budgets(results)}


def figures(results: Results, passes: int) -> list[Figure]:
    out = []
    for score, scale, label in (("accuracy", 100.0, "test accuracy, %"), ("ece", 1.0, "ECE")):
        if groups := by_bytes(results, score, scale, passes):
            drawn = points(groups, {}, "MB sent up", label, log_y=False, joined=True, looks=LOOKS)
            out.append(Figure(drawn, "Small dots are seeds, large ones their median."))
    return out


def page(results: Results) -> Page:
    setting, allowed = setting_of(PLAIN), in_words(budgets(results))
    lead = (
        f"{setting['dataset']}, {setting['b']} clients with {setting['classes_per_client']} classes each, "
        f"half of them with {setting['n_small']} images and half with {setting['n_large']}; ten active per "
        f"round, {allowed} backbone passes. Clients' gradients of phi are compressed, those of the prior "
        "are sent as they are. Everything else is FedSOUL's default."
    )
    sections = [
        Section(f"Compressors{after_title(n, PASSES)}", LEGEND, table(results, n), figures(results, n))
        for n in budgets(results)
    ]
    return Page("fedpop: compression", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=3, data="cifar10", jobs=jobs, budgets=budgets, sheets=sheets, page=page
)
