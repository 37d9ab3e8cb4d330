"""The report of a results folder: sheets on the terminal, ``results.md`` and ``report.html``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from fedpop.files import write_bytes
from fedpop.report import terminal
from fedpop.report.html import Page, Sheet, markdown, write_page
from fedpop.report.results import Results, made_by


@dataclass(frozen=True, kw_only=True)
class Report:
    """How the records of one kind are read."""

    name: str
    """What the records say under "experiment"."""
    sheets: Callable[[Results], Mapping[str, Sheet]]
    """By title, the most important first; all of them go to ``results.md``."""
    page: Callable[[Results], Page]
    text: Callable[[Results], str] | None = None
    """``results.md``, where it says more than the sheets do."""
    show: Callable[[Results, Console], None] | None = None
    """On the terminal, where that is not all sheets."""

    def tell(self, results: Results) -> Path:
        """Write the files and show the sheets; the files first, whoever stops reading the terminal."""
        path, console = self.write(results), terminal.console()
        if self.show is not None:
            self.show(results, console)
        else:
            for title, sheet in self.sheets(results).items():
                terminal.show(sheet, title, console)
        console.print(f"The report is in [bold]{path}[/bold].")
        return path

    def made(self, results: Results) -> str:
        """What made these records, in words that stand below the tables."""
        return made_by(results.records)

    def write(self, results: Results) -> Path:
        """``results.md`` and ``report.html`` beside ``results.json``; both say what made them."""
        made = self.made(results)
        text, page = f"{self.markdown(results)}\n{made}\n", replace(self.page(results), made=made)
        write_bytes(results.folder / "results.md", text.encode())  # not before both could be made
        return write_page(results.folder / "report.html", page)

    def markdown(self, results: Results) -> str:
        """What ``results.md`` holds of the records: tables, each under its title where there are several."""
        if self.text:
            return self.text(results)
        sheets = self.sheets(results)
        titles = [f"## {title}\n\n" if len(sheets) > 1 else "" for title in sheets]
        return "\n".join(t + markdown(sheet) for t, sheet in zip(titles, sheets.values(), strict=True))
