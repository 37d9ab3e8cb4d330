"""A site's data as a site has them: a table, a folder of images, or a function that returns them.

A table becomes examples by a *form*, which is plain values that all sites share:

    x, y        columns in, column out
    levels      of columns that hold names, in order; each but the first becomes a column of zeros and ones
    scale       of columns of numbers, [mean, sd] to be standardised by
    group       a column: each of its values is a unit of its own (else the site is one unit)
    split       a column: rows that say ``validation`` or ``test`` are held out
    classes     the names of y's values, where it has names
    unit        of columns of numbers, what they are counted in: a site says that its table has that

and what ``federation.cells`` has of ranges, missing values and proportions.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.entries import called, entry_named
from fedpop.errors import DataError, SchemaError, SettingsError
from fedpop.extras import library
from fedpop.federation.cells import (
    OTHER,
    Columns,
    Numbers,
    columns_of,
    fitting,
    require_alike,
    suppressed_levels,
)
from fedpop.federation.clients import SPLITS, Client, Federation
from fedpop.federation.pixels import Bytes, image_bytes
from fedpop.federation.table_format import SEPARATORS, USUAL_TABLE, TableFormat, other_separator
from fedpop.files import SAVE_AS, csv_text
from fedpop.kinds import did_you_mean

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
TABLES = (".csv", ".txt", ".parquet", ".pq")
ENCODING = 'save the file as UTF-8, or set encoding in site.toml ("cp1252", or "utf-16", say)'


ANY_BYTES = TableFormat(encoding="latin-1")
"""Nothing but whether there are rows is wanted of the text."""


def read_data(
    where: str,
    form: Mapping[str, Any],
    site: str,
    folder: Path | None = None,
    table: TableFormat = USUAL_TABLE,
) -> Federation:
    """The data of a site, whose units are its groups (or the site itself, where it has none); modules in
    ``folder`` come first."""
    if ":" in where:
        return from_function(where, site, folder)
    path = Path(where)
    if path.is_dir():
        return from_images(path, form, site)
    return from_table(read_table(path, form, site, table), form, site)


def require_some(where: str, site: str, folder: Path | None = None, table: TableFormat = ANY_BYTES) -> None:
    """Refuse what cannot be a site's data, whatever the form: nothing there, another kind of file, no rows,
    no images, a function that is not found."""
    if ":" in where:
        try:
            entry_named(where, folder)
        except SettingsError as error:
            raise DataError(f"site {site!r}: the data's function: {error}") from error
    elif not Path(where).exists():
        raise DataError(f"site {site!r}: there are no data at {where}")
    elif not Path(where).is_dir():
        read_columns(Path(where), [], site, table)
    elif not any(image_files(sub) for sub in Path(where).iterdir() if sub.is_dir()):
        raise SchemaError(
            f"site {site!r} has no images in folders of {where} that are called by their classes"
        )


# --- tables ----------------------------------------------------------------------------------


def read_table(path: Path, form: Mapping[str, Any], site: str, table: TableFormat = USUAL_TABLE) -> Columns:
    """The form's columns of a site's CSV or Parquet file, as texts: rows that can be used, or an error."""
    if not form.get("x") or not form.get("y"):
        raise SchemaError(f"site {site!r} has a table, but the federation names no columns x and y")
    if ":" in str(path):
        raise SchemaError(
            f"site {site!r} has a function for its data, but the federation agrees on columns of tables; "
            "with functions [data] names no columns, and each returns examples that are ready"
        )
    require_units(form, table, f"site {site!r}")
    columns = fitting(read_columns(path, columns_of(form), site, table), form)
    require_alike(columns, form)
    return columns


def table_notes(columns: Columns, form: Mapping[str, Any]) -> list[str]:
    """What a site should know of how its rows were used; the words are for the site alone."""
    notes = []
    if columns.dropped:
        notes.append(f"{columns.dropped} row(s) are left out because something is missing in them")
    for column, found in suppressed_levels(columns, form).items():
        each = ", ".join(f"{level!r} ({count})" for level, count in sorted(found.items()))
        notes.append(f"column {column!r}: too rare to be levels of their own, these count as {OTHER}: {each}")
    return notes


def require_units(form: Mapping[str, Any], table: TableFormat, who: str) -> None:
    """Raise unless a site says that its columns are in the federation's units."""
    for column, unit in form.get("unit", {}).items() if table.unit is not None else ():
        given = table.unit.get(column) if table.unit is not None else None
        if given is None:
            raise SchemaError(
                f"{who}: column {column!r} is wanted in {unit}, and site.toml does not say what the table "
                f"has: write unit = {{{json.dumps(column)} = {json.dumps(unit)}}} once it is so"
            )
        if given != unit:
            raise SchemaError(
                f"{who}: column {column!r} is wanted in {unit}, and in another unit in the site's table, as "
                "its site.toml says: convert the column"
            )


