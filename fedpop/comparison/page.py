"""The page of a comparison: scores on the way, clients, calibration, all tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedpop.comparison.sheets import (
    COST,
    PERCENT,
    REFERENCE,
    Compared,
    class_of,
    cost_sheet,
    lead_of,
    main_score,
    new_sheet,
    notes,
    protocol,
    scores_sheet,
    summary,
    time_spent,
)
from fedpop.evaluation.scores import HIGH_IS_GOOD
from fedpop.report import side_by_side
from fedpop.report.html import Figure, Page, Section
from fedpop.report.results import made_by, mean, values
from fedpop.report.style import looks as looks_of


def _curves(comparison: Compared, x: Callable[[dict[str, Any]], float], score: str) -> dict[str, Any]:
    """For each method the mean over seeds of a score on the way; where seeds evaluated different rounds, the
    first seed's."""
    scale = 100 if score in PERCENT else 1
    lines = {}
    for method in comparison.methods:
        runs = [d["points"] for (m, _), d in sorted(comparison.details.items()) if m == method]
        runs = [[p for p in run if p.get(score) is not None] for run in runs]
        runs = [run for run in runs if run]
        if not runs:
            continue
        same = [run for run in runs if [p["round"] for p in run] == [p["round"] for p in runs[0]]]
        lines[method] = [
            (mean([x(p) for p in at]), scale * mean([p[score] for p in at])) for at in zip(*same, strict=True)
        ]
    return lines


def _reliability(comparison: Compared, method: str) -> list[tuple[float, float, int]]:
    """Bins of all seeds together."""
    sums: dict[int, list[float]] = {}
    for (m, _), d in comparison.details.items():
        if m == method:
            for confidence, accuracy, count in d["reliability"]:
                cell = sums.setdefault(int(15 * confidence + 1e-9), [0.0, 0.0, 0.0])
                for j, v in enumerate((confidence * count, accuracy * count, count)):
                    cell[j] += v
    return [(c / n, a / n, int(n)) for _, (c, a, n) in sorted(sums.items())]


def _pairs(comparison: Compared, method: str, other: str, score: str) -> list[tuple[float, float]]:
    scale = 100 if score in PERCENT else 1
    out = []
    for (m, seed), d in comparison.details.items():
        there = comparison.details.get((other, seed))
        if m != method or there is None:
            continue
        theirs = dict(zip(there["clients"], there["scores"][score], strict=True))
        for name, value in zip(d["clients"], d["scores"][score], strict=True):
            if value is not None and theirs.get(name) is not None:
                out.append((scale * theirs[name], scale * value))
    return out


def on_the_way(comparison: Compared) -> list[Figure]:
    """The main score against rounds, bytes and passes, and the log-score against rounds."""
    main = main_score(comparison)
    looks = looks_of(comparison.methods)
    label = {"accuracy": "test accuracy, %", "rmse": "test RMSE"}[main]
    good = main in HIGH_IS_GOOD
    figures = []
    axes: tuple[tuple[str, Callable[[dict[str, Any]], float], bool, str], ...] = (
        ("round", lambda p: p["round"], False, "Over the rounds."),
        (
            "megabytes sent, both ways",
            lambda p: (p["bytes_up"] + p["bytes_down"]) / 1e6,
            True,
            "Against what was sent, on a logarithmic scale.",
        ),
        ("backbone passes", lambda p: p["backbone_passes"], False, "Against backbone example-passes."),
    )
    for name, x, log, caption in axes:
        lines = _curves(comparison, x, main)
        lines = {m: [(a, b) for a, b in line if a > 0 or not log] for m, line in lines.items()}
        silent = [m for m, line in lines.items() if not line]
        caption += f" {', '.join(silent)}: nothing is sent." if silent else ""
        lines = {m: line for m, line in lines.items() if line}
        if lines and any(a > 0 for line in lines.values() for a, _ in line):
            svg = side_by_side.paths(lines, looks, name, label, log, good)
            figures.append(
                Figure(svg, f"{caption} Mean over clients; looks between rounds use short passes.")
            )
    lines = _curves(comparison, lambda p: p["round"], "nll")
    if lines:
        svg = side_by_side.paths(lines, looks, "round", "test NLL", False, False)
        figures.append(Figure(svg, "The log-score (lower is better), which also judges how sure they were."))
    return figures


