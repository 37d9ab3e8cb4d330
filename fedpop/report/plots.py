"""Figures as SVG text, one quantity each, made from records and points only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedpop.report.marks import beside, drawable, legend, tell_what_is_missing
from fedpop.report.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    Look,
    colour,
    known_look,
    log_x_axis,
    new_axes,
    styled,
    svg_of,
)
from fedpop.report.style import looks as looks_of


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
    with styled():
        figure, axes = new_axes()
        own = looks or looks_of(lines)
        shown = {name: drawable(points, log_y) for name, points in lines.items()}
        for name, points in shown.items():
            if points:
                shade, dash = own[name]
                axes.plot(*zip(*points, strict=True), dash, color=shade, label=name, linewidth=1.6)
        if reference is not None:
            axes.axhline(reference[1], color=BLACK, linestyle="--", linewidth=1, label=reference[0])
        if log_y:
            axes.set_yscale("log")
        if log_x:
            log_x_axis(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        legend(axes, sum(map(bool, shown.values())) + (reference is not None))
        tell_what_is_missing(axes, lines, log_y)
        return svg_of(figure)


def bars(
    heights: Mapping[str, float], y_label: str, reference: tuple[str, float] | None = None, digits: int = 2
) -> str:
    """One bar per method, its value written on it; a bar far outside the others is cut and says so."""
    with styled():
        figure, axes = new_axes(4.6, 2.7)
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
            axes.axhline(reference[1], color=BLACK, linestyle="--", linewidth=1)
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
        axes.set_xlabel("method")
        axes.set_ylabel(y_label)
        return svg_of(figure)


def intervals(
    rows: Sequence[tuple[float, float, float, float]], x_label: str, y_label: str, title: str = ""
) -> str:
    """Predictive intervals against truth, in order of the prediction: (mean, low, high, y)."""
    with styled():
        figure, axes = new_axes(4.6, 2.7)
        ordered = sorted(rows)
        for i, (mean, low, high, y) in enumerate(ordered):
            inside = low <= y <= high
            axes.vlines(i, low, high, color=BLUE, alpha=0.35, linewidth=2.5)
            axes.plot(i, mean, "_", color=BLUE, ms=5)
            axes.plot(i, y, ".", color=BLACK if inside else ORANGE, ms=4)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if title:
            axes.set_title(title, fontsize=9)
        return svg_of(figure)


def dots(
    groups: Mapping[str, Sequence[float]], x_label: str, bold: set[str] | None = None, far: float = math.inf
) -> str:
    """One line per group, from top to bottom: every value a dot, equal ones beside each other, the mean a
    stroke; values beyond ``far`` are counted at the edge."""
    with styled():
        figure, axes = new_axes(4.6, 0.7 + 0.19 * len(groups))
        seen = {name: [v for v in numbers if v <= far] for name, numbers in groups.items()}
        everything = [v for numbers in seen.values() for v in numbers]
        for i, (name, numbers) in enumerate(seen.items()):
            known = known_look(name)
            shade = BLUE if bold and name in bold else known[0] if known else GREY
            if numbers:
                apart = beside(numbers, everything, 0.35)
                axes.plot(numbers, [i + a for a in apart], ".", color=shade, ms=5)
                axes.vlines(sum(numbers) / len(numbers), i - 0.35, i + 0.35, color=shade, linewidth=1.6)
            beyond = len(groups[name]) - len(numbers)
            if beyond:
                axes.annotate(
                    f"{beyond} further \u2192",
                    (1.0, i),
                    xycoords=("axes fraction", "data"),
                    ha="right",
                    va="center",
                    fontsize=7,
                    color="#555555",
                )
        axes.set_yticks(range(len(groups)), list(groups), fontsize=8)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x_label)
        axes.set_ylabel("method")
        return svg_of(figure)
