"""From answers to a message, and from what became of it to units' states.

A cohort's answer becomes messages here: one of each unit, where every unit is a site by itself, or one of
all units of a site. Both go through the channel (``Sending.sent``), and both say which states their units
store once the server has received them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Channel, Guard, Message, Tensors
from fedpop.message.declared import require_declared
from fedpop.message.fixed_point import FixedPoint
from fedpop.message.message import NAMED, PLAIN, only
from fedpop.methods.base import Algorithm
from fedpop.privacy.gaussian import BIT, SCORE, bound_of, bounded
from fedpop.privacy.site_noise import PrivateRound

Update = tuple[Tensor, Tensors]
"""Positions of units, and the states that they store from now on."""


WITHHELD_UNITS = "units withheld"
"""Of a site's message: how many of its units it left out."""


@dataclass(frozen=True)
class Work:
    """A message as the server sees it, and the units that it is of."""

    message: Message
    ids: Tensor
    """Positions of the units behind it, ``[C]``."""
    row: Tensor | None
    """Of each unit, the row of the message that it is in; None: each unit is a row."""
    good: Tensor
    """Which of them are in it, ``[C]``."""
    weights: Tensor
    """Participation weights of the rows, ``[S]``."""
    examples: Tensor
    """How many examples the rows are made of, ``[S]``."""
    outliers: Tensor | None
    """Units that their site left out of its message, which were out of all proportion, ``[C]``."""
    settle: Callable[[Tensor], None]
    """To be called with the rows that the server received, ``[S]``: units' states follow from that."""

    def settled(self, received: Tensor) -> Tensor:
        """Settle; which units are in what was received, ``[C]``."""
        self.settle(received)
        return self.good & self.of_units(received)

    def of_units(self, rows: Tensor) -> Tensor:
        """Of each unit what its row has."""
        return rows if self.row is None else rows[self.row]


@dataclass(frozen=True)
class Sending:
    """How messages of a round, or of a question, are made."""

    channel: Channel
    key: Key
    guard: Guard | None = None
    weigh: bool = False
    """Participation weights act at the site."""
    plain: tuple[str, ...] = ()
    """Vectors that are wanted without weights, too."""
    encode: bool = False
    sends: Mapping[str, Any] = field(default_factory=dict)
    secure: FixedPoint | None = None
    """The server sees a sum only: vectors become whole numbers, by what was ``broadcast``."""
    messages: int = 1
    """How many are added up."""
    broadcast: Tensors = field(default_factory=dict)
    private: PrivateRound | None = None
    """What a unit adds is bounded, and nothing shows whether it was fit to be sent."""
    round: int = 0

    def sent(self, message: Message, weights: Tensor, examples: Tensor) -> Message:
        """What becomes of a message on its way."""
        require_declared(message, self.sends)
        applied = weights if self.weigh and self.private is None else None  # there they are one
        encode = self.encode and self.secure is None
        message = self.channel.send(message, self.key, applied, self.plain, encode)
        if self.guard is not None:
            message = self.guard.withhold(message, examples)
        if self.secure is None:
            return message
        if self.private is not None:
            return self.secure.private_words(message, self.private, self.round, self.key)
        names = () if self.guard is None else self.guard.names
        return self.secure.words(message, weights, self.messages, names, self.broadcast, self.key)


class Exchange(ABC):
    """One round, or one question: what units answer, and the states that follow."""

    sending: Sending
    units_guard: Guard | None = None
    """What looks at units before a site of several adds them up."""
    remembered: tuple[str, ...] = ()
    """Vectors of which a unit remembers what the server saw."""

    def weights_of(self, group: Tensor) -> Tensor:
        """Participation weights of these units ``[C]``."""
        return torch.ones(len(group))

    @abstractmethod
    def answers(self, group: Tensor, cohort: Cohort, weights: Tensor) -> tuple[Tensors, Iterable[Answer]]:
        """States of these units before it, and their answers, in one or in blocks."""

    def settled(self, answer: Answer, local: Tensors, received: Tensor, seen: Tensors) -> Tensors | None:
        """States of an answer's units, of whose messages these were ``received`` and ``seen``; None: those
        that were received keep ``answer.local``, and others nothing of it."""
        return None


