"""One plain style for every figure: colours, axes, and how a figure becomes SVG text.

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

# One colour per method, told apart by people who do not see red and green apart (Okabe and Ito).
COLOURS = {
    "FedSOUL": "#0072B2",
    "FedSOUL-sampled": "#009E73",
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
Look = tuple[str, str]
"""A colour and a dash."""


def colour(method: str) -> str:
    return COLOURS.get(method, SPARE[sum(map(ord, method)) % len(SPARE)])


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
