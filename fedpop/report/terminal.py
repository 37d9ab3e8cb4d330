"""Sheets on a terminal, or as the text that a terminal would show."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from fedpop.report.html import Sheet

WIDTH = 150


def console() -> Console:
    """The terminal, or where there is none lines that are wide enough for every sheet."""
    there = Console()
    return there if there.is_terminal else Console(width=WIDTH)


def show(sheet: Sheet, title: str, on: Console) -> None:
    """The sheet on a terminal, as much of it as fits."""
    on.print(rich_table(fitted(sheet, on.width), title))


def fitted(sheet: Sheet, width: int) -> Sheet:
    """The sheet with as many of its spare columns left out as a terminal of this width asks for.

    >>> fitted(Sheet(("method", "sec."), [("FedAvg", "1.0")], spare=("sec.",)), 8).columns
    ['method']
    """
    keep = list(range(len(sheet.columns)))
    widths = [
        1 + max(len(c) for c in (name, *(row[i] for row in sheet.rows)))
        for i, name in enumerate(sheet.columns)
    ]
    for name in sheet.spare:
        if sum(widths[i] for i in keep) <= width:
            break
        keep = [i for i in keep if sheet.columns[i] != name]
    rows = [tuple(row[i] for i in keep) for row in sheet.rows]
    return Sheet([sheet.columns[i] for i in keep], rows, sheet.highlight)


def rich_table(sheet: Sheet, title: str = "", left: int = 2) -> RichTable:
    """Columns of text to the left, numbers to the right."""
    out = RichTable(title=title or None, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for i, column in enumerate(sheet.columns):
        out.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    for i, row in enumerate(sheet.rows):
        out.add_row(*row, style="bold" if i in sheet.highlight else "")
    return out


def as_text(sheet: Sheet) -> str:
    """The sheet as lines of text.

    >>> print(as_text(Sheet(("method", "kind", "score"), [("FedAvg", "plug-in", "0.5")])))
    method kind    score
    FedAvg plug-in   0.5
    """
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(rich_table(sheet))
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())