class UnitMessages:
    """A cohort in which every unit is a site: its answers as messages, and the states that follow."""

    def __init__(self, group: Tensor, local: Tensors, exchange: Exchange, updates: list[Update]) -> None:
        self.group, self.local, self.exchange, self.updates = group, local, exchange, updates
        self.new, self.whole = dict(local), True

    def work(self, answer: Answer, cohort: Cohort, weights: Tensor) -> Work:
        """A message with a row for each unit of an answer."""
        rows, units, sizes, ids = answer.rows, cohort.units, cohort.sizes, self.group
        if rows is not None:
            units, sizes, weights, ids = units[rows], sizes[rows], weights[rows], ids[rows.cpu()]
        message, hidden = Message.of(answer, units), self.exchange.sending.private is not None
        if hidden:  # who is not fit adds zeros
            vectors = {n: only(answer.good, v) for n, v in answer.vectors.items()}
            message = replace(message, units=torch.ones_like(message.units), vectors=vectors)
        message = self.exchange.sending.sent(message, weights, sizes)

        def settle(received: Tensor) -> None:
            self._settle(answer, received & answer.good if hidden else received, message)

        return Work(message, ids, None, answer.good, weights, sizes, answer.outliers, settle)

    def _settle(self, answer: Answer, received: Tensor, message: Message) -> None:
        seen = seen_by_server(message, self.exchange.remembered)
        states = self.exchange.settled(answer, self.local, received, seen)
        if states is None:
            self.whole = False
            if answer.local:
                some = received.cpu()
                self.updates.append((self.group[some], {n: v[received] for n, v in answer.local.items()}))
            return
        if answer.rows is None:
            self.new = self.new | states
            return
        for name, value in states.items():
            if name not in self.new:
                self.new[name] = value.new_zeros((len(self.group), *value.shape[1:]))
            elif self.new[name] is self.local.get(name):
                self.new[name] = self.local[name].clone()  # once, for all blocks
            self.new[name].index_copy_(0, answer.rows, value)

    def done(self) -> None:
        """All answers of the cohort were settled."""
        if self.whole:
            self.updates.append((self.group, self.new))


class SiteMessage:
    """The message of a site of several units, added up cohort by cohort: no more than one cohort's vectors
    are ever there."""

    def __init__(self, site: int, exchange: Exchange, updates: list[Update], units: int = 1) -> None:
        self.site, self.exchange, self.updates = site, exchange, updates
        self.several = units > 1
        self.sums: Tensors = {}
        self.numbers: dict[str, float] = {}
        self.named: dict[str, tuple[str, list[Tensor]]] = {}
        self.parts: list[tuple[Tensor, Tensors, Answer]] = []
        self.weights: list[Tensor] = []
        self.outliers: list[Tensor] = []
        self.examples = 0

    def add(self, group: Tensor, sizes: Tensor, weights: Tensor, local: Tensors, answer: Answer) -> None:
        """One cohort's answer; who is not good, or out of all proportion, is left out."""
        guard = self.exchange.units_guard if self.several else None
        outliers = torch.zeros_like(answer.good) if answer.outliers is None else answer.outliers
        if guard is not None:
            answer, more = guard.judged(answer, sizes)
            outliers = outliers | more
        self.outliers.append(outliers)
        good = answer.good
        for name, vectors in answer.vectors.items():
            # One unit after the other: where cohorts are cut changes no bit of a sum.
            so_far = self.sums[name] if name in self.sums else vectors.new_zeros(vectors.shape[1])
            one = torch.zeros(len(good), dtype=torch.int64, device=vectors.device)
            self.sums[name] = so_far.unsqueeze(0).index_add(0, one, only(good, vectors))[0]
        for name, total in answer.sums.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, (of, coefficients) in answer.named.items():
            self.named.setdefault(name, (of, []))[1].append(coefficients[good])
        self.numbers = added(self.numbers, answer.cost)
        self.weights.append(weights)
        self.examples += int(sizes.sum())
        self.parts.append((group, local, replace(answer, vectors={}, sums={}, named={})))

    def work(self) -> Work:
        """The message of all that was added."""
        good = torch.cat([answer.good for _, _, answer in self.parts])
        weights = torch.cat(self.weights)
        outliers = torch.cat(self.outliers)
        if bool(outliers.any()):
            self.numbers = added(self.numbers, {WITHHELD_UNITS: float(outliers.sum())})
        weight = alike(weights, "take part with different probabilities")
        device = good.device
        count = len(good) if self.exchange.sending.private is not None else int(good.sum())
        named = {}
        for name, (of, each) in self.named.items():
            values = torch.cat(each)
            otherwise = f"count differently in {name!r}"
            named[name] = (of, alike(values, otherwise) if count else values.new_zeros(1))
        message = Message(
            torch.tensor([self.site], device=device),
            torch.tensor([count], device=device),
            {n: v.unsqueeze(0) for n, v in self.sums.items()},
            self.numbers,
            named,
        )
        examples = torch.tensor([self.examples], device=device)
        message = self.exchange.sending.sent(message, weight, examples)

        def settle(received: Tensor) -> None:
            self._settle(received, message, count)

        ids = torch.cat([group for group, _, _ in self.parts])
        row = torch.zeros_like(good, dtype=torch.int64)
        return Work(message, ids, row, good, weight, examples, outliers, settle)

    def _settle(self, received: Tensor, message: Message, count: int) -> None:
        received_all, shares = bool(received.all()), Tensors()
        if received_all:  # units of one site share evenly what the server saw of it
            seen = seen_by_server(message, self.exchange.remembered)
            shares = {n: v[0] / max(count, 1) for n, v in seen.items()}
        for group, local, answer in self.parts:
            good, seen = answer.good & received_all, {n: v.expand(len(group), -1) for n, v in shares.items()}
            states = self.exchange.settled(answer, local, good, seen)
            if states is not None:
                self.updates.append((group, local | states))
            elif answer.local and bool(good.any()):
                self.updates.append((group[good.cpu()], {n: v[good] for n, v in answer.local.items()}))


