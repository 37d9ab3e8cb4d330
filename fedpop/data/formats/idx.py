"""IDX, the format of MNIST and its relatives: a header of sizes, then bytes; gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from fedpop.data.formats.decoded import Bytes, Decoded
from fedpop.errors import DataError

_UINT8 = 0x08
MOST_DIMS = 3


def read_idx(path: Path) -> Bytes:
    """An IDX file of unsigned bytes."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _UINT8:
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    dims = raw[3]
    if not 1 <= dims <= MOST_DIMS:
        raise DataError(f"{path} has {dims} dimensions, where images have 3 and labels 1")
    if len(raw) < 4 + 4 * dims:
        raise DataError(f"{path} is cut short: no room for the sizes of {dims} dimensions")
    shape = struct.unpack(f">{dims}I", raw[4 : 4 + 4 * dims])
    expected = 4 + 4 * dims + math.prod(shape)
    if len(raw) != expected:
        raise DataError(f"{path} has {len(raw)} bytes where its header {shape} asks for {expected}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def read_idx_pair(images: Path, labels: Path) -> Decoded:
    """Grey images and their labels."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1:
        raise DataError(
            f"{images} holds {x.ndim}-dimensional and {labels} {y.ndim}-dimensional data; "
            "expected images (3) and labels (1)"
        )
    return Decoded(x[:, None], y.astype(np.int64))
