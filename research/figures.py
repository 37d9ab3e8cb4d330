"""Figures as SVG text that only experiments have: seeds by method, measurements at numbers, densities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from fedpop.report.marks import beside, legend
from fedpop.report.style import BLACK, Look, colour, new_axes, styled, svg_of
from fedpop.report.style import looks as looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def spread(
    groups: Mapping[str, Mapping[str, Sequence[float]]], x_label: str, y_label: str, log_y: bool = True
) -> str:
    """For each group, every seed of every method as a dot, equal ones beside each other, with the median as
    a line."""
    with styled():
        figure, axes = new_axes(9.4, 3.2)
        methods = list(dict.fromkeys(m for g in groups.values() for m, numbers in g.items() if numbers))
        width = 0.8 / max(len(methods), 1)
        named: set[str] = set()
        everything = [v for g in groups.values() for numbers in g.values() for v in numbers]
        for j, method in enumerate(methods):
            for i, group in enumerate(groups.values()):
                numbers = list(group.get(method, ()))
                if not numbers:
                    continue
                x = i - 0.4 + (j + 0.5) * width
                label = None if method in named else method
                named.add(method)
                apart = beside(numbers, everything, 0.4 * width, log_y)
                axes.plot(
                    [x + a for a in apart], numbers, ".", color=colour(method), alpha=0.55, ms=4, label=label
                )
                ends = (x - width * 0.4, x + width * 0.4)
                axes.hlines(median(numbers), *ends, color=colour(method), linewidth=2)
        if log_y:
            axes.set_yscale("log")
        axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _legend_above(axes, len(methods), len(methods))
        return svg_of(figure)


def points(
    groups: Mapping[str, Mapping[float, Sequence[float]]],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = True,
    joined: bool = False,
    looks: Mapping[str, Look] | None = None,
    large: bool = False,
) -> str:
    """Measurements at numbers x: every seed a dot, medians larger; ``lines`` are what was expected. A
    ``large`` figure has room for many groups, whose names stand beside it.

    A seed without a value counts as infinite: it has no dot, and enough of them no median either. Seeds that
    agree stand beside each other.
    """
    with styled():
        figure, axes = new_axes(8.4, 4.4) if large else new_axes()
        for dashes, (name, line) in zip(("--", ":", "-."), lines.items(), strict=False):
            axes.plot(*zip(*line, strict=True), dashes, color=BLACK, linewidth=1.1, label=name)
        own = looks or looks_of(groups)
        every = [v for g in groups.values() for numbers in g.values() for v in numbers if math.isfinite(v)]
        widest = max((x for g in groups.values() for x in g), default=1.0)
        for name, group in groups.items():
            shade = own[name][0]
            for x, numbers in group.items():
                seen = [v for v in numbers if math.isfinite(v) and (v > 0 or not log_y)]
                apart = beside(seen, every, 0.04, log_y)
                xs = [x * math.exp(a) if log_x else x + a * widest / 2 for a in apart]
                axes.plot(xs, seen, ".", color=shade, alpha=0.35, ms=4)
            medians = [(x, median(numbers)) for x, numbers in group.items() if numbers]
            centres = [(x, y) for x, y in medians if math.isfinite(y)]
            dash = own[name][1] if joined else ""
            if centres:
                seen_at, middle = zip(*centres, strict=True)
                axes.plot(seen_at, middle, "o", ls=dash, color=shade, ms=5, linewidth=1.4, label=name)
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
        if large:
            axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            _legend_above(axes, len(groups) + len(lines), 2)
        return svg_of(figure)


def contours(
    name: str,
    density: Sequence[Sequence[float]],
    xs: Sequence[float],
    ys: Sequence[float],
    dots: Sequence[tuple[float, float]],
    shares: Sequence[float] = (0.5, 0.9),
) -> str:
    """A density on the grid (rows along y): the regions that hold these shares of it, over dots."""
    with styled():
        figure, axes = new_axes(2.9, 2.9)
        axes.plot(*zip(*dots, strict=True), ".", color="#999999", ms=3, alpha=0.7)
        axes.contour(xs, ys, density, levels=_levels(density, shares), colors=colour(name), linewidths=1.3)
        axes.set_title(name, fontsize=9)
        axes.set_aspect("equal")
        axes.set_xlabel("first coordinate of z")
        axes.set_ylabel("second")
        return svg_of(figure)


def _levels(density: Sequence[Sequence[float]], shares: Sequence[float]) -> list[float]:
    """Heights above which the density holds these shares of its mass, lowest first."""
    ordered = sorted((v for row in density for v in row), reverse=True)
    whole = sum(ordered)
    levels, mass = [], 0.0
    wanted = sorted(shares)
    for value in ordered:
        mass += value
        while wanted and mass >= wanted[0] * whole:
            levels.append(value)
            wanted.pop(0)
    return sorted(set(levels))


def densities(
    groups: Mapping[str, Sequence[Sequence[float]]], looks: Mapping[str, Look], most: float, x_label: str
) -> str:
    """One thin line for each row of counts over equal parts of [0, most], as shares; the mean of a group is a
    thick one."""
    with styled():
        figure, axes = new_axes(4.6, 2.7)
        for name, rows in groups.items():
            shade, dash = looks[name]
            shares = [[n / sum(row) for n in row] for row in rows if sum(row)]
            if not shares:
                continue
            width = most / len(shares[0])
            at = [(i + 0.5) * width for i in range(len(shares[0]))]
            for row in shares:
                axes.plot(at, [round(v, 4) for v in row], dash, color=shade, alpha=0.15, linewidth=0.6)
            mean = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
            axes.plot(at, mean, dash, color=shade, linewidth=2, label=name)
        axes.set_xlim(0, most)
        axes.set_xlabel(x_label)
        axes.set_ylabel("share of examples")
        legend(axes, len(groups))
        return svg_of(figure)


def _legend_above(axes: Axes, lines: int, columns: int) -> None:
    """A legend above the axes, unless there is one line only."""
    if lines > 1:
        axes.legend(
            frameon=False, fontsize=8, ncols=min(columns, lines), loc="lower center", bbox_to_anchor=(0.5, 1)
        )