def private_answer(method: Algorithm, answer: Answer, broadcast: Tensors, adaptive: bool) -> Answer:
    """An answer of which each unit's vectors are inside their bounds, and nothing else leaves."""
    n, vectors, good = answer.vectors.get("n"), Tensors(), answer.good
    for name in method.private_sums:
        v = answer.vectors[name] if n is None else answer.vectors[name] / n.clamp(min=1)
        white = method.whitened(name, v, broadcast)
        good = good & torch.isfinite(white).all(1)
        vectors[name], inside = bounded(white, bound_of(name, white.shape[1], broadcast))
        if adaptive and name != SCORE:
            vectors[BIT + name] = (inside.double() - 0.5).unsqueeze(1)
    return replace(answer, good=good, vectors=vectors, cost={}, sums={}, named={})


def seen_by_server(message: Message, remembered: tuple[str, ...]) -> Tensors:
    """What the server saw of vectors that units remember, without participation weights."""
    if not message.weighted:
        return {n: message.vectors[n] for n in remembered if n in message.vectors}
    seen = {n: message.vectors[PLAIN + n] for n in remembered if PLAIN + n in message.vectors}
    for name, (of, coefficients) in message.named.items():
        if of in remembered:
            v = message.vectors[NAMED + name]
            by = torch.where(coefficients == 0, 1.0, coefficients).to(v.dtype)
            seen[of] = v / by.unsqueeze(1)
    return seen


def joined(answers: Sequence[Answer], units: int) -> Answer:
    """Blocks of one cohort as one answer."""
    if len(answers) == 1 and answers[0].rows is None:
        return answers[0]
    rows = torch.cat([torch.arange(units) if a.rows is None else a.rows for a in answers])

    def whole(pieces: list[Tensor]) -> Tensor:
        """Rows of all blocks, in the cohort's order."""
        stacked = torch.cat(pieces)
        return torch.zeros_like(stacked).index_copy(0, rows, stacked)

    cost: dict[str, float] = {}
    for answer in answers:
        cost = added(cost, answer.cost)
    far = [torch.zeros_like(a.good) if a.outliers is None else a.outliers for a in answers]
    return Answer(
        good=whole([a.good for a in answers]),
        vectors={n: whole([a.vectors[n] for a in answers]) for n in answers[0].vectors},
        local={n: whole([a.local[n] for a in answers]) for n in answers[0].local},
        cost=cost,
        outliers=whole(far) if any(a.outliers is not None for a in answers) else None,
    )


def added(numbers: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Numbers and those of the same names, added up."""
    return {**numbers, **{name: numbers.get(name, 0.0) + number for name, number in more.items()}}


def alike(values: Tensor, otherwise: str) -> Tensor:
    """The one value that units of a site have in common, ``[1]``."""
    if not bool((values == values[0]).all()):
        raise SettingsError(
            f"units of one site {otherwise}: a site sends one sum, which can have one weight only; give its "
            "units the same"
        )
    return values[:1]