def read_columns(
    path: Path, wanted: Sequence[str], site: str | None = None, table: TableFormat = USUAL_TABLE
) -> Columns:
    """These columns of a CSV or Parquet file, as texts: of a site's, or of a user's file."""
    kind = path.suffix.lower()
    if kind not in TABLES:
        more = "" if site is None else ", a folder of images, or module:function"
        raise DataError(f"{path}: data are a .csv or .parquet file{more}")
    who = str(path) if site is None else f"site {site!r}"
    users_table = site is None
    texts, rows = (
        _csv(path, wanted, who, users_table, table)
        if kind in (".csv", ".txt")
        else _parquet(path, wanted, who, users_table)
    )
    if not rows:
        raise _error(users_table, f"{who} has no rows")
    return Columns(texts, who, rows, users_table, table.decimal)


def _error(users_table: bool, words: str) -> DataError:
    return DataError(words) if users_table else SchemaError(words)


def _require_columns(there: Sequence[str], wanted: Sequence[str], who: str, users_table: bool) -> None:
    for column in wanted:
        if column not in there:
            present = f"; it has {', '.join(there) or 'nothing'}{did_you_mean(column, there)}"
            more = present if users_table else ", which the federation needs"
            raise _error(users_table, f"{who} has no column {column!r}{more}")
        if list(there).count(column) > 1:
            raise _error(users_table, f"{who} has several columns {column!r}; give each a name of its own")


def require_separator(
    there: Sequence[str], wanted: Sequence[str], separator: str, who: str, users_table: bool
) -> None:
    """Raise where another separator explains why columns are not there."""
    if set(wanted) <= set(there):
        return
    line = separator.join(there)
    for other in SEPARATORS:
        names = [name.strip().strip('"') for name in line.split(other)]
        if other != separator and len(names) > 1 and set(wanted) <= set(names):
            remedy = (
                "save it with commas" if users_table else f"set separator = {json.dumps(other)} in site.toml"
            )
            raise _error(
                users_table, f"{who}: values are separated by {other!r}, not by {separator!r}: {remedy}"
            )


Texts = tuple[dict[str, list[str]], list[str]]
"""Columns, and what their rows are called."""


def _csv(path: Path, wanted: Sequence[str], who: str, users_table: bool, table: TableFormat) -> Texts:
    texts: dict[str, list[str]] = {column: [] for column in wanted}
    rows = []
    with csv_text(path, table.text_encoding, SAVE_AS if users_table else ENCODING) as file:
        reader = csv.DictReader(file, delimiter=table.separator)
        names = reader.fieldnames or []
        require_separator(names, wanted, table.separator, who, users_table)
        _require_columns(names, wanted, who, users_table)
        for row in reader:
            rows.append(f"line {reader.line_num}")
            if None in row and (wanted or not _separated_otherwise(names, row, table.separator)):
                comma = " (a decimal comma in it, perhaps)" if table.separator == "," else ""
                raise _error(
                    users_table, f"{who}, {rows[-1]}: more values than the {len(names)} columns{comma}"
                )
            for column, cells in texts.items():
                cells.append((row[column] or "").strip())
    return texts, rows


def _separated_otherwise(names: Sequence[str], row: Mapping[Any, Any], separator: str) -> bool:
    """Whether there are more values because another separator was meant, which site.toml may yet say."""
    values = [row[name] or "" for name in names] + row[None]
    return other_separator(names, values, separator) is not None


