"""Vectors as whole numbers modulo a power of two, which is what secure sums add up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import PayloadError

LOWEST = -104
"""Where no step is chosen, numbers are multiples of two to this power."""
DIGITS, DIGIT = 6, 32
"""Digits of such a number, and bits of each."""


@dataclass(frozen=True)
class SumWords:
    """Rows of whole numbers; their sum does not depend on the order.

    >>> ones = SumWords(torch.ones(3, 2, dtype=torch.int32), -1, torch.float32, bits=32)
    >>> ones.summed(torch.tensor([True, False, True])).value()
    tensor([[1., 1.]])
    """

    digits: Tensor
    """``[S, D]``, or ``[S, D, digits]`` where there is no step to choose."""
    step: int | None
    """A number is so many times two to this power; None: of the lowest power there is."""
    kind: torch.dtype
    """That of the vectors."""
    bits: int = DIGITS * DIGIT

    @property
    def width(self) -> int:
        """Bytes of an entry."""
        return self.bits // 8

    @property
    def row_bytes(self) -> int:
        return self.digits.shape[1] * self.width

    def summed(self, received: Tensor) -> SumWords:
        """The sum over these rows ``[S]``, in a row of its own."""
        digits = self.digits if bool(received.all()) else self.digits[received]
        return replace(self, digits=digits.sum(0, keepdim=True, dtype=torch.int64))

    def plus(self, other: SumWords) -> SumWords:
        return replace(self, digits=self.digits + other.digits)

    def value(self) -> Tensor:
        """What they stand for, in the type that the vectors had, ``[S, D]``."""
        if self.step is not None:
            return (self.digits.double() * 2.0**self.step).to(self.kind)
        whole = canonical(self.digits)
        negative = whole[..., -1] >= 2 ** (DIGIT - 1)
        whole = torch.where(negative.unsqueeze(-1), canonical(-whole), whole)
        value = torch.zeros(whole.shape[:-1], dtype=torch.float64, device=self.digits.device)
        for d in reversed(range(DIGITS)):
            value = value + whole[..., d].double() * 2.0 ** (DIGIT * d + LOWEST)
        return torch.where(negative, -value, value).to(self.kind)

    def packed(self) -> bytes:
        """One row as little-endian words, each modulo its power of two."""
        digits = self.digits[0].cpu()
        if self.step is None:
            return canonical(digits).numpy().astype("<u4").tobytes()
        return digits.numpy().astype(f"<i{self.width}").tobytes()

    def unpacked(self, data: bytes) -> SumWords:
        """A row of such words, from their bytes."""
        if len(data) % self.width:
            raise PayloadError(f"{len(data)} bytes are not whole words of {self.width}")
        if self.step is None:
            digits = torch.from_numpy(np.frombuffer(data, dtype="<u4").astype(np.int64))
            return replace(self, digits=digits.reshape(1, -1, DIGITS))
        digits = torch.from_numpy(np.frombuffer(data, dtype=f"<i{self.width}").astype(np.int64))
        return replace(self, digits=digits.reshape(1, -1))


def canonical(digits: Tensor) -> Tensor:
    """Digits of a number modulo 2^192, each 0 or more and below 2^32."""
    out, carry = torch.empty_like(digits), torch.zeros_like(digits[..., 0])
    for d in range(DIGITS):
        whole = digits[..., d] + carry
        out[..., d] = whole & (2**DIGIT - 1)
        carry = whole >> DIGIT
    return out
