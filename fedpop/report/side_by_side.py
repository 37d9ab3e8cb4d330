"""Figures as SVG text that show many methods side by side, up to forty told apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedpop.report.marks import drawable, legend, tell_what_is_missing
from fedpop.report.style import BLACK, Look, log_x_axis, new_axes, styled, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def paths(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    looks: Mapping[str, Look],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    high_is_good: bool = True,
) -> str:
    """Scores on the way, a line per method; the axis shows what happens near the best ones, and who left."""
    with styled():
        figure, axes = new_axes(4.6, 3.1)
        shown = {name: drawable(line, False) for name, line in lines.items()}
        for name, line in shown.items():
            if line:
                shade, dash = looks[name]
                axes.plot(*zip(*line, strict=True), dash, color=shade, label=name, linewidth=1.5)
        if log_x:
            log_x_axis(axes)
        _near_the_best(axes, [[y for _, y in line] for line in shown.values() if line], high_is_good)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        legend(axes, sum(map(bool, shown.values())), below=True)
        tell_what_is_missing(axes, lines, False)
        return svg_of(figure)


def _near_the_best(axes: Axes, rows: Sequence[Sequence[float]], high_is_good: bool) -> None:
    """Cut off what a method that diverged, or the first rounds, would flatten all the rest with."""
    if high_is_good or not rows:
        return
    ends = sorted(row[-1] for row in rows)
    best, usual = min(min(row) for row in rows), ends[len(ends) // 2]
    top = usual + 2 * (usual - best) + 0.1 * abs(usual)
    if max(max(row) for row in rows) > top:
        axes.set_ylim(best - 0.05 * (top - best), top)


def reliabilities(curves: Mapping[str, Sequence[tuple[float, float, int]]], looks: Mapping[str, Look]) -> str:
    """Accuracy against confidence, (confidence, accuracy, count) in bins, larger dots for more of them; bins
    with less than half a per cent of the predictions are left out."""
    with styled():
        figure, axes = new_axes(4.6, 4.2)
        axes.plot((0, 1), (0, 1), color=BLACK, linewidth=0.9, linestyle=":")
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
        axes.set_xlabel("confidence: how sure")
        axes.set_ylabel("accuracy: how often right")
        legend(axes, sum(map(bool, curves.values())), below=True)
        return svg_of(figure)


def ranked(
    heights: Mapping[str, float],
    looks: Mapping[str, Look],
    x_label: str,
    reference: tuple[str, float] | None = None,
) -> str:
    """One bar per method from top to bottom, its value beside it; a bar far longer than the others is cut and
    says so, what is not finite has none."""
    with styled():
        figure, axes = new_axes(4.6, 0.8 + 0.24 * len(heights))
        finite = [v for v in heights.values() if math.isfinite(v)]
        limit = (4 * sorted(finite)[len(finite) // 2] if finite else 1.0) or max(finite)
        shown = [min(v, limit) if math.isfinite(v) else 0.0 for v in heights.values()]
        drawn = axes.barh(range(len(shown)), shown, color=[looks[n][0] for n in heights], height=0.65)
        longest = max(shown, default=1.0) or 1.0
        for bar, v, width in zip(drawn, heights.values(), shown, strict=True):
            inside = width > 0.2 * longest
            axes.annotate(
                f"{v:.3g}" + (" (cut)" if v > limit else "") if math.isfinite(v) else "diverged",
                (0 if inside else width, bar.get_y() + bar.get_height() / 2),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color="white" if inside else "#1c1e21",
                weight="bold" if inside else "normal",
            )
        if reference is not None:
            axes.axvline(reference[1], color=BLACK, linestyle="--", linewidth=1)
            axes.annotate(
                reference[0],
                (reference[1], 1.0),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                fontsize=7.5,
            )
        axes.set_yticks(range(len(heights)), list(heights), fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x_label)
        axes.set_ylabel("method")
        return svg_of(figure)


def scatters(
    panels: Mapping[str, Sequence[tuple[float, float]]],
    looks: Mapping[str, Look],
    x_label: str,
    y_label: str,
) -> dict[str, str]:
    """A figure per method, all on the same axes: every client a dot, against the same client under another
    method. A dot that stands for several is larger; one beyond the axes is a triangle on the edge."""
    low, high = _usual_range([v for pairs in panels.values() for pair in pairs for v in pair])
    out = {}
    for name, pairs in panels.items():
        with styled():
            figure, axes = new_axes(2.5, 2.6)
            axes.plot((low, high), (low, high), color=BLACK, linewidth=0.8, linestyle=":")
            for beyond, shape in ((False, "o"), (True, "^")):
                here = Counter((min(x, high), min(y, high)) for x, y in pairs if (max(x, y) > high) is beyond)
                if here:
                    xs, ys = zip(*here, strict=True)
                    sizes = [8 * n for n in here.values()]
                    drawn = axes.scatter(xs, ys, sizes, looks[name][0], marker=shape, alpha=0.5, lw=0)
                    drawn.set_clip_on(False)
            axes.set_xlim(low, high)
            axes.set_ylim(low, high)
            axes.set_aspect("equal")
            axes.set_title(name, fontsize=9)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(x_label, fontsize=8)
            axes.set_ylabel(f"{name}: {y_label}" if len(name) < 14 else y_label, fontsize=8)
            out[name] = svg_of(figure)
    return out


def _usual_range(numbers: Sequence[float]) -> tuple[float, float]:
    """From the smallest to the largest, unless that is far beyond nearly all."""
    ordered = sorted(numbers)
    low, high = ordered[0], ordered[-1]
    most = ordered[int(0.98 * (len(ordered) - 1))]
    high = min(high, low + 1.5 * (most - low)) if most > low else high
    gap = 0.04 * (high - low or 1.0)
    return low - gap, high + gap
