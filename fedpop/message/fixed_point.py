"""Numbers as whole multiples of a step, for secure sums: these add up the same in any order, under masks too.

Two forms:

    narrow   a gradient's entry q step, q a whole number modulo 2^bits, rounded up or down at random so that
             E[q step] is the entry; of its bits ceil(log2 sites) are headroom for the sum
    wide     any float64 number in multiples of 2^-104 modulo 2^192 (three limbs of 64 bits): no scale to
             choose, an error of 2^-104 an entry, and room for sums below 2^87

The step of a narrow vector is a power of two that is broadcast. It follows from the norms of earlier
messages, of which only counts by powers of two are known (``guard.COUNTS``), as ``learned`` says; a vector
whose norms are not known yet is sent wide, as is all that is float64. What does not fit is refused at its
site: nothing wraps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpop.checked import Checked
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message.guard import COUNTS
from fedpop.message.message import WEIGHT, Message, Tensors, base_name
from fedpop.message.words import DIGIT, DIGITS, LOWEST, SumWords
from fedpop.privacy.site_noise import PrivateRound

MARGINS = {32: 6, 16: 2}
"""By bits, the powers of two between the longest message of a round and what fits in the next one."""
FALLS = 1 / 32
"""Powers of two by which that falls in a round whose messages are shorter."""
OUTLIERS = 10
"""Powers of two above the median norm from which a message does not widen what fits."""
SCALE = "usual.scale."
"""Before the names of powers of two that entries of a vector lie below, in a broadcast."""
_ROUNDED_AT_ONCE = 2**20
"""Entries: a little more memory, the same numbers."""


@dataclass(frozen=True)
class FixedPoint(Checked):
    """How vectors become whole numbers.

    Args:
        bits: Of an entry of a gradient, 32 by default; 16 halve the bytes and add noise.
    """

    bits: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in MARGINS:
            raise SettingsError(f"an entry of a secure sum has 16 or 32 bits, not {self.bits}")

    @property
    def margin(self) -> int:
        return MARGINS[self.bits]

    def payload(self, sites: int) -> int:
        """Bits of an entry beside its sign, where so many sites are added up."""
        left = self.bits - 1 - max(0, sites - 1).bit_length()
        if left < 6:
            raise SettingsError(
                f"{self.bits} bits leave {max(left, 0)} for an entry where {sites} sites are added up; use "
                "bits = 32"
            )
        return left

    def words(
        self,
        message: Message,
        weights: Tensor,
        sites: int,
        guarded: tuple[str, ...],
        broadcast: Mapping[str, Tensor],
        key: Key,
    ) -> Message:
        """A message of some of so many ``sites``, with its vectors as words and as they decode; rows
        that do not fit are left out as withheld. ``weights`` ``[S]`` are those of participation."""
        payload, fits = self.payload(sites), torch.ones_like(message.received)
        words, seen = dict[str, SumWords](), Tensors()
        vectors = dict(message.vectors)
        if message.weighted:  # exactly, too: priors without a known constant use it
            vectors[WEIGHT] = (weights.double() * message.units).unsqueeze(1)
        for name, v in vectors.items():
            base = base_name(message, name)
            power = broadcast.get(SCALE + base) if base in guarded and v.dtype == torch.float32 else None
            if power is None:
                digits, fit = wide(v, sites)
                words[name] = SumWords(digits, None, v.dtype)
            else:
                step = math.ceil(float(power)) - payload
                units = key.at(purpose=f"round.{name}")
                digits, fit = _narrow(v, step, payload, units, message.sites)
                words[name] = SumWords(digits, step, v.dtype, self.bits)
            fits = fits & fit
        keep = message.received & fits
        for name, each in words.items():
            digits = each.digits
            if not bool(keep.all()):
                digits = torch.where(keep.reshape(-1, *[1] * (digits.dim() - 1)), digits, 0)
                words[name] = replace(each, digits=digits)
            if name != WEIGHT:
                seen[name] = vectors[name] if each.step is None else words[name].value()
        bad = message.received & ~fits
        if bool(bad.any()):
            withheld = bad if message.withheld is None else message.withheld | bad
            message = replace(message.without(bad), withheld=withheld)
        size = int(keep.sum()) * sum(each.row_bytes for each in words.values())
        return replace(message, vectors=seen, words=words, changed=True, checked=True, bytes=size)

    def private_words(self, message: Message, private: PrivateRound, round: int, key: Key) -> Message:
        """A message whose words have its sites' parts of the noise: nothing else of a row leaves, whether
        its units' numbers were finite included."""
        words = dict[str, SumWords]()
        for name, v in message.vectors.items():
            step = private.steps[name]
            q = _rounded(v, step, key.at(purpose=f"round.{name}"), message.sites)
            for row, site in enumerate(message.sites.tolist()):
                noise = private.noise(name, round, site, v.shape[1])
                q[row] += torch.from_numpy(noise).to(q.device)
            most = 2 ** (self.bits - 1) - 1  # the plan has room for all rows together
            words[name] = SumWords(q.clamp_(-most, most).to(torch.int32), step, v.dtype, self.bits)
        seen = {name: each.value() for name, each in words.items()}
        size = len(message.sites) * sum(each.row_bytes for each in words.values())
        return replace(message, vectors=seen, words=words, changed=True, checked=True, bytes=size)


