"""Codes of a few bits each, packed: whole bytes first, one plane after the other, then the bits left over.

Plane b holds byte (or bit) b of every code, so that packing is a handful of passes over memory whatever the
width: a byte plane is a copy, a bit plane one ``packbits``. Each bit plane is filled up to a whole byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.integer[Any]]


def packed_bytes(count: int, width: int) -> int:
    """The size of ``count`` codes of ``width`` bits.

    >>> packed_bytes(1000, 8), packed_bytes(1000, 3), packed_bytes(9, 9)
    (1000, 375, 11)
    """
    whole, rest = divmod(width, 8)
    return whole * count + rest * ((count + 7) // 8)


def pack(codes: Codes, width: int) -> list[bytes]:
    """The planes of the lowest ``width`` bits (at most 16) of whole numbers, negative ones included.

    >>> b"".join(pack(np.array([1, 2, 3, -1], dtype=np.int8), 2)).hex()
    'b070'
    """
    whole, rest = divmod(width, 8)
    planes = [_byte(codes, b).tobytes() for b in range(whole)]
    if rest:
        top = _byte(codes, whole)
        planes += [np.packbits(top & np.uint8(1 << b)).tobytes() for b in range(rest)]
    return planes


def unpack(data: memoryview, count: int, width: int) -> Codes:
    """The codes again, as uint8 up to eight bits and as uint16 beyond.

    >>> unpack(memoryview(bytes.fromhex("b070")), 4, 2)
    array([1, 2, 3, 3], dtype=uint8)
    """
    whole, rest = divmod(width, 8)
    raw = np.frombuffer(data, dtype=np.uint8)
    planes = [raw[b * count : (b + 1) * count] for b in range(whole)]
    left = raw[whole * count :].reshape(rest, (count + 7) // 8)
    planes += [np.unpackbits(plane, count=count) for plane in left]
    codes: npt.NDArray[Any] = np.zeros(count, dtype=np.uint8 if width <= 8 else np.uint16)
    for b, plane in enumerate(planes):
        shift = 8 * min(b, whole) + max(b - whole, 0)
        wide = plane.astype(codes.dtype, copy=b < whole)
        np.bitwise_or(codes, np.left_shift(wide, codes.dtype.type(shift), out=wide), out=codes)
    return codes


def _byte(codes: Codes, b: int) -> npt.NDArray[np.uint8]:
    if codes.itemsize == 1:
        return codes.view(np.uint8)
    return (codes >> codes.dtype.type(8 * b)).astype(np.uint8)
