"""What a method answers with, what leaves sites, and what the server gets to see of it: sums.

    Answer     what a cohort of units computed; never leaves its site
    Message    what leaves sites: a row for each, of vectors that are sums over its units, and numbers beside
    Total      sums over the messages that were received, which is all that a method's server step is given

In the simulator one message has a row for each of many sites; that of a site elsewhere has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.message.words import SumWords

Tensors = dict[str, Tensor]
PLAIN, NAMED = "plain.", "named."
"""Before the names of vectors that are sent beside weighted ones, where weights act at the site: without
weights, and with coefficients of the method's."""
WEIGHT = "weight."
"""Of a secure sum: the participation weights of a row's units, summed, among the words."""


@dataclass(frozen=True)
class Answer:
    """A cohort's work, or that of the units at ``rows`` of it: each unit's vectors, and what it cost.

    ``vectors`` has a row for each unit, by name, ``[C, D]``. ``sums`` are sums over the good units that were
    made by one backward pass, where the round gave coefficients for them. ``local`` is provisional: a unit
    keeps it once its message was received (what the method ``keeps`` in any case excepted).
    """

    good: Tensor
    """Whose numbers may be sent, ``[C]``: not those of clients that are not finite."""
    vectors: Tensors = field(default_factory=dict)
    local: Tensors = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    """Numbers that add up: passes, steps, log-likelihoods."""
    sums: Tensors = field(default_factory=dict)
    named: Mapping[str, tuple[str, Tensor]] = field(default_factory=dict)
    """Further sums that the method wants: of which vector, with which coefficients ``[C]``."""
    rows: Tensor | None = None
    outliers: Tensor | None = None
    """Units that are not good because what they have is out of all proportion, ``[C]``."""


@dataclass(frozen=True)
class Payload:
    """An encoded vector as it travels: which codec made it, of how many entries, and the bytes."""

    codec: str
    length: int
    data: bytes


@dataclass(frozen=True)
class Message:
    """What sites send in a round, or to a question; row s of every vector is that of site s.

    >>> Message(torch.tensor([7]), torch.tensor([2]), {"J": torch.ones(1, 3)}).received.tolist()
    [True]
    """

    sites: Tensor
    """Hashes of their names, ``[S]``."""
    units: Tensor
    """How many units each speaks for, ``[S]``; 0 where it has nothing to send."""
    vectors: Tensors = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What travels beside them, summed over the rows: declared in ``fedpop.message.declared``."""
    named: Mapping[str, tuple[str, Tensor]] = field(default_factory=dict)
    """Further sums that a method wants: of which vector, with which coefficients ``[S]``."""
    sums: Tensors = field(default_factory=dict)
    """Sums over all rows, participation weights included, in place of rows: an optimisation of the
    simulator's, where only sums are wanted."""
    weighted: bool = False
    """Participation weights were applied at the sites."""
    changed: bool = True
    """Vectors were clipped, compressed or weighted on their way."""
    checked: bool = False
    """Rows that are not finite have been taken out (by this process)."""
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    """Norms that the guard has computed, ``[2, S]`` for each vector: norms per example, and as they are."""
    withheld: Tensor | None = None
    """Sites that withheld their message, ``[S]``: it was out of all proportion."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """Between machines: what the message answers, and who sends it."""
    payloads: Mapping[str, Payload] = field(default_factory=dict)
    """Between machines: its vectors, encoded."""
    words: Mapping[str, SumWords] = field(default_factory=dict)
    """For a secure sum: its vectors as whole numbers, which is what leaves the site, masked."""
    bytes: int = 0
    """Of its vectors, each in its frame."""

    @classmethod
    def of(cls, answer: Answer, units: Tensor) -> Message:
        """That of units ``[C]`` each of which is a site."""
        good = answer.good.long()
        return cls(units, good, answer.vectors, answer.cost, answer.named, answer.sums)

    @property
    def received(self) -> Tensor:
        """Rows that say something, ``[S]``."""
        return self.units > 0

    @property
    def refused(self) -> str | None:
        """Between machines: why a site does not answer, where it does not."""
        found = self.header.get("refused")
        return (
            None if found is None else str(found[1] if isinstance(found, list) and len(found) == 2 else found)
        )

    def to(self, device: torch.device) -> Message:
        """The same on this device."""
        return replace(
            self,
            units=self.units.to(device),
            vectors={n: v.to(device) for n, v in self.vectors.items()},
            named={n: (of, by.to(device)) for n, (of, by) in self.named.items()},
        )

    def without(self, rows: Tensor) -> Message:
        """The same without these rows ``[S]``."""
        return replace(self, units=torch.where(rows, 0, self.units))


def weighed(message: Message, weights: Tensor, plain: tuple[str, ...]) -> Message:
    """A message with participation weights ``[S]`` in its vectors. What is wanted without weights, or with
    coefficients of the method's, is sent beside."""
    vectors = {n: v * weights.to(v.dtype).unsqueeze(1) for n, v in message.vectors.items()}
    vectors |= {PLAIN + n: message.vectors[n] for n in plain if n in message.vectors}
    for name, (of, coefficients) in message.named.items():
        v = message.vectors[of]
        vectors[NAMED + name] = v * coefficients.to(v.dtype).unsqueeze(1)
    number = float((weights.double() * message.units).sum())
    return replace(message, vectors=vectors, numbers={**message.numbers, "weight": number}, weighted=True)


