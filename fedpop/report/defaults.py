"""The report of ``fedpop experiment defaults``: what each setting is worth, paired over seeds and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedpop.experiments.defaults import ALL, DEFAULT
from fedpop.report import plots
from fedpop.report.html import Figure, Section, Sheet, write_report
from fedpop.report.results import Record, Results, mean, values

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
    return ALL[method.removesuffix(" + tuning")].question


def order(results: Results) -> list[str]:
    """Methods in the experiment's own order."""
    found = results.methods()
    known = [m for name in ALL for m in (name, f"{name} + tuning") if m in found]
    return known + [m for m in found if m not in known]


def _mean(records: list[Record], name: str, digits: int = 3, of: str = "metrics", scale: float = 1.0) -> str:
    numbers = values(records, name, of)
    return f"{scale * mean(numbers):.{digits}f}" if numbers else "-"


def summary_table(results: Results) -> Sheet:
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


def experiment_report(results: Results, path: Path) -> Path:
    """The page."""
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
        Section("All numbers", LEGEND, summary_table(results)),
    ]
    lead = (
        "100 clients with five classes each, half of them with 5 images and half with 25; ten are active per "
        "round; every method may spend the same number of backbone passes. What FedSOUL does by default for "
        f"networks is the row '{DEFAULT}'."
    )
    return write_report(path, "fedpop: defaults for networks", lead, sections)
