"""A site's data as a site has them: a table, a folder of images, or a function that returns them.

A table becomes examples by a *form*, which is plain values that all sites share:

    x, y        columns in, column out
    levels      of columns that hold names, in order; each but the first becomes a column of zeros and ones
    scale       of columns of numbers, [mean, sd] to be standardised by
    group       a column: each of its values is a unit of its own (else the site is one unit)
    split       a column: rows that say ``validation`` or ``test`` are held out
    classes     the names of y's values, where it has names
"""

from __future__ import annotations

import csv
import inspect
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError, SchemaError
from fedpop.extras import library
from fedpop.federation.clients import SPLITS, Client, Federation
from fedpop.files import csv_text

OTHER = "(other)"
"""The level of all names that were too rare to be told of."""
IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
Columns = Mapping[str, Sequence[str]]


def read_data(where: str, form: Mapping[str, Any], site: str) -> Federation:
    """The data of a site, whose units are its groups (or the site itself, where it has none)."""
    if ":" in where:
        return from_function(where, site)
    path = Path(where)
    if path.is_dir():
        return from_images(path, form, site)
    return from_table(read_table(path, form, site), form, site)


# --- tables ----------------------------------------------------------------------------------


def columns_of(form: Mapping[str, Any]) -> list[str]:
    """All columns that a form is about."""
    more = [form[name] for name in ("group", "split") if form.get(name)]
    return [*form.get("x", []), *([form["y"]] if "y" in form else []), *more]


def read_table(path: Path, form: Mapping[str, Any], site: str) -> Columns:
    """The form's columns of a CSV or Parquet file, as texts."""
    if not form.get("x") or not form.get("y"):
        raise SchemaError(f"site {site!r} has a table, but the federation names no columns x and y")
    return read_columns(path, columns_of(form), site)


def read_columns(path: Path, wanted: Sequence[str], site: str) -> Columns:
    """These columns of a CSV or Parquet file, as texts."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".txt", ".parquet", ".pq"):
        raise DataError(f"{path}: data are a .csv or .parquet file, a folder of images, or module:function")
    found = _csv(path, wanted, site) if kind in (".csv", ".txt") else _parquet(path, wanted, site)
    if not found[wanted[0]]:
        raise SchemaError(f"site {site!r} has no rows")
    return found


def _require_columns(there: Sequence[str], wanted: Sequence[str], site: str) -> None:
    for column in wanted:
        if column not in there:
            raise SchemaError(f"site {site!r} has no column {column!r}, which the federation needs")


def _csv(path: Path, wanted: Sequence[str], site: str) -> Columns:
    with csv_text(path) as file:
        reader = csv.DictReader(file)
        _require_columns(reader.fieldnames or [], wanted, site)
        rows = list(reader)
    return {column: [(row[column] or "").strip() for row in rows] for column in wanted}


def _parquet(path: Path, wanted: Sequence[str], site: str) -> Columns:
    parquet = library("pyarrow.parquet", "data", "Parquet files")
    try:
        _require_columns(parquet.read_schema(path).names, wanted, site)
        table = parquet.read_table(path, columns=list(dict.fromkeys(wanted)))
    except (OSError, ValueError) as error:
        if isinstance(error, SchemaError):
            raise
        raise DataError(f"cannot read {path}: {error}") from error
    return {c: ["" if v is None else str(v) for v in table[c].to_pylist()] for c in wanted}


def numbers(values: Sequence[str], column: str, site: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A column of numbers; the first that is none is named by its row, not by what it says."""
    out = np.empty(len(values))
    for i, value in enumerate(values):
        try:
            out[i] = float(value)
        except ValueError:
            out[i] = math.nan
        if not math.isfinite(out[i]):
            what = "nothing" if not value else "something that is no number"
            raise SchemaError(f"site {site!r}, column {column!r}, row {i + 1}: {what} is there")
    return out


def encoded(columns: Columns, form: Mapping[str, Any], site: str) -> Tensor:
    """x of every row, ``[n, inputs]``."""
    parts: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for column in form["x"]:
        levels = form.get("levels", {}).get(column)
        if levels is not None:
            codes = _codes(columns[column], levels, column, site)
            parts += [(codes == k).astype(np.float64) for k in range(1, len(levels))]
            continue
        mean, sd = form.get("scale", {}).get(column, (0.0, 1.0))
        parts.append((numbers(columns[column], column, site) - mean) / (sd or 1.0))
    return torch.from_numpy(np.stack(parts, axis=1)).to(torch.float32)


