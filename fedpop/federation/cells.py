"""Cells of a table: numbers and names out of texts, and all that is wrong with them, counted by column.

What a *form* (``federation.reading``) says of a column decides what may be in it:

    levels, classes     names that are allowed
    range               [least, most] of its numbers
    missing             "error", or "drop": rows in which something is missing are left out
    medians             powers of two at which most sites' sizes and spreads lie, and how many
    scale_tolerance     times as large or as small a site's may be
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpop.errors import DataError, ScaleError, SchemaError
from fedpop.federation.clients import SPLITS
from fedpop.federation.table_format import NOTHING, number_in

OTHER = "(other)"
"""The level of all names that were too rare to be sent."""
LARGEST = float(np.finfo(np.float32).max)
DROP, ERROR = "drop", "error"
SHOWN_VALUES = 5
"""Of the values of bad cells, to whom they belong."""
SCALE_TOLERANCE = 100.0
"""Times as large, or as small, as at most sites: metres are not centimetres times ten thousand."""
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """Columns of a table as texts, and how errors name what is wrong with a row.

    Errors of a site, which the server may see, name rows and columns but no value; those of a table of
    one's own (``users_table``) tell it.
    """

    texts: Mapping[str, Sequence[str]]
    who: str
    """Whose table it is: a site, or a file."""
    rows: Sequence[str]
    """What each row is called: a line of a CSV file, a row of others."""
    users_table: bool = False
    decimal: str = "."
    dropped: int = 0
    """Rows that were left out because something is missing in them."""
    _numbers: dict[str, Numbers] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of columns that were parsed."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Sequence[str]:
        return self.texts[column]

    def only(self, wanted: Sequence[int]) -> Columns:
        """These rows."""
        texts = {column: [cells[i] for i in wanted] for column, cells in self.texts.items()}
        rows, dropped = [self.rows[i] for i in wanted], self.dropped + len(self) - len(wanted)
        return replace(self, texts=texts, rows=rows, dropped=dropped)

    def wrong(self, column: str, row: int, what: str, problem: str) -> DataError:
        """The error for a cell: ``what`` is in it without its value, or its value and the ``problem``."""
        if self.users_table:
            return DataError(f"{self.who}, {self.rows[row]}: {column} is {self[column][row]!r}, {problem}")
        return SchemaError(f"{self.who}, column {column!r}, {self.rows[row]}: {what}")

    def parsed(self, column: str) -> Numbers:
        """A column of numbers, NaN where there is none."""
        if column not in self._numbers:
            cells = [number_in(text, self.decimal) for text in self[column]]
            self._numbers[column] = np.array(cells, dtype=np.float64)
        return self._numbers[column]

    def numbers(self, column: str) -> Numbers:
        """A column of numbers, or the error for the first that is none."""
        out = self.parsed(column)
        for i in np.flatnonzero(~(np.abs(out) <= LARGEST)).tolist():
            if math.isfinite(out[i]):
                problem = f"too large for float32, which ends at {LARGEST:.2g}; rescale the column"
                raise self.wrong(column, i, f"a number {problem}", problem)
            what = "something that is no number" if self[column][i] else "nothing"
            raise self.wrong(column, i, f"{what} is there", "not a number")
        return out

    def codes(self, column: str, levels: Sequence[str]) -> npt.NDArray[np.int64]:
        """The place of each name among the levels."""
        place = {level: k for k, level in enumerate(levels)}
        other = place.get(OTHER)
        found = [place.get(value, other) for value in self[column]]
        if None in found:
            row, agreed = found.index(None), ", ".join(levels)
            raise self.wrong(column, row, f"a level that is not one of {agreed}", f"none of {agreed}")
        return np.array(found, dtype=np.int64)


# --- what is wrong -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadCells:
    """Cells of a column that have the same thing wrong with them."""

    column: str
    what: str
    rows: tuple[int, ...]
    remedy: str = ""

    def words(self, columns: Columns, values: bool = False) -> str:
        """Which, how many and what; with some of the ``values``, for whoever has the table."""
        more = f" and {len(self.rows) - 1} more" if len(self.rows) > 1 else ""
        found = list(dict.fromkeys(repr(columns[self.column][i]) for i in self.rows))
        shown = ", ".join(found[:SHOWN_VALUES]) + (", ..." if len(found) > SHOWN_VALUES else "")
        told = f" ({shown})" if values and found != ["''"] else ""
        return f"column {self.column!r}, {columns.rows[self.rows[0]]}{more}: {self.what}{told}"


def numeric_columns(form: Mapping[str, Any]) -> list[str]:
    """Columns of x, and y, that hold numbers."""
    named = {*form.get("categories", ()), *form.get("levels", {})}
    y = [form["y"]] if form.get("y") and not form.get("classes") else []
    return [column for column in (*form.get("x", ()), *y) if column not in named]


def columns_of(form: Mapping[str, Any]) -> list[str]:
    """All columns that a form is about."""
    more = [form[name] for name in ("group", "split") if form.get(name)]
    return [*form.get("x", []), *([form["y"]] if "y" in form else []), *more]


def bad_cells(columns: Columns, form: Mapping[str, Any]) -> list[BadCells]:
    """All of them in the columns that are there, by column and what is wrong."""
    out = list[BadCells]()
    for column in columns_of(form):
        if column in columns.texts:
            kinds: dict[tuple[str, str], list[int]] = {}
            for row, what, remedy in _problems(columns, column, form):
                kinds.setdefault((what, remedy), []).append(row)
            out += [BadCells(column, what, tuple(rows), remedy) for (what, remedy), rows in kinds.items()]
    return out


def _problems(columns: Columns, column: str, form: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Row, what is wrong there, and what can be done about it."""
    if column == form.get("split"):
        yield from _strange(columns, column, {*SPLITS, ""}, f"a word that is none of {', '.join(SPLITS)}", "")
        return
    if column in numeric_columns(form):
        yield from _bad_numbers(columns, column, form)
        return
    yield from ((i, "nothing is there", "") for i, text in enumerate(columns[column]) if not text)
    known = form["classes"] if column == form.get("y") else form.get("levels", {}).get(column)
    if known is not None and OTHER not in known:
        what, remedy = f"a level that is not one of {', '.join(known)}", "the federation may list more levels"
        yield from _strange(columns, column, {*known, ""}, what, remedy)


