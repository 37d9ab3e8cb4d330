"""One plain style for every figure: fonts, axes, how a figure becomes SVG text; and one colour and one dash
for every method, the same in every figure of the project.

The only file that imports matplotlib, and not before something is drawn: it takes half a second, which
``import fedpop`` need not.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Iterator
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


Look = tuple[str, str]
"""A colour and a dash."""

BLACK, GREY, BLUE, ORANGE = "#000000", "#777777", "#0072B2", "#D55E00"
METHODS: dict[str, Look] = {
    "FedSOUL": (BLUE, "-"),
    "FedSOUK": ("#003F6B", "--"),
    "Marginal-ML": ("#0A5C36", ":"),
    "FedSOUL-paper": ("#56B4E9", "-"),
    "FedSOUL-sampled": ("#009E73", "-"),
    "FedSOUL-local": ("#00A6A6", "--"),
    "FedSOUL-width": ("#6BAED6", "-."),
    "FedAvg": ("#999999", "-"),
    "FedAvg-FT": ("#8C6D31", "-"),
    "FedProx": ("#6E6E6E", "--"),
    "SCAFFOLD": ("#4D4D4D", ":"),
    "LocalOnly": ("#B8860B", ":"),
    "FedRep": ("#E69F00", "-"),
    "FedRep-spectral": (ORANGE, "-"),
    "FedPer": ("#A63603", "--"),
    "LG-FedAvg": ("#F28E63", "-."),
    "Ditto": ("#CC79A7", "-"),
    "APFL": ("#9C3F75", "--"),
    "pFedMe": ("#7B4FA3", "-"),
    "L2GD": ("#B39BD8", "--"),
    "Per-FedAvg": ("#4B2E83", ":"),
    "QLSD": ("#44AA77", "--"),
    "FSGLD": ("#117733", ":"),
    "FedBE": ("#66C2A5", "-."),
    "DG-LMC": ("#2F6F4F", "-."),
    "FedBABU": ("#C9A227", "--"),
    "pFedFDA": ("#882255", "-"),
    "pFedVEM": ("#332288", "-."),
    "FedDBE": ("#999933", "-."),
    "pFedBayes": ("#661100", "--"),
    "Exact": (BLACK, "-"),
    "Truth": (BLACK, "-"),
    "Normal": (BLUE, "-"),
    "Mixture": (ORANGE, "-"),
    "Energy": ("#009E73", "-"),
}
OTHERS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", BLACK, "#8C6D31", "#7B4FA3", "#999999")
DASHES = ("-", "--", ":", "-.")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_PLAIN = {_plain(name): look for name, look in METHODS.items()}
_ALIASES = {"local": "localonly", "maximummarginallikelihood": "marginalml"}
"""Names that are too common a word to begin a label with, or too long for one."""


def known_look(name: str) -> Look | None:
    """Of a method by its name or its class, or of a row whose label begins so; None for anything else.

    >>> known_look("FedAvgFT") == known_look("FedAvg-FT, ten epochs") == METHODS["FedAvg-FT"]
    True
    """
    plain = _plain(name)
    plain = _ALIASES.get(plain, plain)
    found = max((m for m in _BY_PLAIN if plain.startswith(m)), key=len, default=None)
    return None if found is None else _BY_PLAIN[found]


def _candidates(name: str) -> Iterator[Look]:
    """What a name may look like, the likeliest first: its own colour, then everything there is."""
    own = known_look(name)
    if own is not None:
        yield own
        yield from ((own[0], dash) for dash in DASHES)
    first = zlib.crc32(name.encode())
    for dash in range(len(DASHES)):
        yield from (
            (OTHERS[(first + i) % len(OTHERS)], DASHES[(first + dash) % len(DASHES)])
            for i in range(len(OTHERS))
        )


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A colour and a dash for each of those in one figure; no two alike, up to forty of them.

    >>> looks(["FedRep", "FedAvg"]) == {name: METHODS[name] for name in ("FedRep", "FedAvg")}
    True
    >>> len(set(looks(str(i) for i in range(40)).values()))
    40
    """
    wanted = list(dict.fromkeys(names))
    given = {name: _BY_PLAIN[_plain(name)] for name in wanted if _plain(name) in _BY_PLAIN}
    for name in (n for n in wanted if n not in given):  # variants make way for what they vary
        free = (look for look in _candidates(name) if look not in given.values())
        given[name] = next(free, next(_candidates(name)))
    return {name: given[name] for name in wanted}


def colour(name: str) -> str:
    """The colour alone."""
    return next(_candidates(name))[0]
