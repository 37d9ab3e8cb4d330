"""Figures as SVG text, in one plain style, made from records and points only."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

# One colour per method, told apart by people who do not see red and green apart (Okabe and Ito).
COLOURS = {
    "FedSOUL": "#0072B2",
    "FedSOUL-paper": "#56B4E9",
    "FedRep-spectral": "#D55E00",
    "FedRep": "#E69F00",
    "FedAvg": "#999999",
    "Exact": "#000000",
    "Normal": "#0072B2",
    "Mixture": "#D55E00",
    "Energy": "#009E73",
    "Truth": "#000000",
}
SPARE = ("#009E73", "#CC79A7", "#F0E442")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedpop",
    "font.family": "sans-serif",
}


def colour(method: str) -> str:
    return COLOURS.get(method, SPARE[sum(map(ord, method)) % len(SPARE)])


def _svg(figure: Figure, tight: bool = True) -> str:
    buffer = io.StringIO()
    box = "tight" if tight else None
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches=box)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _axes(width: float = 4.6, height: float = 2.9) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def _log_x(axes: Axes) -> None:
    """A logarithmic axis with numbers that can be read."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    reference: tuple[str, float] | None = None,
    log_x: bool = False,
    log_y: bool = True,
    looks: Mapping[str, Look] | None = None,
) -> str:
    """One line per method."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        for name, points in lines.items():
            if points:
                shade, dash = looks[name] if looks else (colour(name), "-")
                axes.plot(*zip(*points, strict=True), dash, color=shade, label=name, linewidth=1.6)
        if reference is not None:
            axes.axhline(reference[1], color="#000000", linestyle="--", linewidth=1, label=reference[0])
        if log_y:
            axes.set_yscale("log")
        if log_x:
            _log_x(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(frameon=False, fontsize=8)
        return _svg(figure)


def bars(
    heights: Mapping[str, float], y_label: str, reference: tuple[str, float] | None = None, digits: int = 2
) -> str:
    """One bar per method, its value written on it; a bar far outside the others is cut and says so."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.6, 2.7)
        names = [n for n, v in heights.items() if math.isfinite(v)]
        values = [heights[n] for n in names]
        near = sorted(values, key=abs)
        # Leave room for labels, and do not let one enormous value flatten all the rest.
        limit = 10 * abs(near[len(near) // 2]) if near else 1.0
        shown = [max(min(v, limit), -limit) for v in values]
        drawn = axes.bar(range(len(names)), shown, color=[colour(n) for n in names], width=0.65)
        labels = [
            f"{v:.{digits}f}" + (" (cut)" if s != v else "") for v, s in zip(values, shown, strict=True)
        ]
        axes.bar_label(drawn, labels=labels, label_type="center", fontsize=8, color="white", weight="bold")
        if reference is not None:
            axes.axhline(reference[1], color="#000000", linestyle="--", linewidth=1)
            axes.annotate(
                reference[0],
                (0.01, reference[1]),
                xycoords=("axes fraction", "data"),
                ha="left",
                va="bottom",
                fontsize=8,
            )
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
        axes.margins(y=0.12)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(y_label)
        return _svg(figure)


def spread(groups: Mapping[str, Mapping[str, Sequence[float]]], y_label: str, log_y: bool = True) -> str:
    """For each group, every seed of every method as a dot, with the median as a line."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(9.4, 3.2)
        methods = list(dict.fromkeys(m for g in groups.values() for m in g))
        width = 0.8 / max(len(methods), 1)
        for j, method in enumerate(methods):
            for i, group in enumerate(groups.values()):
                numbers = list(group.get(method, ()))
                if not numbers:
                    continue
                x = i - 0.4 + (j + 0.5) * width
                label = method if i == 0 else None
                axes.plot(
                    [x] * len(numbers), numbers, ".", color=colour(method), alpha=0.55, ms=4, label=label
                )
                ordered = sorted(numbers)
                half = len(ordered) // 2
                centre = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
                axes.hlines(centre, x - width * 0.4, x + width * 0.4, color=colour(method), linewidth=2)
        if log_y:
            axes.set_yscale("log")
        axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(y_label)
        axes.legend(
            frameon=False, fontsize=8, ncols=len(methods), loc="lower center", bbox_to_anchor=(0.5, 1)
        )
        return _svg(figure)


def points(
    groups: Mapping[str, Mapping[float, Sequence[float]]],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = True,
    joined: bool = False,
) -> str:
    """Measurements at numbers x: every seed a dot, medians larger; ``lines`` are what was expected.

    A seed without a value counts as infinite: it has no dot, and enough of them no median either.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        for dashes, (name, line) in zip(("--", ":", "-."), lines.items(), strict=False):
            axes.plot(*zip(*line, strict=True), dashes, color="#000000", linewidth=1.1, label=name)
        spare = iter((*SPARE[:2], *COLOURS.values()))  # yellow dots are hard to see
        for name, group in groups.items():
            shade = COLOURS.get(name) or next(spare)
            for x, numbers in group.items():
                seen = [v for v in numbers if math.isfinite(v)]
                axes.plot([x] * len(seen), seen, ".", color=shade, alpha=0.35, ms=4)
            medians = [(x, median(numbers)) for x, numbers in group.items() if numbers]
            centres = [(x, y) for x, y in medians if math.isfinite(y)]
            style = "o-" if joined else "o"
            if centres:
                axes.plot(*zip(*centres, strict=True), style, color=shade, ms=5, linewidth=1.4, label=name)
        if log_x:
            axes.set_xscale("log")
            at: list[float] = []
            for x in sorted({x for group in groups.values() for x in group}):
                if not at or x > 1.3 * at[-1]:  # labels need room
                    at.append(x)
            axes.set_xticks(at, [f"{x:g}" for x in at])
            axes.minorticks_off()
        if log_y:
            axes.set_yscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
        return _svg(figure)


def intervals(
    rows: Sequence[tuple[float, float, float, float]], x_label: str, y_label: str, title: str = ""
) -> str:
    """Predictive intervals against truth, in order of the prediction: (mean, low, high, y)."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.6, 2.7)
        ordered = sorted(rows)
        for i, (mean, low, high, y) in enumerate(ordered):
            inside = low <= y <= high
            axes.vlines(i, low, high, color="#0072B2", alpha=0.35, linewidth=2.5)
            axes.plot(i, mean, "_", color="#0072B2", ms=5)
            axes.plot(i, y, ".", color="#000000" if inside else "#D55E00", ms=4)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if title:
            axes.set_title(title, fontsize=9)
        return _svg(figure)


def dots(groups: Mapping[str, Sequence[float]], x_label: str, bold: set[str] | None = None) -> str:
    """One line per group, from top to bottom: every value a dot, the mean a stroke."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.6, 0.5 + 0.19 * len(groups))
        for i, (name, numbers) in enumerate(groups.items()):
            shade = "#0072B2" if bold and name in bold else "#777777"
            axes.plot(numbers, [i] * len(numbers), ".", color=shade, ms=5)
            centre = sum(numbers) / len(numbers)
            axes.vlines(centre, i - 0.35, i + 0.35, color=shade, linewidth=1.6)
        axes.set_yticks(range(len(groups)), list(groups), fontsize=8)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x_label)
        return _svg(figure)


def contours(
    panels: Mapping[str, Sequence[Sequence[float]]],
    xs: Sequence[float],
    ys: Sequence[float],
    dots: Sequence[tuple[float, float]],
    shares: Sequence[float] = (0.5, 0.9),
) -> str:
    """A panel per density on the grid (rows along y): regions that hold these shares, over the same dots."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.4 * len(panels), 2.6), layout="constrained")
        for i, (name, density) in enumerate(panels.items()):
            axes = figure.add_subplot(1, len(panels), i + 1)
            axes.plot(*zip(*dots, strict=True), ".", color="#999999", ms=2.5, alpha=0.7)
            axes.contour(
                xs, ys, density, levels=_levels(density, shares), colors=colour(name), linewidths=1.3
            )
            axes.set_title(name, fontsize=9)
            axes.set_aspect("equal")
        return _svg(figure)


def _levels(density: Sequence[Sequence[float]], shares: Sequence[float]) -> list[float]:
    """Heights above which the density holds these shares of its mass, lowest first."""
    ordered = sorted((v for row in density for v in row), reverse=True)
    whole = sum(ordered)
    levels, held = [], 0.0
    wanted = sorted(shares)
    for value in ordered:
        held += value
        while wanted and held >= wanted[0] * whole:
            levels.append(value)
            wanted.pop(0)
    return sorted(set(levels))


# --- many methods side by side ------------------------------------------------------------------

WIDE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D31",
    "#7B4FA3",
    "#999999",
)
DASHES = ("-", "--", ":", "-.")
Look = tuple[str, str]


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """A colour and a dash for each method, different for up to forty of them.

    >>> len(set(looks([str(i) for i in range(40)]).values()))
    40
    """
    return {m: (WIDE[i % len(WIDE)], DASHES[i // len(WIDE) % len(DASHES)]) for i, m in enumerate(methods)}


def paths(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    looks: Mapping[str, Look],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    high_is_good: bool = True,
    legend: bool = True,
) -> str:
    """Scores on the way, a line per method; the axis shows what happens near the best ones."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.6, 3.1)
        for name, line in lines.items():
            if line:
                shade, dash = looks[name]
                axes.plot(*zip(*line, strict=True), dash, color=shade, label=name, linewidth=1.5)
        if log_x:
            _log_x(axes)
        _near_the_best(axes, [[y for _, y in line] for line in lines.values() if line], high_is_good)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if legend:
            _legend_below(axes, len(lines))
        return _svg(figure)


def _near_the_best(axes: Axes, rows: Sequence[Sequence[float]], high_is_good: bool) -> None:
    """Cut off what a method that diverged, or the first rounds, would flatten all the rest with."""
    if high_is_good or not rows:
        return
    ends = sorted(row[-1] for row in rows)
    best, usual = min(min(row) for row in rows), ends[len(ends) // 2]
    top = usual + 2 * (usual - best) + 0.1 * abs(usual)
    if max(max(row) for row in rows) > top:
        axes.set_ylim(best - 0.05 * (top - best), top)


def _legend_below(axes: Axes, count: int) -> None:
    columns = min(4, max(count, 1))
    axes.legend(
        frameon=False,
        fontsize=7.5,
        ncols=columns,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        columnspacing=1.2,
        handlelength=1.8,
    )


def reliabilities(curves: Mapping[str, Sequence[tuple[float, float, int]]], looks: Mapping[str, Look]) -> str:
    """Accuracy against confidence, (confidence, accuracy, count) in bins, larger dots for more of them; bins
    with less than half a per cent of the predictions are left out."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.6, 4.2)
        axes.plot((0, 1), (0, 1), color="#000000", linewidth=0.9, linestyle=":")
        for name, curve in curves.items():
            if not curve:
                continue
            shade, dash = looks[name]
            whole = sum(n for _, _, n in curve)
            xs, ys, counts = zip(*[bin for bin in curve if bin[2] >= 0.005 * whole], strict=True)
            axes.plot(xs, ys, dash, color=shade, linewidth=1.4, label=name)
            sizes = [60 * n / max(sum(counts), 1) + 4 for n in counts]
            axes.scatter(xs, ys, s=sizes, color=shade, zorder=3)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("confidence")
        axes.set_ylabel("accuracy")
        _legend_below(axes, len(curves))
        return _svg(figure)


def ranked(
    heights: Mapping[str, float],
    looks: Mapping[str, Look],
    x_label: str,
    reference: tuple[str, float] | None = None,
) -> str:
    """One bar per method from top to bottom, its value beside it; what is not finite has none."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(4.6, 0.8 + 0.24 * len(heights))
        finite = [v for v in heights.values() if math.isfinite(v)]
        limit = 4 * sorted(finite)[len(finite) // 2] if finite else 1.0
        shown = [min(v, limit) if math.isfinite(v) else 0.0 for v in heights.values()]
        drawn = axes.barh(range(len(shown)), shown, color=[looks[n][0] for n in heights], height=0.65)
        longest = max(shown, default=1.0) or 1.0
        for bar, v, width in zip(drawn, heights.values(), shown, strict=True):
            inside = width > 0.2 * longest
            axes.annotate(
                f"{v:.3g}" if math.isfinite(v) else "diverged",
                (0 if inside else width, bar.get_y() + bar.get_height() / 2),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color="white" if inside else "#1c1e21",
                weight="bold" if inside else "normal",
            )
        if reference is not None:
            axes.axvline(reference[1], color="#000000", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(heights)), list(heights), fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x_label)
        return _svg(figure)


def scatters(
    panels: Mapping[str, Sequence[tuple[float, float]]],
    looks: Mapping[str, Look],
    x_label: str,
    y_label: str,
) -> str:
    """A panel per method: every client a dot, against the same client under another method."""
    columns = 4
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.35 * columns, 2.75 * rows), layout="constrained")
        numbers = [v for pairs in panels.values() for pair in pairs for v in pair]
        low, high = _usual_range(numbers)
        for i, (name, pairs) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, i + 1)
            axes.plot((low, high), (low, high), color="#000000", linewidth=0.8, linestyle=":")
            inside = [(min(x, high), min(y, high)) for x, y in pairs]
            axes.plot(*zip(*inside, strict=True), ".", color=looks[name][0], ms=4, alpha=0.5)
            axes.set_xlim(low, high)
            axes.set_ylim(low, high)
            axes.set_aspect("equal")
            axes.set_title(name, fontsize=9)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(x_label, fontsize=8)
            if i % columns == 0:
                axes.set_ylabel(y_label, fontsize=8)
        for blank in range(len(panels), columns * rows):  # few panels stay small
            figure.add_subplot(rows, columns, blank + 1).set_axis_off()
        return _svg(figure, tight=False)


def _usual_range(numbers: Sequence[float]) -> tuple[float, float]:
    """From the smallest to the largest, unless that is far beyond nearly all."""
    ordered = sorted(numbers)
    low, high = ordered[0], ordered[-1]
    most = ordered[int(0.98 * (len(ordered) - 1))]
    high = min(high, low + 1.5 * (most - low)) if most > low else high
    gap = 0.04 * (high - low or 1.0)
    return low - gap, high + gap
