"""Parquet with encoded images (PNG, WebP, JPEG) and labels in columns: the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpop.data.formats.decoded import Bytes, Decoded, Watch, unwatched
from fedpop.errors import DataError
from fedpop.extras import library
from fedpop.federation.pixels import image_bytes

IMAGE, LABEL = ("img", "image"), ("label", "fine_label")
"""The usual names of the columns."""


def read_parquet(path: Path, watch: Watch = unwatched, classes: Sequence[str] = ()) -> Decoded:
    """All images of one size, and their labels; ``classes`` are their names, where they are known."""
    arrow, parquet = (library(name, "data", "Parquet files") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
        pixels, label = (_column(schema.names, path, usual) for usual in (IMAGE, LABEL))
        kind = schema.field(pixels).type
        if getattr(kind, "get_field_index", lambda name: -1)("bytes") < 0:
            raise DataError(f"{path}: column {pixels!r} does not hold encoded images (a struct with 'bytes')")
        _require_names(_names(schema.metadata, label), classes, path)
        total, done = file.metadata.num_rows, 0
        images: list[Bytes] = []
        labels: list[Any] = []
        for batch in file.iter_batches(1000, columns=[pixels, label]):
            encoded = batch.column(pixels).field("bytes")
            images.append(_stacked([_decode(e.as_py(), path, done + i) for i, e in enumerate(encoded)], path))
            labels += batch.column(label).to_pylist()
            done += len(encoded)
            watch(f"decoding {path.name}", done, total)
    except DataError:
        raise
    except (OSError, ValueError, arrow.ArrowException) as error:
        detail = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{path} cannot be read as Parquet: {detail}") from error
    wrong = next((i for i, v in enumerate(labels) if not _is_class(v)), None)
    if wrong is not None:
        raise DataError(f"{path}, row {wrong}: label {labels[wrong]!r} is not the number of a class")
    if not images:
        raise DataError(f"{path}: there are no images in it")
    if len({block.shape[1:] for block in images}) > 1:
        raise DataError(f"{path}: images of different sizes")
    return Decoded(np.concatenate(images).transpose(0, 3, 1, 2), np.array(labels, np.int64))


def _is_class(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _decode(encoded: Any, path: Path, row: int) -> Bytes:
    where = f"{path}, row {row}: the image cannot be decoded"
    if not isinstance(encoded, bytes):
        raise DataError(f"{where}: there are no bytes of it in the file")
    return image_bytes(encoded, where)


def _stacked(images: list[Bytes], path: Path) -> Bytes:
    shapes = {a.shape for a in images}
    if len(shapes) > 1:
        raise DataError(f"{path}: images of different sizes, {' and '.join(map(str, sorted(shapes)))}")
    return np.stack(images)


def _column(names: list[str], path: Path, usual: tuple[str, ...]) -> str:
    for name in usual:
        if names.count(name) > 1:
            raise DataError(f"{path} has several columns {name!r}; give each a name of its own")
        if name in names:
            return name
    raise DataError(f"{path} has no column {' or '.join(map(repr, usual))}; it has {', '.join(names)}")


def _names(metadata: dict[bytes, bytes] | None, label: str) -> list[str]:
    """What the file calls its classes; nothing where it does not say so."""
    try:
        found = json.loads((metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
    except (LookupError, TypeError, ValueError, RecursionError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def _require_names(theirs: Sequence[str], ours: Sequence[str], path: Path) -> None:
    """Refuse labels that number other classes, or the same in another order.

    Spelling differs between copies ("T - shirt / top", "cra"), so a name that is nobody's is let pass.
    """
    if not theirs or not ours:
        return
    a, b = ([_plain(name) for name in names] for names in (theirs, ours))
    same = [x == y for x, y in zip(a, b, strict=False)]
    moved = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y and x in b), None)
    if moved is not None:
        raise DataError(f"{path}: class {moved} is called {theirs[moved]!r}, where {ours[moved]!r} belongs")
    if len(a) != len(b) or 2 * sum(same) < len(b):
        few = ", ".join(theirs[:3])
        raise DataError(f"{path}: its {len(a)} classes ({few}, ...) are not the {len(b)} of this set")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
