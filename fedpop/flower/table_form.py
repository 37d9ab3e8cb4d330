"""What a site's table looked like when the site was enrolled: its columns, and what they held.

Data are written anew now and then, by people and programs who do not know what reads them. A table that has
another form later is told, by the names of its columns, in the site's log and by ``fedpop site check``; it
says nothing of values, and leaves the site in no message.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fedpop.errors import FedpopError
from fedpop.extras import library
from fedpop.federation.table_format import NOTHING, TableFormat, number_in
from fedpop.files import read_json, write_bytes

FORM = "table.json"
ROWS_LOOKED_AT = 1000
"""Rows of a table by which its form is known; who works on the data reads all of them."""
NUMBERS, NAMES, EMPTY = "numbers", "names", "nothing"
"""What a column holds."""


def first_rows(path: Path, table: TableFormat) -> list[list[str]]:
    """The header of a CSV file and what follows; nothing where it cannot be read as one."""
    try:
        with path.open(newline="", encoding=table.text_encoding) as file:
            return list(islice(csv.reader(file, delimiter=table.separator), ROWS_LOOKED_AT + 1))
    except (OSError, ValueError, csv.Error):
        return []


def keep_form(folder: Path, where: str, table: TableFormat) -> None:
    """Store the form, unless it is stored: of other data, or of data that are said to be written in another
    way, it is stored anew."""
    now = _form_of(where, table)
    if now is not None and _about(now) != _about(_stored(folder)):
        write_bytes(folder / FORM, json.dumps(now, indent=1).encode(), 0o600)


def form_changes(folder: Path, where: str, table: TableFormat) -> list[str]:
    """In which way a table's form is another one than that which is stored, column by column."""
    now, then = _form_of(where, table), _stored(folder)
    if now is None or _about(now) != _about(then):
        return []
    here, there = now["columns"], then["columns"]
    gone, new = [c for c in there if c not in here], [c for c in here if c not in there]
    out = [f"column {c!r} was there when this site was enrolled, and is not now" for c in gone]
    out += [f"column {c!r} was not there when this site was enrolled" for c in new]
    for column, kind in here.items():
        before = there.get(column, kind)
        if kind != before and EMPTY not in (kind, before):
            out.append(f"column {column!r} held {before} when this site was enrolled, and holds {kind} now")
    end = f" (it is meant? Remove {folder / FORM}, and join again)"
    return [f"{words}{end}" for words in out]


def columns_there(where: str, table: TableFormat) -> list[str]:
    """What a table's columns are called; nothing of what is no table, or cannot be read."""
    now = _form_of(where, table)
    return [] if now is None else list(now["columns"])


def _stored(folder: Path) -> Mapping[str, Any]:
    """What is stored; nothing where it is not, or is damaged."""
    try:
        found = read_json(folder / FORM)
    except FedpopError:
        return {}
    whole = isinstance(found, dict) and isinstance(found.get("columns"), dict)
    return found if whole else {}


def _about(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of which data it is, and how these are written."""
    return {name: value for name, value in form.items() if name != "columns"}


def _form_of(where: str, table: TableFormat) -> dict[str, Any] | None:
    """What a table looks like; None of what is no table, or cannot be read."""
    path = Path(where)
    kind = path.suffix.lower()
    if ":" in where or not path.is_file():
        return None
    columns = _parquet(path) if kind in (".parquet", ".pq") else _csv(path, table)
    written = {"separator": table.separator, "decimal": table.decimal, "encoding": table.encoding}
    return {"data": where, **written, "columns": columns} if len(columns) > 1 else None


def _csv(path: Path, table: TableFormat) -> dict[str, str]:
    head, *rows = first_rows(path, table) or [[]]
    return {name: _kind([row[i] for row in rows if len(row) > i], table) for i, name in enumerate(head)}


def _kind(cells: Sequence[str], table: TableFormat) -> str:
    there = [text for text in map(str.strip, cells) if text not in NOTHING]
    if not there:
        return EMPTY
    return NAMES if any(math.isnan(number_in(text, table.decimal)) for text in there) else NUMBERS


def _parquet(path: Path) -> dict[str, str]:
    arrow, parquet = (library(name, "data", "Parquet files") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        schema = parquet.read_schema(path)
    except (OSError, ValueError, arrow.ArrowException):
        return {}
    types = arrow.types
    return {
        field.name: EMPTY
        if types.is_null(field.type)
        else NUMBERS
        if types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
        else NAMES
        for field in schema
    }
