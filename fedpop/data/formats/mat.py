"""MATLAB's level 5 files, as far as SVHN needs them: plain arrays of numbers, compressed or not."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpop.data.formats.decoded import Decoded
from fedpop.errors import DataError

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_KINDS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMERIC = range(6, 16)
"""Classes of arrays that are dense tables of numbers."""
_COMPLEX = 0x08

Array = npt.NDArray[Any]


def read_svhn(path: Path) -> Decoded:
    """X ``[height, width, channels, n]`` and y, in which MATLAB's tenth class is the digit 0."""
    arrays = read_mat(path)
    for name, dims in (("X", 4), ("y", 2)):
        if name not in arrays or arrays[name].ndim != dims:
            found = ", ".join(f"{n} {a.shape}" for n, a in arrays.items()) or "nothing"
            raise DataError(f"{path} has no array {name} of {dims} dimensions; it has {found}")
    x, digits = arrays["X"], arrays["y"].reshape(-1)
    wrong = np.flatnonzero(~((digits >= 0) & (digits <= 10) & (digits == np.floor(digits))))
    if len(wrong):
        raise DataError(f"{path}, row {wrong[0]}: label {digits[wrong[0]]:g} is none of the digits 1 to 10")
    y = digits.astype(np.int64)
    if x.dtype != np.uint8:
        raise DataError(f"{path}: X holds {x.dtype}, not bytes")
    return Decoded(x.transpose(3, 2, 0, 1), np.where(y == 10, 0, y))


def read_mat(path: Path) -> dict[str, Array]:
    """The arrays of numbers in a file, by name."""
    raw = memoryview(path.read_bytes())
    if len(raw) < _HEADER or bytes(raw[126:128]) not in (b"IM", b"MI"):
        raise DataError(f"{path} is not a MATLAB file of level 5")
    order = "<" if bytes(raw[126:128]) == b"IM" else ">"
    found: dict[str, Array] = {}
    try:
        for kind, content in _elements(raw[_HEADER:], order):
            if kind == _COMPRESSED:
                inner = memoryview(zlib.decompress(content))
                kind, content = next(_elements(inner, order))
            if kind == _MATRIX:
                found.update(_matrix(content, order))
    except (struct.error, zlib.error, ValueError, KeyError, StopIteration) as error:
        raise DataError(f"{path} is damaged or cut short ({error})") from error
    return found


def _elements(raw: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and content of one element after the other; small ones are packed into eight bytes."""
    at = 0
    while at < len(raw):
        kind, size = struct.unpack_from(f"{order}II", raw, at)
        if kind >> 16:
            kind, size, start, step = kind & 0xFFFF, kind >> 16, at + 4, 8
        else:
            # Compressed elements are not padded, all others to a multiple of eight bytes.
            start, step = at + 8, 8 + size + (0 if kind == _COMPRESSED else -size % 8)
        if start + size > len(raw):
            raise ValueError(f"an element of {size} bytes, of which {len(raw) - start} are there")
        yield kind, raw[start : start + size]
        at += step


def _matrix(raw: memoryview, order: str) -> dict[str, Array]:
    parts = _elements(raw, order)
    _, flags = next(parts)
    (word,) = struct.unpack_from(f"{order}I", flags)
    if word & 0xFF not in _NUMERIC or (word >> 8) & _COMPLEX:
        return {}
    (_, dims), (_, name), (kind, content) = next(parts), next(parts), next(parts)
    shape = np.frombuffer(dims, f"{order}i4")
    values = np.frombuffer(content, f"{order}{_KINDS[kind]}")
    if len(values) != math.prod(shape.tolist()):
        raise ValueError(f"{len(values)} numbers for an array of {tuple(shape.tolist())}")
    return {bytes(name).decode("ascii", "replace"): values.reshape(shape, order="F")}