def page(comparison: Compared) -> Page:
    """The page: scores on the way, clients, calibration, all tables."""
    main = main_score(comparison)
    looks = looks_of(comparison.methods)
    text = " ".join([protocol(comparison), *(f"{note}." for note in notes(comparison))])
    sections = [Section("The comparison", text, summary(comparison))]
    sections.append(Section("On the way", figures=on_the_way(comparison)))
    sections += _clients(comparison, main, looks) + _calibration(comparison, main, looks)
    sections.append(Section("All scores", sheet=scores_sheet(comparison)))
    new = new_sheet(comparison)
    if new is not None:
        text = "Clients that took no part in training: with their own few examples, and without any."
        sections.append(Section("New clients", text, new))
    text = f"{COST} {time_spent(comparison)}".strip()
    sections.append(Section("What it cost", text, cost_sheet(comparison)))
    return Page("fedpop: a comparison", lead_of(comparison), sections, made_by(comparison.records))


def _clients(comparison: Compared, main: str, looks: Any) -> list[Section]:
    known = [m for m in comparison.methods if class_of(comparison, m) == REFERENCE]
    other = (known or list(comparison.methods))[0]
    panels = {m: _pairs(comparison, m, other, main) for m in comparison.methods if m != other}
    panels = {m: pairs for m, pairs in panels.items() if pairs}
    if not panels:
        return []
    score = {"accuracy": "accuracy, %", "rmse": "RMSE"}[main]
    better = "above" if main in HIGH_IS_GOOD else "below"
    caption = (
        f"Every dot is a client (of one seed): its {score.split(',')[0]} under {other}, across, and under "
        f"the panel's method, upwards. Dots {better} the dotted line are clients that fare better with the "
        "panel's method. A larger dot is several clients; triangles on the edge are clients far outside."
    )
    drawn = side_by_side.scatters(panels, looks, f"{other}: {score}", score)
    figures = [Figure(svg, "") for svg in drawn.values()]
    return [Section("Client by client", caption, figures=figures, small=True)]


def _calibration(comparison: Compared, main: str, looks: Any) -> list[Section]:
    if main == "accuracy":
        curves = {m: _reliability(comparison, m) for m in comparison.methods}
        if not any(curves.values()):
            return []
        text = (
            "Predictions in bins of equal confidence, all clients and seeds together: how sure, how often "
            "right. Below the dotted line is overconfident; larger dots are more predictions; bins with "
            "less than half a per cent of them are left out."
        )
        ece = {m: 100 * mean(values(comparison.of_method(m), "test_pooled_ece")) for m in comparison.methods}
        figures = [
            Figure(side_by_side.reliabilities(curves, looks), "Reliability of the final models."),
            Figure(
                side_by_side.ranked(ece, looks, "expected calibration error, %"),
                "Expected calibration error, all examples pooled (lower is better).",
            ),
        ]
        return [Section("How far to trust it", text, figures=figures)]
    cover = {m: 100 * comparison.mean(m, "test_coverage") for m in comparison.methods}
    width = {m: comparison.mean(m, "test_width") for m in comparison.methods}
    text = "Intervals of plug-in methods hold the noise only, so they are too narrow where data are few."
    figures = [
        Figure(
            side_by_side.ranked(cover, looks, "coverage, %", ("90 %", 90.0)),
            "Share of test observations inside their 90 % interval.",
        ),
        Figure(side_by_side.ranked(width, looks, "mean width"), "Mean width of the 90 % intervals."),
    ]
    return [Section("How far to trust it", text, figures=figures)]
