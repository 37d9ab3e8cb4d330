"""Rand-k (Konečný and Richtárik, 2018): k entries chosen at random, multiplied by d / k, the others zero.

Which k is said by two numbers a and c in the payload, from which any receiver works them out without the
sender's key: with p the largest prime up to d, j = 0, ..., k - 1 stands for the entry (a j mod p) + c modulo
d (j + c for the few j from p on). Packed indices would cost log2(d) bits each instead. c is uniform, so every
entry is chosen with probability k / d exactly, whatever a is: C is unbiased and omega = d / k - 1, with
equality. Where d is prime any *two* entries are chosen as often as in uniformly random subsets, so that C(v)
has the same covariance as with these; elsewhere that holds up to a few times (d - p) / d.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, Fraction
from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import Key
from fedpop.message.compressors.base import (
    Compressor,
    as_sent_float,
    blocks,
    floats,
    one_row,
    opened,
    parameters,
    raw,
    refuse,
    sealed,
)

_FORM = struct.Struct("<BIII")
KEPT_SHARE = 0.1
"""What is sent where nothing was said."""


@dataclass(frozen=True)
class RandK(Compressor):
    """A few entries, drawn at random and scaled up; a tenth of them by default.

    Args:
        k: How many entries are sent; give this or ``share``.
        share: Which part of them is sent, in (0, 1], at least one entry; a tenth where neither is given.

    >>> RandK(share=0.25).omega(40)
    3.0
    >>> v = RandK(k=2).compress(torch.ones(1, 6), Key(0), torch.tensor([0]))
    >>> sorted(v[0].tolist())
    [0.0, 0.0, 0.0, 0.0, 3.0, 3.0]
    """

    k: Count | None = None
    share: Fraction | None = None
    name: ClassVar[str] = "rand-k"
    kind: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.share is not None:
            raise SettingsError("rand-k takes k or share, not both")

    def check(self, d: int) -> None:
        if self.k is not None and self.k > d:
            raise SettingsError(f"rand-k cannot keep k = {self.k} entries of a vector of {d}")

    def count(self, d: int) -> int:
        """How many of d entries are sent."""
        self.check(d)
        if self.k is not None:
            return self.k
        return min(d, max(1, round((self.share or KEPT_SHARE) * d)))

    def omega(self, d: int) -> float:
        return d / self.count(d) - 1 if d else 0.0

    def longest(self, d: int) -> float:
        return max(1.0, 1 + self.omega(d))

    def encoded_bytes(self, d: int) -> int:
        return self._bytes(d, 4)

    def sent_bytes(self, sent: Tensor) -> int:
        return sent.shape[0] * self._bytes(sent.shape[1], 8 if sent.dtype == torch.float64 else 4)

    def _bytes(self, d: int, item: int) -> int:
        return len(sealed(self.kind, d)) + _FORM.size + item * self.count(d)

    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        v = v.detach()
        d = v.shape[1]
        k = self.count(d)
        sent = torch.zeros_like(v)
        if d:
            index = chosen(*draw(key, ids, d), d, k)
            sent.scatter_(1, index, v.gather(1, index) * (d / k))
        sent[~self._sendable(v)] = torch.nan
        return sent

    def encode(self, v: Tensor, key: Key, client: int = 0) -> bytes:
        v = as_sent_float(one_row(v))
        d = v.shape[1]
        k = self.count(d)
        refuse(self, self._sendable(v))
        if not d:
            return sealed(self.kind, 0, _FORM.pack(v.element_size(), 0, 0, 0))
        a, c = draw(key, torch.tensor([client], device=v.device), d)
        values = v.gather(1, chosen(a, c, d, k)) * (d / k)
        form = _FORM.pack(v.element_size(), k, int(a), int(c))
        return sealed(self.kind, d, form, raw(values))

    def decode(self, payload: bytes, length: int | None = None) -> Tensor:
        d, inside = opened(self, payload, length)
        k = self.count(d)
        item = 4 if len(inside) == _FORM.size + 4 * k else 8
        width, kept, a, c = (int(n) for n in parameters(_FORM, inside, item * k))
        if kept != k or (k and width != item):
            raise PayloadError(f"the payload keeps {kept} of {d} entries where {k} were expected")
        values = floats(inside[_FORM.size :], item)
        sent = values.new_zeros(d)
        if d:
            if not (1 <= a < max(prime_to(d), 2) and 0 <= c < d):
                raise PayloadError("the payload's choice of entries does not exist")
            sent.index_copy_(0, chosen(torch.tensor([a]), torch.tensor([c]), d, k)[0], values)
        return sent

    def _sendable(self, v: Tensor) -> Tensor:
        """Rows of which any entry may be multiplied by d / k."""
        d = v.shape[1]
        if not d:
            return torch.ones(v.shape[0], dtype=torch.bool, device=v.device)
        largest = v.abs().amax(1).to(torch.float32) * (d / self.count(d))
        return torch.isfinite(largest)


def draw(key: Key, ids: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """a in [1, p) and c in [0, d) of every client, each from 63 random bits."""
    words = key.bits(ids, 4)
    wide = (words[:, 0::2] << 31) ^ words[:, 1::2]
    return wide[:, 0] % max(prime_to(d) - 1, 1) + 1, wide[:, 1] % d


def chosen(a: Tensor, c: Tensor, d: int, k: int) -> Tensor:
    """The k indices that a and c ``[C]`` stand for, ``[C, k]``."""
    p = prime_to(d)
    index = torch.empty((len(a), k), dtype=torch.int64, device=a.device)
    for rows, columns in blocks(index):
        part = torch.arange(columns.start, columns.stop, device=a.device) * a[rows, None]
        part.remainder_(p).add_(c[rows, None])
        torch.sub(part, (part >= d).to(torch.int64).mul_(d), out=index[rows, columns])
    if k > p:
        index[:, p:] = (torch.arange(p, k, device=a.device) + c.unsqueeze(1)) % d
    return index


@lru_cache(maxsize=256)
def prime_to(d: int) -> int:
    """The largest prime that is not above d; one for d = 1.

    >>> prime_to(1), prime_to(40), prime_to(1_000_000)
    (1, 37, 999983)
    """
    p = d
    while any(p % q == 0 for q in range(2, math.isqrt(p) + 1)):
        p -= 1
    return p