def base_name(message: Message, name: str) -> str:
    """The method's name of a vector that may be sent in several forms."""
    if name.startswith(NAMED):
        return message.named.get(name.removeprefix(NAMED), (name,))[0]
    return name.removeprefix(PLAIN)


@dataclass(frozen=True)
class Total:
    """Sums over the messages that were received, and of how many units they are; sums over nobody are zeros
    of any shape.

    ``weighted`` counts each unit with its participation weight, ``plain`` counts all alike, ``named`` holds
    sums with coefficients that a method asked for. ``of`` is the number of units in all (the paper's b).
    """

    weighted: Tensors
    plain: Tensors
    named: Tensors
    count: int
    weight: float
    of: int
    ratio: bool
    """Weights are b/|A|: a round of nobody says nothing at all, not even about the hyperprior."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Sums of what travels beside the vectors."""
    bytes_up: int = 0
    left_out: tuple[int, ...] = ()
    """Positions of units that were asked and are not in it."""
    suspects: tuple[int, ...] = ()
    """Those among them whose messages were out of all proportion."""
    usual: Tensors = field(default_factory=dict)
    """Norms that are usual after this round, for the next one's broadcast."""

    @classmethod
    def of_nobody(cls, of: int, ratio: bool = True) -> Total:
        return cls({}, {}, {}, 0, 0.0, of, ratio)

    @property
    def no_step(self) -> bool:
        """No step is to be made: no message was received, and b/|A| is undefined."""
        return self.count == 0 and self.ratio

    @property
    def scale(self) -> float:
        """What weighted sums are to be multiplied by: b/|A|, or one where weights are 1/p_i."""
        return self.of / max(self.count, 1) if self.ratio else 1.0

    def estimate(self, name: str, like: Tensor) -> Tensor:
        """The unbiased estimate of the sum over *all* units, in the shape of ``like``."""
        total, scale = self._sum(self.weighted, name, like), self.scale
        return total if scale == 1 else total * scale

    def plain_sum(self, name: str, like: Tensor) -> Tensor:
        """The sum over units whose messages were received, each counted once."""
        if name not in self.plain and self.count and name in self.weighted:
            raise SettingsError(
                f"the plain sum of {name!r} was not formed: it came as one weighted sum (name it in the "
                "method's plain_sums)"
            )
        return self._sum(self.plain, name, like)

    def named_sum(self, name: str, like: Tensor) -> Tensor:
        """A sum with coefficients of the method's."""
        return self._sum(self.named, name, like)

    def mean(self, name: str, by: str) -> Tensor | None:
        """The ratio of two weighted sums, such as of moves n_i d_i and of sizes n_i; None over nothing."""
        if self.count == 0 or float(self.weighted[by]) == 0:
            return None
        return self.weighted[name] / self.weighted[by]

    @staticmethod
    def _sum(sums: Tensors, name: str, like: Tensor) -> Tensor:
        if name not in sums:
            return torch.zeros_like(like)
        return sums[name].reshape(like.shape)


