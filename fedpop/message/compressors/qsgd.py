"""QSGD (Alistarh et al., NeurIPS 2017): each entry to one of s levels of the norm, up or down at random.

With u = norm(v) / s, the entry v_j becomes q_j u, q_j one of the two whole numbers next to v_j / u, the upper
one with probability v_j / u - floor(v_j / u). Then E[q_j u] = v_j, and norm(C(v) - v)^2 is at most
min(d / s^2, sqrt(d) / s) norm(v)^2 in expectation. A payload is u and the q_j, which take a sign and
ceil(log2(s + 1)) bits each.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpop.checked import Range
from fedpop.errors import PayloadError
from fedpop.keys import Key
from fedpop.message.compressors.base import Compressor, blocks, one_row, opened, parameters, refuse, sealed
from fedpop.message.compressors.bits import pack, packed_bytes, unpack

MOST_LEVELS = 2**15 - 1
_FORM = struct.Struct("<Hf")


@dataclass(frozen=True)
class QSGD(Compressor):
    """Entries rounded at random to whole multiples of a fraction of the vector's norm.

    Args:
        levels: How many multiples there are, s; 127 (the default) take eight bits per entry, fewer take fewer
            bits and add more noise.

    Norms are float64. u is rounded *up* to float32, so that no entry has more than s levels, and the choice
    between two levels is made on v / u in fixed point: E[C(v)_j] is v_j up to its rounding to float32 and
    2^-16 of a level (2^-24 for s < 128). Below 2^-126 the rounding of u is coarse: unbiasedness holds
    to one ulp there, and the variance may be up to twice its bound.

    >>> QSGD(levels=4).omega(64)
    2.0
    >>> QSGD(levels=3).decode(QSGD(levels=3).encode(torch.tensor([-3.0, 0.0]), Key(0)))
    tensor([-3., 0.])
    """

    levels: Annotated[int, Range(least=1, most=MOST_LEVELS)] = 127
    name: ClassVar[str] = "qsgd"
    kind: ClassVar[int] = 1

    @property
    def width(self) -> int:
        """Bits per entry."""
        return 1 + self.levels.bit_length()

    def omega(self, d: int) -> float:
        return min(d / self.levels**2, math.sqrt(d) / self.levels)

    def longest(self, d: int) -> float:
        return 1 + math.sqrt(d) / self.levels

    def encoded_bytes(self, d: int) -> int:
        return len(sealed(self.kind, d)) + _FORM.size + packed_bytes(d, self.width)

    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        entries = v.detach().to(torch.float32)
        unit, sendable = self._units(entries)
        sent = torch.empty_like(entries, memory_format=torch.contiguous_format)
        for rows, columns, q in self._levels(entries, unit, key, ids):
            torch.mul(q, unit[rows], out=sent[rows, columns])
        sent[~sendable] = torch.nan
        return sent.to(v.dtype)

    def encode(self, v: Tensor, key: Key, client: int = 0) -> bytes:
        entries = one_row(v).to(torch.float32)
        unit, sendable = self._units(entries)
        refuse(self, sendable)
        d = entries.shape[1]
        codes = torch.empty(d, dtype=torch.int8 if self.width <= 8 else torch.int16, device=v.device)
        for _, columns, q in self._levels(entries, unit, key, torch.tensor([client], device=v.device)):
            codes[columns] = q[0]
        planes = pack(codes.cpu().numpy(), self.width)
        return sealed(self.kind, d, _FORM.pack(self.levels, float(unit)), *planes)

    def decode(self, payload: bytes, length: int | None = None) -> Tensor:
        count, inside = opened(self, payload, length)
        levels, unit = parameters(_FORM, inside, packed_bytes(count, self.width))
        if levels != self.levels:
            raise PayloadError(f"the payload has {levels} levels where {self.levels} were expected")
        codes = unpack(inside[_FORM.size :], count, self.width)
        kind = np.int8 if self.width <= 8 else np.int16
        signed: npt.NDArray[np.signedinteger[Any]] = codes.view(kind)
        spare = 8 * codes.itemsize - self.width  # the sign bit moves up and fills what is above it
        if spare:
            signed = (signed << spare) >> spare
        if count and (int(signed.max()) > self.levels or int(signed.min()) < -self.levels):
            raise PayloadError(f"the payload holds a level beyond {self.levels}")
        if not (unit >= 0 and math.isfinite(unit * self.levels)):
            raise PayloadError(f"the payload's unit is {unit}")
        return torch.from_numpy(signed).to(torch.float32) * torch.tensor(unit, dtype=torch.float32)

    def _units(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """u ``[C, 1]``, and which rows decode within float32 whichever levels are drawn."""
        square = v.new_zeros((v.shape[0], 1), dtype=torch.float64)
        peak = v.new_zeros((v.shape[0], 1))
        for rows, columns in blocks(v):
            part = v[rows, columns]
            square[rows] += torch.linalg.vector_norm(part, dim=1, keepdim=True, dtype=torch.float64).square()
            peak[rows] = torch.maximum(peak[rows], part.abs().amax(1, keepdim=True))
        exact = square.sqrt() / self.levels
        unit = exact.to(torch.float32)
        unit = torch.where(unit < exact, torch.nextafter(unit, torch.full_like(unit, torch.inf)), unit)
        largest = torch.where(unit > 0, torch.ceil(peak / unit) * unit, peak)
        return unit, torch.isfinite(largest).squeeze(1)

    def _levels(
        self, v: Tensor, unit: Tensor, key: Key, ids: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """q block by block, int32."""
        words = key.words(ids)
        fraction = min(24, 31 - self.levels.bit_length())
        divisor = torch.where(unit > 0, unit, torch.ones_like(unit))
        for rows, columns in blocks(v):
            level = torch.div(v[rows, columns], divisor[rows]).mul_(2.0**fraction).to(torch.int32)
            yield rows, columns, rounded(level, words.block(rows, columns.start, level.shape[1]), fraction)


def rounded(level: Tensor, word: Tensor, fraction: int) -> Tensor:
    """Fixed-point numbers with so many bits after the point, to whole ones, up or down at random.

    floor(x + r) with r uniform on [0, 1) is unbiased for either sign, and leaves whole numbers as they are.
    """
    return word.bitwise_and_((1 << fraction) - 1).add_(level).bitwise_right_shift_(fraction)
