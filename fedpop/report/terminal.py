"""Tables on a terminal, or as the text that a terminal would show."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from fedpop.report.html import Table

WIDTH = 150


def rich_table(table: Table, title: str = "", left: int = 2) -> RichTable:
    """Columns of text to the left, numbers to the right."""
    out = RichTable(title=title or None, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for i, column in enumerate(table.columns):
        out.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    for i, row in enumerate(table.rows):
        out.add_row(*row, style="bold" if i in table.highlight else "")
    return out


def as_text(table: Table) -> str:
    """The table as lines of text.

    >>> print(as_text(Table(("method", "kind", "score"), [("FedAvg", "plug-in", "0.5")])))
    method kind    score
    FedAvg plug-in   0.5
    """
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(rich_table(table))
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())