def width(form: Mapping[str, Any]) -> int:
    """How many inputs the columns of x become.

    >>> width({"x": ["age", "sex"], "levels": {"sex": ["f", "m", "x"]}})
    3
    """
    levels = form.get("levels", {})
    return sum(len(levels[c]) - 1 if c in levels else 1 for c in form["x"])


def _codes(values: Sequence[str], levels: Sequence[str], column: str, site: str) -> Any:
    place = {level: k for k, level in enumerate(levels)}
    other = place.get(OTHER)
    codes = [place.get(value, other) for value in values]
    unknown = codes.count(None)
    if unknown:
        raise SchemaError(
            f"site {site!r}, column {column!r}: {unknown} row(s), the first of them row "
            f"{codes.index(None) + 1}, hold levels that are not agreed on ({', '.join(levels)}); the "
            "federation may list more of them"
        )
    return np.array(codes)


def from_table(columns: Columns, form: Mapping[str, Any], site: str) -> Federation:
    """Rows as examples of the site's units."""
    x = encoded(columns, form, site)
    if form.get("classes"):
        y = torch.from_numpy(_codes(columns[form["y"]], form["classes"], form["y"], site))
    else:
        y = torch.from_numpy(numbers(columns[form["y"]], form["y"], site)).to(torch.float32)
    groups = columns[form["group"]] if form.get("group") else [""] * len(y)
    splits = [s or "train" for s in columns[form["split"]]] if form.get("split") else ["train"] * len(y)
    wrong = next((i for i, s in enumerate(splits) if s not in SPLITS), None)
    if wrong is not None:
        told = ", ".join(SPLITS)
        raise SchemaError(f"site {site!r}, column {form['split']!r}, row {wrong + 1}: it says one of {told}")
    rows: dict[str, dict[str, list[int]]] = {}
    for i, (group, split) in enumerate(zip(groups, splits, strict=True)):
        rows.setdefault(group, {}).setdefault(split, []).append(i)
    clients = {}
    for group, own in rows.items():
        held = {s: (x[own[s]], y[own[s]]) for s in ("validation", "test") if s in own}
        train = own.get("train", [])
        clients[f"{site}/{group}" if form.get("group") else site] = Client(x[train], y[train], **held)
    return Federation.of(clients)


# --- images ----------------------------------------------------------------------------------


def from_images(folder: Path, form: Mapping[str, Any], site: str) -> Federation:
    """``class/image.png``; the form has ``size`` (channels, height, width) and ``classes``."""
    image_files = library("PIL.Image", "data", "images")
    if not form.get("size") or not form.get("classes"):
        raise SchemaError(f"site {site!r} has images, but the federation tells no size and classes")
    channels, height, breadth = form["size"]
    place = {name: k for k, name in enumerate(form["classes"])}
    found, labels = [], []
    for sub in sorted(p for p in folder.iterdir() if p.is_dir()):
        if sub.name not in place:
            told = ", ".join(place)
            raise SchemaError(f"site {site!r}: a folder's name is not one of the classes ({told})")
        for file in sorted(p for p in sub.iterdir() if p.suffix.lower() in IMAGES):
            try:
                with image_files.open(file) as image:
                    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), dtype=np.float32)
            except OSError as error:
                raise DataError(f"site {site!r}: cannot read the image {file} ({error})") from error
            if pixels.shape[:2] != (height, breadth):
                raise SchemaError(f"site {site!r}: an image is not {height} x {breadth} pixels large")
            found.append(pixels.reshape(height, breadth, channels).transpose(2, 0, 1) / 255)
            labels.append(place[sub.name])
    if not found:
        raise SchemaError(f"site {site!r} has no images")
    return Federation.of({site: (torch.from_numpy(np.stack(found)), torch.tensor(labels))})


# --- anything else ---------------------------------------------------------------------------


def from_function(entry: str, site: str) -> Federation:
    """What ``module:function`` returns: (x, y) or a ``Client`` for one unit, a mapping of them for groups.

    A function with an argument is given the site's name.
    """
    module, _, name = entry.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"site {site!r}: cannot find the data's function {entry!r} ({error})") from error
    found = function(site) if inspect.signature(function).parameters else function()
    if isinstance(found, Mapping):
        return Federation.of({f"{site}/{group}": own for group, own in found.items()})
    if not isinstance(found, Client | tuple | list):
        raise DataError(
            f"site {site!r}: {entry} returned {type(found).__name__}; it must return (x, y), a fedpop.Client "
            "or a mapping from groups to them"
        )
    return Federation.of({site: found})
