"""What keeps a figure honest: dots that coincide are set apart, lines that leave the axes are named, and a
legend is there only where there is something to tell apart."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Sequence[tuple[float, float]]


def swarm(values: Sequence[float], near: float) -> list[float]:
    """Places across the axis, in whole steps, such that values nearer than ``near`` do not cover each other.

    >>> swarm([1.0, 1.0, 5.0, 1.0], near=0.1)
    [0, 1, 0, -1]
    """
    taken: dict[int, list[float]] = {}
    places = []
    for value in values:
        place, step = 0, 0
        while any(abs(value - other) < near for other in taken.get(place, ())):
            step += 1
            place = (step + 1) // 2 * (1 if step % 2 else -1)
        taken.setdefault(place, []).append(value)
        places.append(float(place))
    return [int(p) for p in places]


def beside(
    values: Sequence[float], everything: Sequence[float], half: float, log: bool = False
) -> list[float]:
    """Offsets of at most ``half`` for dots on one line, where ``everything`` is what the axis shows."""
    scaled = [math.log(v) for v in values] if log else list(values)
    whole = [math.log(v) for v in everything if v > 0] if log else list(everything)
    places = swarm(scaled, 0.02 * (max(whole) - min(whole)) or 1e-12)
    widest = max((abs(p) for p in places), default=0)
    step = half / max(widest, 3)
    return [step * p for p in places]


def legend(axes: Axes, lines: int, below: bool = False) -> None:
    """A legend, unless there is one line only."""
    if lines < 2:
        return
    if not below:
        axes.legend(frameon=False, fontsize=8)
        return
    axes.figure.legend(
        frameon=False,
        fontsize=7.5,
        ncols=min(4, lines),
        loc="outside lower center",
        columnspacing=1.2,
        handlelength=1.8,
    )


def drawable(line: Line, log_y: bool) -> Line:
    """The points that an axis can show."""
    return [(x, y) for x, y in line if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log_y)]


def tell_what_is_missing(axes: Axes, lines: Mapping[str, Line], log_y: bool) -> None:
    """Name the lines with values that are not there to be seen: outside the axes, or no numbers at all."""
    low, high = axes.get_ylim()
    notes = []
    for name, line in lines.items():
        finite = [y for _, y in line if math.isfinite(y)]
        shown = drawable(line, log_y)
        above = max((y for _, y in shown), default=-math.inf)
        below = min((y for _, y in shown), default=math.inf)
        if above > high:
            notes.append(f"{name} leaves above (up to {above:.3g})")
            _arrow(axes, name, shown, high)
        if below < low:
            notes.append(f"{name} leaves below (down to {below:.3g})")
        if len(finite) < len(line):
            notes.append(f"{name} diverged")
        elif len(shown) < len(finite):
            notes.append(f"{name} has values of zero or less, which a logarithmic axis has not")
    if notes:
        axes.set_title(textwrap.fill("; ".join(notes), 84), loc="left", fontsize=7, color="#555555")


def _arrow(axes: Axes, name: str, line: Line, high: float) -> None:
    """Where a line leaves through the top."""
    across = [a if ya > high else b for (a, ya), (b, yb) in pairwise(line) if (ya > high) != (yb > high)]
    x = across[-1] if across else line[-1][0]
    drawn = next((a for a in axes.get_lines() if a.get_label() == name), None)
    shade = drawn.get_color() if drawn is not None else "#000000"
    axes.plot(x, high, "^", color=shade, ms=5, clip_on=False, zorder=4)
