"""No compression."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import PayloadError
from fedpop.keys import Key
from fedpop.message.compressors.base import Compressor, one_row, opened, parameters, refuse, sealed

_FORM = struct.Struct("<B")
FLOATS = {4: ("<f4", torch.float32), 8: ("<f8", torch.float64)}
"""Bytes of an entry to its type in a payload and in memory."""


@dataclass(frozen=True)
class Identity(Compressor):
    """Vectors as they are, in a frame like all others.

    >>> Identity().decode(Identity().encode(torch.tensor([1.5, -2.0]), Key(0)))
    tensor([ 1.5000, -2.0000])
    """

    name: ClassVar[str] = "identity"
    kind: ClassVar[int] = 0

    @property
    def identity(self) -> bool:
        return True

    def omega(self, d: int) -> float:
        return 0.0

    def encoded_bytes(self, d: int) -> int:
        return len(sealed(self.kind, d)) + _FORM.size + 4 * d

    def sent_bytes(self, sent: Tensor) -> int:
        rows, d = sent.shape
        wide = 4 * d if sent.dtype == torch.float64 else 0
        return rows * (self.encoded_bytes(d) + wide)

    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        return v

    def encode(self, v: Tensor, key: Key, client: int = 0) -> bytes:
        v = own_type(one_row(v))
        refuse(self, torch.isfinite(v))
        return sealed(self.kind, v.shape[1], _FORM.pack(v.element_size()), raw(v))

    def decode(self, payload: bytes, length: int | None = None) -> Tensor:
        count, inside = opened(self, payload, length)
        item = inside[0] if len(inside) else 0
        if item not in FLOATS:
            raise PayloadError(f"entries of {item} bytes where 4 or 8 were expected")
        parameters(_FORM, inside, item * count)
        return floats(inside[_FORM.size :], item)


def own_type(v: Tensor) -> Tensor:
    """float64 stays, everything else travels as float32."""
    return v if v.dtype == torch.float64 else v.to(torch.float32)


def raw(v: Tensor) -> bytes:
    """Entries as little-endian bytes."""
    return v.cpu().contiguous().numpy().astype(FLOATS[v.element_size()][0], copy=False).tobytes()


def floats(data: memoryview, item: int) -> Tensor:
    """The inverse of ``raw``, refusing what is not finite."""
    v = torch.from_numpy(np.frombuffer(data, dtype=FLOATS[item][0]).astype(f"f{item}"))
    if not bool(torch.isfinite(v.sum(dtype=torch.float64))) and not bool(torch.isfinite(v).all()):
        raise PayloadError("the payload holds an entry that is NaN or infinite")
    return v