# --- one vector ------------------------------------------------------------------------------


def _narrow(v: Tensor, step: int, payload: int, key: Key, sites: Tensor) -> tuple[Tensor, Tensor]:
    """floor(v / 2^step + u), u uniform on [0, 1), ``[S, D]``; and which rows fit, ``[S]``."""
    most = 2**payload - 1
    out = torch.empty(v.shape, dtype=torch.int32, device=v.device)
    fits = torch.ones(len(v), dtype=torch.bool, device=v.device)
    drawn = key.words(sites)
    rows = max(1, _ROUNDED_AT_ONCE // max(1, v.shape[1]))
    for start in range(0, len(v), rows):
        some = slice(start, start + rows)
        for left in range(0, v.shape[1], _ROUNDED_AT_ONCE):
            across = slice(left, min(left + _ROUNDED_AT_ONCE, v.shape[1]))
            chance = drawn.block(some, left, across.stop - left).double().add_(2.0**31).mul_(2.0**-32)
            q = torch.floor(v[some, across].double().mul_(2.0**-step).add_(chance))
            fits[some] &= (q.abs() <= most).all(1)
            out[some, across] = q.clamp_(-most, most).to(torch.int32)
    return out, fits


def _rounded(v: Tensor, step: int, key: Key, sites: Tensor) -> Tensor:
    """floor(v / 2^step + u), u uniform on [0, 1), ``[S, D]``."""
    chance = key.words(sites).block(slice(0, len(v)), 0, v.shape[1]).double().add_(2.0**31).mul_(2.0**-32)
    return torch.floor(v.double().mul(2.0**-step).add_(chance)).to(torch.int64)


def wide(v: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    """Signed digits of v in multiples of 2^-104, ``[S, D, 6]``; and which rows fit, ``[S]``."""
    most = 2.0 ** (DIGITS * DIGIT - 1 + LOWEST) / max(sites, 1)
    size = v.double().abs()
    fits = (size < most).all(1)
    left = torch.where(size < most, size, 0.0)
    digits = torch.empty((*v.shape, DIGITS), dtype=torch.int64, device=v.device)
    for d in reversed(range(DIGITS)):
        weight = 2.0 ** (DIGIT * d + LOWEST)
        digit = torch.floor(left / weight)
        left = left - digit * weight
        digits[..., d] = digit.to(torch.int64)
    return digits * torch.where(v < 0, -1, 1).unsqueeze(-1), fits


# --- which step ------------------------------------------------------------------------------


def learned(
    names: tuple[str, ...], numbers: Mapping[str, float], broadcast: Mapping[str, Tensor], margin: int
) -> Tensors:
    """The powers of two below which entries are to lie in the next round, by counts of this one's norms."""
    out = Tensors()
    for name in names:
        begin = f"{COUNTS}{name}.whole."
        counts = sorted(
            (int(n.removeprefix(begin)), c) for n, c in numbers.items() if n.startswith(begin) and c
        )
        before = broadcast.get(SCALE + name)
        powers = [] if before is None else [float(before) - FALLS]
        if counts:
            half, below = sum(c for _, c in counts) / 2, 0.0
            middle = next(power for power, c in counts if (below := below + c) >= half)
            powers.append(max(power for power, _ in counts if power <= middle + OUTLIERS) + margin)
        if powers:
            out[SCALE + name] = torch.tensor(float(max(powers)), dtype=torch.float64)
    return out
