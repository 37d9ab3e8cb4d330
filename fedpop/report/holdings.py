"""A picture of who has what: examples of each class at each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.files import writable_folder, write_bytes
from fedpop.report.looks import BLUE
from fedpop.report.style import image_of, new_figure, root_scale, styled

FORMS = (".png", ".svg", ".pdf")
NAMED = 20
"""Classes up to which each is named on the axis."""


def draw_holdings(counts: Tensor, classes: Sequence[str], title: str, path: Path) -> None:
    """``counts`` ``[b, classes]`` as a table of shades, with the clients' sizes above it, into a file."""
    if path.suffix not in FORMS:
        raise SettingsError(f"a picture is a file that ends in {', '.join(FORMS)}, not {path.name!r}")
    b, kinds = counts.shape
    height = 0.22 * kinds if kinds <= NAMED else 4.5
    with styled():
        figure = new_figure(min(max(3.2 + 0.07 * b, 5.0), 12.0), 1.9 + height)
        top, table = figure.subplots(2, 1, sharex=True, height_ratios=(0.9, height))
        top.bar(range(b), counts.sum(1).tolist(), width=0.85, color=BLUE)
        top.set_ylabel("examples")
        top.grid(axis="x", visible=False)
        top.set_title(title, loc="left", fontsize=10)
        held = np.ma.masked_equal(counts.T.numpy(), 0)  # nothing is white
        scale = root_scale(int(counts.max()))
        shades = table.imshow(held, aspect="auto", cmap="Blues", norm=scale, interpolation="none")
        if kinds <= NAMED:
            table.set_yticks(range(kinds), list(classes), fontsize=8)
        table.set_ylabel("class")
        table.set_xlabel("client")
        table.grid(visible=False)
        # Lines between cells, so that equal shades next to each other can be counted.
        if b <= 120 and kinds <= NAMED:
            table.set_xticks([i - 0.5 for i in range(1, b)], minor=True)
            table.set_yticks([i - 0.5 for i in range(1, kinds)], minor=True)
            table.grid(which="minor", color="#dddddd", linewidth=0.4, visible=True)
        for axes in (top, table):
            axes.tick_params(which="minor", length=0)
        top.tick_params(bottom=False)
        bar = figure.colorbar(shades, ax=table, pad=0.01)
        bar.set_label("examples of the class")
        bar.outline.set_visible(False)
        write_bytes(writable_folder(path.parent) / path.name, image_of(figure, path.suffix[1:]))
