"""A picture of who has what: examples of each class at each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.files import writable_folder, write_bytes
from fedpop.report.style import BLUE, image_of, new_figure, root_scale, styled, whole_numbers

FORMS = (".png", ".svg", ".pdf")
MOST_NAMED_CLASSES = 20
"""Classes up to which each is named on the axis."""
MOST_BARS = 120
"""Clients up to which each has a bar and lines of its own."""
MOST_PIXELS = 1000
"""Clients up to which each is a pixel wide at least."""


def draw_holdings(counts: Tensor, classes: Sequence[str], title: str, path: Path) -> None:
    """``counts`` ``[b, classes]`` as a table of shades, with the clients' sizes above it, into a file."""
    if path.is_dir():
        raise SettingsError(f"{path} is a folder; name a file in it, such as {path / 'who.png'}")
    if path.suffix not in FORMS:
        raise SettingsError(f"a picture is a file that ends in {', '.join(FORMS)}, not {path.name!r}")
    b, kinds = counts.shape
    height = 0.22 * kinds if kinds <= MOST_NAMED_CLASSES else 4.5
    with styled():
        figure = new_figure(min(max(3.2 + 0.07 * b, 5.0), 12.0), 1.9 + height)
        top, table = figure.subplots(2, 1, sharex=True, height_ratios=(0.9, height))
        sizes = counts.sum(1).tolist()
        if b <= MOST_BARS:
            top.bar(range(b), sizes, width=0.85, color=BLUE)
        else:  # one outline: gaps that are narrower than a pixel would be stripes
            top.stairs(sizes, np.arange(b + 1) - 0.5, fill=True, color=BLUE)
        for axis in (top.yaxis, table.xaxis):
            axis.set_major_locator(whole_numbers())
        top.set_ylabel("examples")
        top.grid(axis="x", visible=False)
        top.set_title(title, loc="left", fontsize=10)
        own, together = _columns(counts)
        shades = table.imshow(
            np.ma.masked_equal(own, 0),  # nothing is white
            aspect="auto",
            cmap="Blues",
            norm=root_scale(float(own.max())),
            interpolation="none",
            extent=(-0.5, b - 0.5, kinds - 0.5, -0.5),
        )
        if kinds <= MOST_NAMED_CLASSES:
            table.set_yticks(range(kinds), list(classes), fontsize=8)
        table.set_ylabel("class")
        table.set_xlabel("client" if together == 1 else f"client (shades are means of {together})")
        table.grid(visible=False)
        # Lines between cells, so that equal shades next to each other can be counted.
        if b <= MOST_BARS and kinds <= MOST_NAMED_CLASSES:
            table.set_xticks([i - 0.5 for i in range(1, b)], minor=True)
            table.set_yticks([i - 0.5 for i in range(1, kinds)], minor=True)
            table.grid(which="minor", color="#dddddd", linewidth=0.4, visible=True)
        for axes in (top, table):
            axes.tick_params(which="minor", length=0)
        top.tick_params(bottom=False)
        bar = figure.colorbar(shades, ax=table, pad=0.01, ticks=whole_numbers())
        bar.set_label("examples of the class")
        bar.outline.set_visible(False)
        write_bytes(writable_folder(path.parent) / path.name, image_of(figure, path.suffix[1:]))


def _columns(counts: Tensor) -> tuple[npt.NDArray[np.float64], int]:
    """``[classes, columns]``, a column for each client, or for several where clients outnumber pixels;
    and how many share one."""
    table = counts.T.double().numpy()
    together = -(-table.shape[1] // MOST_PIXELS)
    first = np.arange(0, table.shape[1], together)
    sizes = np.diff(np.append(first, table.shape[1]))
    return np.add.reduceat(table, first, axis=1) / sizes, together