class Aggregate:
    """Adds up messages as they come; only sums stay."""

    def __init__(self) -> None:
        self._weighted: Tensors = {}
        self._plain: Tensors = {}
        self._named: Tensors = {}
        self._numbers: dict[str, float] = {}
        self._words: dict[str, SumWords] = {}
        self._alike = True
        """SumWords are sums without participation weights, too."""
        self._count, self._weight, self._bytes = 0, 0.0, 0

    def add(self, message: Message, weights: Tensor, lost: Tensor | None = None) -> Tensor:
        """Add the rows that can be, each with its participation weight; which ones that were, ``[S]``.

        Messages that are ``lost`` were sent, and did not arrive.
        """
        self._bytes += message.bytes
        if lost is None or not bool(lost.all()):  # else nothing of it arrives
            self.number(message.numbers)
        sent = received = message.received
        if lost is not None:
            received = received & ~lost
        if not message.checked:
            for v in message.vectors.values():
                received = received & torch.isfinite(v).all(1)
        everyone = bool(received.all())
        if message.sums and received is not sent and not torch.equal(received, sent):
            raise SettingsError("a unit was refused after its vectors had been added to a sum")
        ones = bool((weights == 1).all())
        self._alike = self._alike and (ones or not message.weighted)
        for name, words in message.words.items():
            more = words.summed(received)
            self._words[name] = self._words[name].plus(more) if name in self._words else more
        for name, v in () if message.words else message.vectors.items():
            v = v if everyone else only(received, v)
            if message.weighted:
                self._add_weighted(name, v.sum(0), ones and PLAIN + name not in message.vectors)
            elif everyone and not message.changed:
                plain = v.sum(0)
                _grow(self._plain, name, plain)
                _grow(self._weighted, name, plain if ones else weights.to(v.dtype) @ v)
            else:
                total = torch.where(received, weights, 0).to(v.dtype) @ v
                _grow(self._weighted, name, total)
                _grow(self._plain, name, total if ones else received.to(v.dtype) @ v)
        for name, total in message.sums.items():
            _grow(self._weighted, name, total)
            if ones:
                _grow(self._plain, name, total)
        unweighted = not message.weighted and not message.words
        for name, (of, coefficients) in message.named.items() if unweighted else ():
            v, factor = (
                message.vectors[of],
                torch.where(received, coefficients, 0).to(message.vectors[of].dtype),
            )
            _grow(self._named, name, factor @ only(factor != 0, v))
        units = message.units if everyone else torch.where(received, message.units, 0)
        count = int(units.sum())
        self._count += count
        self._weight += count if ones else float((weights.double() * units).sum())
        return received

    def _add_weighted(self, name: str, total: Tensor, plain: bool) -> None:
        """A sum to which participation weights were applied at the sites; without them it is the ``plain``
        one too."""
        if name.startswith(NAMED):
            _grow(self._named, name.removeprefix(NAMED), total)
        elif name.startswith(PLAIN):
            _grow(self._plain, name.removeprefix(PLAIN), total)
        else:
            _grow(self._weighted, name, total)
            if plain:
                _grow(self._plain, name, total)

    def number(self, numbers: Mapping[str, float]) -> None:
        """Add numbers that came without vectors."""
        for name, number in numbers.items():
            self._numbers[name] = self._numbers.get(name, 0.0) + number

    @property
    def numbers(self) -> Mapping[str, float]:
        return self._numbers

    def total(self, of: int, ratio: bool, **more: Any) -> Total:
        """Everything received so far, out of so many units in all."""
        for name, words in self._words.items():
            if name == WEIGHT:
                self._weight = float(words.value()[0])
            else:
                self._add_weighted(name, words.value()[0], self._alike and PLAIN + name not in self._words)
        self._words = {}
        sums = (self._weighted, self._plain, self._named)
        return Total(*sums, self._count, self._weight, of, ratio, self._numbers, self._bytes, **more)


def _grow(sums: Tensors, name: str, more: Tensor) -> None:
    sums[name] = sums[name] + more if name in sums else more


def only(keep: Tensor, vectors: Tensor) -> Tensor:
    """Zeros in all other rows; no copy where there are none."""
    if bool(keep.all()):
        return vectors
    return torch.where(keep.unsqueeze(1), vectors, torch.zeros_like(vectors))


def finite_rows(vectors: Tensors) -> Tensor | None:
    """Which rows are finite in all vectors, ``[S]``; None: all of them, which one number of each tells."""
    if all(math.isfinite(float(v.sum())) for v in vectors.values()):
        return None
    return torch.stack([torch.isfinite(v).all(1) for v in vectors.values()]).all(0)


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Tensors) -> Tensors:
    cut = len(prefix)
    return {n[cut:]: t for n, t in tensors.items() if n.startswith(prefix)}
