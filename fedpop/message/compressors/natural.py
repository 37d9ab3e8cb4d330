"""Natural compression (Horváth et al., 2019): each entry to one of the two powers of two around it.

Written as 2^e (1 + m 2^-23), an entry goes up to 2^(e+1) with probability m 2^-23. On the bits of a float32
number that is one addition: a uniform 23-bit number added to m carries into the exponent exactly that often;
then m is cleared. So it is unbiased to the last bit, and its variance is at most 1/8 of the square. What is
left is a sign and an exponent: nine bits, and a tenth in vectors with entries below 2^-126, which have
exponents of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import PayloadError
from fedpop.keys import Key
from fedpop.message.compressors.base import Compressor, blocks, one_row, opened, parameters, refuse, sealed
from fedpop.message.compressors.bits import pack, packed_bytes, unpack

_FORM = struct.Struct("<B")
_MANTISSA, _MAGNITUDE = 2**23 - 1, 2**31 - 1
_LARGEST = 254 << 23
"""2^127 as bits: anything above could become 2^128."""
_UP = 24
"""Numbers below 2^-126 are multiplied by 2^24 to have a mantissa of their own."""
_SUBNORMAL = 1 << 9


@dataclass(frozen=True)
class Natural(Compressor):
    """Powers of two.

    >>> Natural().omega(10)
    0.125
    >>> Natural().decode(Natural().encode(torch.tensor([0.25, -8.0, 0.0]), Key(0)))
    tensor([ 0.2500, -8.0000, 0.0000])
    """

    name: ClassVar[str] = "natural"
    kind: ClassVar[int] = 3

    def omega(self, d: int) -> float:
        return 0.125

    def longest(self, d: int) -> float:
        return 2.0

    def encoded_bytes(self, d: int) -> int:
        return self._bytes(d, 9)

    def sent_bytes(self, sent: Tensor) -> int:
        size = sent.to(torch.float32).abs()
        wide = int(((size > 0) & (size < 2.0**-126)).any(1).sum())
        d = sent.shape[1]
        return wide * self._bytes(d, 10) + (sent.shape[0] - wide) * self._bytes(d, 9)

    def _bytes(self, d: int, width: int) -> int:
        return len(sealed(self.kind, d)) + _FORM.size + packed_bytes(d, width)

    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        entries = v.detach().to(torch.float32).contiguous()
        sent = torch.empty_like(entries)
        sendable = torch.ones(len(entries), dtype=torch.bool, device=v.device)
        for rows, columns, power, good, _ in self._powers(entries, key, ids):
            sent[rows, columns] = power.view(torch.float32)
            sendable[rows] &= good
        sent[~sendable] = torch.nan
        return sent.to(v.dtype)

    def encode(self, v: Tensor, key: Key, client: int = 0) -> bytes:
        entries = one_row(v).to(torch.float32).contiguous()
        d = entries.shape[1]
        codes = torch.empty(d, dtype=torch.int16, device=v.device)
        width = 9
        ids = torch.tensor([client], device=v.device)
        for _, columns, power, good, subnormal in self._powers(entries, key, ids):
            refuse(self, good)
            codes[columns] = (power[0] >> 23).bitwise_and_(511)
            if subnormal and len(small := (power[0] & _MANTISSA).nonzero().squeeze(1)):
                bits, width = power[0, small], 10  # 2^(j - 149) is the bit j alone
                j = torch.log2((bits & _MANTISSA).to(torch.float32)).to(torch.int32)
                codes[columns.start + small] = (_SUBNORMAL | (bits >> 23) & 256 | j).to(torch.int16)
        return sealed(self.kind, d, _FORM.pack(width), *pack(codes.cpu().numpy(), width))

    def decode(self, payload: bytes, length: int | None = None) -> Tensor:
        count, inside = opened(self, payload, length)
        width = 9 if len(inside) == _FORM.size + packed_bytes(count, 9) else 10
        (stated,) = parameters(_FORM, inside, packed_bytes(count, width))
        if count and stated != width:
            raise PayloadError(f"codes of {stated} bits where {width} were expected")
        codes = unpack(inside[_FORM.size :], count, width)
        if count and int(np.frombuffer(inside[_FORM.size :], np.uint8, count).max()) == 255:
            raise PayloadError("the payload holds an entry that is infinite")
        bits = codes.astype(np.int32)
        if width == 10:
            sign, j = bits & 256, bits & 255
            small = (bits & _SUBNORMAL) > 0
            if int(j[small].max(initial=0)) > 22:
                raise PayloadError("the payload holds an exponent that does not exist")
            # The sign bit of 32 is shifted in as a negative number.
            return torch.from_numpy(
                np.where(small, (sign << 23) | (1 << np.minimum(j, 22)), (bits & 511) << 23)
            ).view(torch.float32)
        np.left_shift(bits, 23, out=bits)
        return torch.from_numpy(bits).view(torch.float32)

    def _powers(
        self, v: Tensor, key: Key, ids: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor, bool]]:
        """Block by block: bits of the powers of two, which of the block's rows may be sent, and whether
        entries were below 2^-126."""
        words = key.words(ids)
        for rows, columns in blocks(v):
            part = v[rows, columns]
            bits = part.view(torch.int32)
            size = bits & _MAGNITUDE
            good = size.amax(1) <= _LARGEST
            word = words.block(rows, columns.start, part.shape[1]).bitwise_and_(_MANTISSA)
            # Zero wraps round to the largest number, so that the least is that of the entries that are not 0.
            least = int(size.sub_(1).bitwise_and_(_MAGNITUDE).amin())
            power = rounded_bits(bits, word)
            if least < _MANTISSA:
                raised = rounded_bits((part * 2.0**_UP).view(torch.int32), word).view(torch.float32)
                power = torch.where(size < _MANTISSA, (raised * 2.0**-_UP).view(torch.int32), power)
            yield rows, columns, power, good, least < _MANTISSA


def rounded_bits(bits: Tensor, word: Tensor) -> Tensor:
    """float32 numbers, as bits, to powers of two; ``word`` is uniform on [0, 2^23)."""
    return torch.add(bits, word).bitwise_and_(~_MANTISSA)