def _strange(
    columns: Columns, column: str, known: Collection[str], what: str, remedy: str
) -> Iterator[tuple[int, str, str]]:
    yield from ((i, what, remedy) for i, text in enumerate(columns[column]) if text not in known)


def _bad_numbers(columns: Columns, column: str, form: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    values, (least, most) = columns.parsed(column), form.get("range", {}).get(column, (-LARGEST, LARGEST))
    for i in np.flatnonzero(~((values >= least) & (values <= most) & (np.abs(values) <= LARGEST))).tolist():
        text = columns[column][i]
        if not text:
            yield i, "nothing is there", ""
        elif columns.decimal == "." and DECIMAL_COMMA.fullmatch(text):
            yield i, "a number with a decimal comma", 'for decimal commas set decimal = "," in site.toml'
        elif not math.isfinite(values[i]):
            yield i, "something that is no number is there", ""
        elif abs(values[i]) > LARGEST:
            yield i, f"a number too large for float32, which ends at {LARGEST:.2g}", "rescale the column"
        else:
            yield i, outside_range(form, column), ""


def outside_range(form: Mapping[str, Any], column: str) -> str:
    """What is wrong with a number that is not in its column's range."""
    (least, most), unit = form["range"][column], form.get("unit", {}).get(column)
    return f"a number that is not in the range {least:g} to {most:g}{'' if unit is None else f' {unit}'}"


def require_range(who: str, numbers: Mapping[str, Numbers], form: Mapping[str, Any]) -> None:
    """Raise one error for all columns with numbers that are not in their range."""
    bad = []
    for column, (least, most) in form.get("range", {}).items():
        if column in numbers:
            out = np.flatnonzero(~((numbers[column] >= least) & (numbers[column] <= most)))
            what = outside_range(form, column)
            bad += [f"column {column!r}, {len(out)} row(s): {what}"] if len(out) else []
    if bad:
        raise SchemaError(f"{who}, {'; '.join(bad)}")


def fitting(columns: Columns, form: Mapping[str, Any]) -> Columns:
    """The rows that can be used, or one error for all bad cells."""
    if columns.users_table:
        return columns  # errors about a table of one's own name the first cell, with its value
    if form.get("missing", ERROR) == DROP:
        columns = _complete(columns, form)
    require_good_cells(columns, form)
    return columns


def _complete(columns: Columns, form: Mapping[str, Any]) -> Columns:
    """The rows in which nothing is missing; a row without a split is one to train on."""
    needed = [columns[c] for c in columns_of(form) if c != form.get("split")]
    whole = [i for i in range(len(columns)) if not any(cells[i] in NOTHING for cells in needed)]
    if not whole:
        names = ", ".join(c for c in columns_of(form) if c != form.get("split"))
        raise SchemaError(f"{columns.who} has no row in which nothing is missing of {names}")
    return columns if len(whole) == len(columns) else columns.only(whole)


def require_good_cells(columns: Columns, form: Mapping[str, Any]) -> None:
    """Raise one error for all bad cells of the columns that are there."""
    if bad := bad_cells(columns, form):
        each = "; ".join(cells.words(columns) for cells in bad)
        remedies = "".join(f"; {text}" for text in dict.fromkeys(cells.remedy for cells in bad) if text)
        raise SchemaError(f"{columns.who}, {each}{remedies}")


def suppressed_levels(columns: Columns, form: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Of each column the levels that count as ``(other)`` here, and how many rows they have."""
    out = {}
    for column, known in form.get("levels", {}).items():
        if OTHER in known and column in columns.texts:
            out[column] = dict(Counter(text for text in columns[column] if text not in known))
    return {column: found for column, found in out.items() if found}


# --- how large numbers are -----------------------------------------------------------------------


def scale_of(values: Numbers) -> tuple[float, float]:
    """The median size of some numbers, and how far they lie from their median in the mean: a single cell out
    of all proportion shows in the second, as it would in a variance.

    >>> scale_of(np.array([-1.0, 2.0, 3.0]))
    (2.0, 1.3333333333333333)
    """
    if not len(values):
        return 0.0, 0.0
    return float(np.median(np.abs(values))), float(np.abs(values - np.median(values)).mean())


def require_alike(columns: Columns, form: Mapping[str, Any]) -> None:
    """Raise where a column of a table is out of all proportion."""
    compared = [column for column in form.get("medians", {}) if column in columns.texts]
    require_proportion(columns.who, {column: columns.numbers(column) for column in compared}, form)


def require_proportion(who: str, numbers: Mapping[str, Numbers], form: Mapping[str, Any]) -> None:
    """Raise where a column's size or spread is out of all proportion to what most sites have. The words are
    for the site alone: they hold what its values are like."""
    tolerance, medians = float(form.get("scale_tolerance", SCALE_TOLERANCE)), form.get("medians", {})
    each = ((c, v, medians[c]) for c, v in numbers.items() if c in medians)
    found = [words for one in each for words in _unlike(*one, tolerance)]
    if found:
        raise ScaleError(
            f"{who}, {'; '.join(found)}: more than {tolerance:g} times as much, or as little; look "
            "at the column's unit, and for cells that are out of all proportion"
        )


def _unlike(column: str, values: Numbers, powers: Sequence[float | None], tolerance: float) -> Iterator[str]:
    """In which way a column is not what it is at most sites."""
    each = zip(("median size", "spread"), scale_of(values), powers, strict=True)
    for what, value, power in each:
        if power is not None and value and abs(math.log2(value) - power) > math.log2(tolerance):
            yield f"column {column!r}: its {what} is {value:.3g}, in the middle of all sites {2.0**power:.2g}"