def _parquet(path: Path, wanted: Sequence[str], who: str, users_table: bool) -> Texts:
    arrow, parquet = (library(name, "data", "Parquet files") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        _require_columns(parquet.read_schema(path).names, wanted, who, users_table)
        table = parquet.read_table(path, columns=list(dict.fromkeys(wanted)))
    except (OSError, ValueError, arrow.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    texts = {c: ["" if v is None else str(v) for v in table[c].to_pylist()] for c in wanted}
    return texts, [f"row {i + 1}" for i in range(table.num_rows)]


def encoded(columns: Columns, form: Mapping[str, Any]) -> Tensor:
    """x of every row, ``[n, inputs]``."""
    parts: list[Numbers] = []
    for column in form["x"]:
        levels = form.get("levels", {}).get(column)
        if levels is not None:
            codes = columns.codes(column, levels)
            parts += [(codes == k).astype(np.float64) for k in range(1, len(levels))]
            continue
        mean, sd = form.get("scale", {}).get(column, (0.0, 1.0))
        parts.append((columns.numbers(column) - mean) / (sd or 1.0))
    x = (
        np.stack(parts, axis=1) if parts else np.empty((len(columns), 0))
    )  # a name with one level says nothing
    return torch.from_numpy(x).to(torch.float32)


def width(form: Mapping[str, Any]) -> int:
    """How many inputs the columns of x become.

    >>> width({"x": ["age", "sex"], "levels": {"sex": ["f", "m", "x"]}})
    3
    """
    levels = form.get("levels", {})
    return sum(len(levels[c]) - 1 if c in levels else 1 for c in form["x"])


def input_names(form: Mapping[str, Any]) -> list[str]:
    """What the inputs of x mean: a column, with what it was divided by; a level.

    >>> input_names({"x": ["age", "sex"], "levels": {"sex": ["f", "m"]}, "scale": {"age": [58.0, 12.25]}})
    ['age (per 12.2)', 'sex = m']
    """
    names: list[str] = []
    for column in form["x"]:
        if (levels := form.get("levels", {}).get(column)) is not None:
            names += [f"{column} = {level}" for level in levels[1:]]
        else:
            sd = form.get("scale", {}).get(column, (0.0, 0.0))[1]
            names.append(f"{column} (per {sd:.3g})" if sd else column)
    return names


def from_table(columns: Columns, form: Mapping[str, Any], site: str = "") -> Federation:
    """Rows as examples of the site's units; without a site units are called by their groups alone."""
    x = encoded(columns, form)
    if form.get("classes"):
        y = torch.from_numpy(columns.codes(form["y"], form["classes"]))
    else:
        y = torch.from_numpy(columns.numbers(form["y"])).to(torch.float32)
    groups = columns[form["group"]] if form.get("group") else [""] * len(y)
    splits = [s or "train" for s in columns[form["split"]]] if form.get("split") else ["train"] * len(y)
    wrong = next((i for i, s in enumerate(splits) if s not in SPLITS), None)
    if wrong is not None:
        allowed = f"one of {', '.join(SPLITS)}"
        raise columns.wrong(form["split"], wrong, f"it says {allowed}", f"not {allowed}")
    rows: dict[str, dict[str, list[int]]] = {}
    for i, (group, split) in enumerate(zip(groups, splits, strict=True)):
        rows.setdefault(group, {}).setdefault(split, []).append(i)
    clients = {}
    for group, own in rows.items():
        others = {s: (x[own[s]], y[own[s]]) for s in ("validation", "test") if s in own}
        train = own.get("train", [])
        name = (f"{site}/{group}" if site else group) if form.get("group") else site
        clients[name] = Client(x[train], y[train], **others)
    return Federation.of(clients)


# --- images ----------------------------------------------------------------------------------


def image_files(folder: Path) -> list[Path]:
    """Images that lie in a folder, in the order of their names."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGES and not p.name.startswith("."))


def read_image(file: Path, channels: int, size: tuple[int, int] | None = None) -> Bytes:
    """An image as bytes, channels first; scaled to ``size`` (height, width) where one is given."""
    return image_bytes(file, f"cannot read the image {file}", channels, size).transpose(2, 0, 1)


def from_images(folder: Path, form: Mapping[str, Any], site: str) -> Federation:
    """``class/image.png``; the form has ``size`` (channels, height, width) and ``classes``."""
    if not form.get("size") or not form.get("classes"):
        raise SchemaError(f"site {site!r} has images, but the federation gives no size and classes")
    channels, height, breadth = form["size"]
    place = {name: k for k, name in enumerate(form["classes"])}
    found, labels = [], []
    for sub in sorted(p for p in folder.iterdir() if p.is_dir()):
        if sub.name not in place:
            classes = ", ".join(place)
            raise SchemaError(f"site {site!r}: a folder's name is not one of the classes ({classes})")
        for file in image_files(sub):
            try:
                pixels = read_image(file, channels)
            except DataError as error:
                raise DataError(f"site {site!r}: {error}") from error
            if pixels.shape[1:] != (height, breadth):
                raise SchemaError(f"site {site!r}: an image is not {height} x {breadth} pixels large")
            found.append(pixels.astype(np.float32) / 255)
            labels.append(place[sub.name])
    if not found:
        raise SchemaError(f"site {site!r} has no images")
    return Federation.of({site: (torch.from_numpy(np.stack(found)), torch.tensor(labels))})


# --- anything else ---------------------------------------------------------------------------


def from_function(entry: str, site: str, folder: Path | None = None) -> Federation:
    """What ``module:function`` returns: (x, y) or a ``Client`` for one unit, a mapping of them for groups.

    A function with an argument is given the site's name.
    """
    try:
        found = called(entry, entry_named(entry, folder), site)
    except SettingsError as error:
        raise DataError(f"site {site!r}: the data's function: {error}") from error
    if isinstance(found, Mapping):
        return Federation.of({f"{site}/{group}": own for group, own in found.items()})
    if not isinstance(found, Client | tuple | list):
        raise DataError(
            f"site {site!r}: {entry} returned {type(found).__name__}; it must return (x, y), a fedpop.Client "
            "or a mapping from groups to them"
        )
    return Federation.of({site: found})
