"""One self-contained HTML page from sheets and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedpop.extras import library
from fedpop.files import write_bytes
from fedpop.version import __version__


@dataclass(frozen=True)
class Sheet:
    """Column names and rows of cells, as they are to be read."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    highlight: frozenset[int] = frozenset()
    spare: Sequence[str] = ()
    """Columns that a narrow terminal may leave out, the first first."""


@dataclass(frozen=True)
class Figure:
    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    title: str
    text: str = ""
    sheet: Sheet | None = None
    figures: Sequence[Figure] = field(default_factory=tuple)
    wide: bool = False
    """Figures that are as wide as the page; a phone scrolls them."""
    small: bool = False
    """Many small figures, as many beside each other as there is room."""
    printed: str = ""
    """Text as it was printed, its lines under one another."""


@dataclass(frozen=True)
class Page:
    """What a page says, from top to bottom."""

    title: str
    lead: str
    sections: Sequence[Section]
    made: str = ""
    """By which version its numbers were made."""


def write_page(path: Path, page: Page) -> Path:
    """Render and write the page; nothing in it points to another file, and who cannot read the folder cannot
    read it."""
    jinja2 = library("jinja2", "report", "pages")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedpop.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    text = environment.get_template("report.html").render(page=page, version=__version__)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode(), 0o666 & path.parent.stat().st_mode)
    return path


def markdown(sheet: Sheet) -> str:
    """A sheet as a table for reading in a repository."""
    lines = ["| " + " | ".join(sheet.columns) + " |", "|" + "---|" * len(sheet.columns)]
    lines += ["| " + " | ".join(row) + " |" for row in sheet.rows]
    return "\n".join(lines) + "\n"
