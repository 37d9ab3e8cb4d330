"""A message as one row of words, of one form at all sites: what a secure sum adds up.

    1 | units | numbers beside the vectors, and at how many sites each is | counts of norms | vectors

The one is counted: a sum of words that mean nothing, which masks that do not cancel leave, has another number
there. Norms count in histograms over all powers of two, since the names of those that occur are data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedpop.errors import PayloadError, SettingsError
from fedpop.message.declared import NUMBERS, Sent
from fedpop.message.fixed_point import wide
from fedpop.message.guard import COUNTS, HIGHEST_POWER, KINDS, LOWEST_POWER
from fedpop.message.message import Message
from fedpop.message.words import SumWords
from fedpop.privacy.secure import Layout

POWERS = HIGHEST_POWER - LOWEST_POWER + 1
COUNT_WIDTH = 4
"""Bytes of a count of norms."""
_TYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "bool")}


@dataclass(frozen=True)
class SumForm:
    """What the words of a message are: the same at all sites, and no secret."""

    numbers: tuple[str, ...]
    norms: tuple[str, ...]
    """Vectors whose norms are counted."""
    vectors: tuple[tuple[str, str, int | None, int, int], ...]
    """Name, type, power of two of the step (None: the lowest there is), bits, entries."""
    weighted: bool

    @property
    def layout(self) -> Layout:
        head = ((24, 2 + 2 * len(self.numbers)), (COUNT_WIDTH, len(self.norms) * len(KINDS) * POWERS))
        return (*head, *((bits // 8, size) for _, _, _, bits, size in self.vectors))

    def plain(self) -> list[Any]:
        return [list(self.numbers), list(self.norms), [list(v) for v in self.vectors], self.weighted]

    @classmethod
    def of(cls, plain: Any) -> SumForm:
        """From what has travelled; a PayloadError where it is none."""
        try:
            numbers, norms, vectors, weighted = plain
            each = tuple(
                (str(name), str(kind), None if step is None else int(step), int(bits), int(size))
                for name, kind, step, bits, size in vectors
            )
            if any(kind not in _TYPES for _, kind, *_ in each):
                raise ValueError("an unknown type")
            return cls(tuple(map(str, numbers)), tuple(map(str, norms)), each, bool(weighted))
        except (TypeError, ValueError) as error:
            raise PayloadError(f"the form of a sum cannot be read ({error})") from error

    def with_vectors(self, also: Mapping[str, tuple[str, int]]) -> SumForm:
        """The same with further vectors of these types and sizes, in the order of names."""
        mine = {v[0]: v for v in self.vectors}
        for name, (kind, size) in also.items():
            mine.setdefault(name, (name, kind, None, 192, size))
        return replace(self, vectors=tuple(mine[name] for name in sorted(mine)))


def form_of(message: Message, sends: Mapping[str, Sent], norms: Sequence[str]) -> SumForm:
    """The form of a message whose vectors are words."""
    names = tuple(sorted(name for name in {*NUMBERS, *sends} if not name.endswith("*")))
    for name in message.numbers:
        if name not in names and not name.startswith(COUNTS):
            raise SettingsError(
                f"the number {name!r} is not declared by its whole name, which secure sums need"
            )
    each = message.words.items()
    vectors = tuple(
        (name, str(w.kind).removeprefix("torch."), w.step, w.bits, w.digits.shape[1])
        for name, w in sorted(each)
    )
    return SumForm(names, tuple(norms), vectors, message.weighted)


def packed(message: Message, form: SumForm, sites: int) -> bytes:
    """A message of one row as words of this form; zeros for what it has not."""
    numbers = {n: v for n, v in message.numbers.items() if math.isfinite(v)}
    beside = [1.0, float(message.units.sum())]
    for name in form.numbers:
        beside += [numbers.get(name, 0.0), float(name in numbers)]
    digits, fits = wide(torch.tensor([beside], dtype=torch.float64), sites)
    if not bool(fits.all()):
        raise SettingsError("a number beside the vectors does not fit in a sum")
    parts = [SumWords(digits, None, torch.float64).packed(), _histograms(numbers, form.norms).tobytes()]
    for name, _, step, bits, size in form.vectors:
        words = message.words.get(name)
        if words is None:
            parts.append(bytes(size * bits // 8))
        elif (words.step, words.bits, words.digits.shape[1]) != (step, bits, size):
            raise SettingsError(f"{name} has another form here than at other sites")
        else:
            parts.append(words.packed())
    return b"".join(parts)


def summed(data: bytes, form: SumForm, sites: int) -> Message:
    """The message that a sum over so many sites stands for; a PayloadError where it cannot be one."""
    pieces, start = list[bytes](), 0
    for width, count in form.layout:
        pieces.append(data[start : start + width * count])
        start += width * count
    beside, norms, *vectors = pieces
    head = SumWords(torch.zeros(1, 0, 6, dtype=torch.int64), None, torch.float64).unpacked(beside).value()[0]
    values = head.tolist()
    if values[0] != sites or not 0 <= values[1] < 2.0**53:
        raise PayloadError(
            f"the sum over {sites} site(s) means nothing: masks in it do not cancel, or a site sent no words"
        )
    numbers = {
        name: values[2 + 2 * i] for i, name in enumerate(form.numbers) if values[3 + 2 * i] > 0
    } | _named_counts(norms, form.norms)
    words = {}
    for (name, kind, step, bits, size), piece in zip(form.vectors, vectors, strict=True):
        empty = torch.zeros((1, size) if step is not None else (1, size, 6), dtype=torch.int64)
        words[name] = SumWords(empty, step, _TYPES[kind], bits).unpacked(piece)
    return Message(
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([int(values[1])]),
        numbers=numbers,
        weighted=form.weighted,
        checked=True,
        words=words,
    )


def _histograms(numbers: Mapping[str, float], norms: Sequence[str]) -> Any:
    out = np.zeros((len(norms), len(KINDS), POWERS), dtype="<u4")
    for i, name in enumerate(norms):
        for k, kind in enumerate(KINDS):
            begin = f"{COUNTS}{name}.{kind}."
            for key, count in numbers.items():
                if key.startswith(begin):
                    out[i, k, int(key.removeprefix(begin)) - LOWEST_POWER] = int(count)
    return out


def _named_counts(data: bytes, norms: Sequence[str]) -> dict[str, float]:
    counts = np.frombuffer(data, dtype="<u4").reshape(len(norms), len(KINDS), POWERS)
    return {
        f"{COUNTS}{norms[i]}.{KINDS[k]}.{p + LOWEST_POWER}": float(counts[i, k, p])
        for i, k, p in np.argwhere(counts).tolist()
    }
