"""One plain style for every figure: fonts, axes, and how a figure becomes SVG text.

The only file that imports matplotlib, and not before something is drawn: it takes half a second, which
``import fedpop`` need not.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedpop.extras import library

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

STYLE: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedpop",
    "font.family": "sans-serif",
}


@contextmanager
def styled() -> Iterator[None]:
    """What is drawn inside looks like the rest."""
    with library("matplotlib", "report", "figures").rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    made: Figure = library("matplotlib.figure", "report", "figures").Figure(
        figsize=(width, height), layout="constrained"
    )
    return made


def new_axes(width: float = 4.6, height: float = 2.9) -> tuple[Figure, Axes]:
    with styled():
        figure = new_figure(width, height)
        return figure, figure.add_subplot()


def log_x_axis(axes: Axes) -> None:
    """A logarithmic axis with numbers that can be read."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def root_scale(most: float) -> Normalize:
    """Shades by square roots, so that one large number does not make all others alike."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, 0, most)


def whole_numbers() -> Locator:
    """Marks of an axis of counts: few, and at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, integer=True, steps=[1, 2, 5, 10])


def image_of(figure: Figure, form: str) -> bytes:
    """The figure as the content of a file of this form."""
    buffer = io.BytesIO()
    stamp = {} if form == "png" else {"CreationDate" if form == "pdf" else "Date": None}
    figure.savefig(buffer, format=form, metadata=stamp, dpi=160)
    return buffer.getvalue()


def svg_of(figure: Figure, tight: bool = True) -> str:
    buffer = io.StringIO()
    box = "tight" if tight else None
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches=box)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
