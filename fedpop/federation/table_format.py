"""How tables are written, what of a cell is a number, and from how many rows a level is sent: read without
torch."""

from __future__ import annotations

import codecs
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedpop.errors import SettingsError

MINIMUM = 5
"""Rows at a site below which a level is not sent by its name."""
NOTHING = frozenset(
    {"", "NA", "N/A", "n/a", "<NA>", "#N/A", "#N/A N/A", "#NA", "NULL", "null", "None", "NaN", "nan"}
    | {"-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"}
)
"""What stands for a missing value where its row is dropped: as pandas reads tables, and so formulas."""
SEPARATORS = (",", ";", "\t", "|", " ")
"""By one of these the values of a line are taken to be separated where they are not as was said."""


@dataclass(frozen=True)
class TableFormat:
    """How a site's table is written: what its ``site.toml`` says of it."""

    separator: str = ","
    """Between the values of a CSV file's line."""
    decimal: str = "."
    """In its numbers."""
    encoding: str = "utf-8-sig"
    unit: Mapping[str, str] | None = None
    """In which units its columns are; None where nobody was asked."""

    def __post_init__(self) -> None:
        if len(self.separator) != 1 or self.separator == self.decimal:
            raise SettingsError(
                f"separator is one character, and not the decimal point or comma, not {self.separator!r}"
            )
        if self.decimal not in (".", ","):
            raise SettingsError(f'decimal is "." or ",", not {self.decimal!r}')
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise SettingsError(
                f'encoding is a name such as "utf-8", "cp1252" or "utf-16", not {self.encoding!r}'
            ) from error

    @property
    def text_encoding(self) -> str:
        """With UTF-8 a mark at the beginning is no text."""
        return "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding


USUAL_TABLE = TableFormat()


def number_in(text: str, decimal: str) -> float:
    """The number that a cell holds; NaN where there is none."""
    # What Python alone takes for a number, 1_000, is somebody's mistake in a table.
    if not text.isascii() or "_" in text or (decimal != "." and "." in text):
        return math.nan
    try:
        return float(text.replace(decimal, "."))
    except ValueError:
        return math.nan


def other_separator(header: Sequence[str], row: Sequence[str], separator: str) -> str | None:
    """What separates values where the header was read as one name: by it, a row has as many values as that.

    >>> other_separator(["age;dose"], ["61", "5;0", "7"], ",")
    ';'
    """
    if len(header) != 1:
        return None
    lines = [separator.join(header), separator.join(row)]
    for other in SEPARATORS:
        names, values = (len(next(csv.reader([line], delimiter=other), [])) for line in lines)
        if other != separator and names == values > 1:
            return other
    return None
