"""Parquet with encoded images (PNG, WebP, JPEG) and labels in columns: the Hugging Face layout."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from fedpop.data.formats.decoded import Bytes, Decoded, Watch, unwatched
from fedpop.errors import DataError
from fedpop.extras import library

IMAGE, LABEL = ("img", "image"), ("label", "fine_label")
"""The usual names of the columns."""
_ROWS = 1000
"""Rows decoded between two words on how far it is."""


def read_parquet(path: Path, watch: Watch = unwatched) -> Decoded:
    """All images of one size, and their labels."""
    parquet = library("pyarrow.parquet", "data", "Parquet files")
    image = library("PIL.Image", "data", "encoded images")
    try:
        file = parquet.ParquetFile(path)
        pixels, label = (_column(file.schema_arrow.names, path, usual) for usual in (IMAGE, LABEL))
        kind = file.schema_arrow.field(pixels).type
        if getattr(kind, "get_field_index", lambda name: -1)("bytes") < 0:
            raise DataError(f"{path}: column {pixels!r} does not hold encoded images (a struct with 'bytes')")
        total, done = file.metadata.num_rows, 0
        images: list[Bytes] = []
        labels: list[Any] = []
        for batch in file.iter_batches(_ROWS, columns=[pixels, label]):
            encoded = batch.column(pixels).field("bytes")
            images.append(_stacked([_decode(image, e, path, done + i) for i, e in enumerate(encoded)], path))
            labels += batch.column(label).to_pylist()
            done += len(encoded)
            watch(f"decoding {path.name}", done, total)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    wrong = next((i for i, v in enumerate(labels) if not isinstance(v, int)), None)
    if wrong is not None:
        raise DataError(f"{path}, row {wrong}: label {labels[wrong]!r} is not a whole number")
    if not images:
        raise DataError(f"{path}: there are no images in it")
    if len({block.shape[1:] for block in images}) > 1:
        raise DataError(f"{path}: images of different sizes")
    return Decoded(np.concatenate(images).transpose(0, 3, 1, 2), np.array(labels, np.int64))


def _decode(image: Any, encoded: Any, path: Path, row: int) -> Bytes:
    try:
        with image.open(io.BytesIO(encoded.as_py())) as one:
            array = np.asarray(one if one.mode in ("L", "RGB") else one.convert("RGB"))
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path}, row {row}: the image cannot be decoded ({error})") from error
    return array if array.ndim == 3 else array[..., None]


def _stacked(images: list[Bytes], path: Path) -> Bytes:
    shapes = {a.shape for a in images}
    if len(shapes) > 1:
        raise DataError(f"{path}: images of different sizes, {' and '.join(map(str, sorted(shapes)))}")
    return np.stack(images)


def _column(names: list[str], path: Path, usual: tuple[str, ...]) -> str:
    for name in usual:
        if name in names:
            return name
    raise DataError(f"{path} has no column {' or '.join(map(repr, usual))}; it has {', '.join(names)}")
