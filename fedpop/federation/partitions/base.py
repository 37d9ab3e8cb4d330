"""What a partition is, and what is made of it: other examples dealt alike, some set aside."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.checked import Factor, Few, Proportion, Seed, Whole, checked, require
from fedpop.errors import DataError, SettingsError
from fedpop.federation.inputs import as_tensor
from fedpop.keys import Key

LARGEST_LABEL = 2.0**53
"""From which on not every whole number is a number."""
MOST_TABLE_CELLS = 500_000_000
"""Cells of a table of clients and classes."""


@checked
def share_sizes(b: Few, share_small: Proportion, n_small: Whole, n_large: Whole) -> tuple[int, ...]:
    """The paper's sizes: a share of the clients has few examples, the others have more.

    Args:
        b: How many clients there are, a million at most.
        share_small: The share of them with few examples, 0 to 1; rounded to whole clients, who come
            first.
        n_small: How many examples each of those has.
        n_large: How many each of the others has.

    >>> share_sizes(4, 0.5, 5, 25)
    (5, 5, 25, 25)
    """
    small = round(share_small * b)
    return (n_small,) * small + (n_large,) * (b - small)


class Scheme(ABC):
    """A rule by which examples are dealt to clients."""

    @abstractmethod
    def deal(self, labels: Tensor, seed: int) -> Partition:
        """Rows of ``labels`` for each client."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "deal" in vars(cls):
            cls.deal = _given_labels(cls.deal)  # type: ignore[assignment, method-assign]


Deal = Callable[[Any, Tensor, int], "Partition"]


def _given_labels(deal: Deal) -> Deal:
    """A rule's ``deal`` that reads its labels and its seed first."""

    @functools.wraps(deal)
    def call(self: Any, labels: Any, seed: int) -> Partition:
        require(Seed, seed=seed)
        return deal(self, as_labels(labels), seed)

    return call


@dataclass(frozen=True)
class Partition:
    """Rows and classes of each client, and the rows that no client holds.

    Args:
        rows: For each client the positions of its examples among all, in rising order.
        classes: For each client the classes that it holds, or that it was dealt.
        rest: Positions of the examples that no client holds.

    >>> import torch
    >>> Partition((torch.tensor([0, 2]),), ((1,),), torch.tensor([1])).sizes
    (2,)
    """

    rows: tuple[Tensor, ...]
    classes: tuple[tuple[int, ...], ...]
    rest: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor], labels: Tensor) -> Partition:
        """From each client's rows; its classes are those that it has examples of."""
        dealt = tuple(r.sort().values for r in rows)
        taken = torch.zeros(len(labels), dtype=torch.bool)
        taken[joined(dealt)] = True
        classes = tuple(tuple(labels[r].unique().tolist()) for r in dealt)
        return cls(dealt, classes, (~taken).nonzero().squeeze(1))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(r) for r in self.rows)

    def counts(self, labels: Tensor) -> Tensor:
        """How many examples of each class each client holds, ``[b, classes]``."""
        own = self._own(labels)
        kinds = int(own.max()) + 1
        if kinds * len(self.rows) > MOST_TABLE_CELLS:
            raise SettingsError(
                f"labels up to {kinds - 1} make a table of {kinds} classes for each of {len(self.rows)} "
                "clients, too large for memory; number the classes 0, 1, 2, ..."
            )
        return self._table(own, kinds)

    def _table(self, codes: Tensor, kinds: int) -> Tensor:
        return torch.stack([torch.bincount(codes[r], minlength=kinds) for r in self.rows])

    def _own(self, labels: Tensor) -> Tensor:
        """Labels of the examples that were dealt here."""
        own = as_labels(labels)
        last = max((int(r.max()) for r in self.rows if len(r)), default=-1)
        if last >= len(own):
            raise SettingsError(
                f"a client holds row {last}, but there are {len(own)} labels; give those that were dealt"
            )
        return own

    def draw(
        self, labels: Tensor, size: int, seed: int, purpose: str, among: Tensor | None = None
    ) -> Partition:
        """For each client ``size`` rows of its own classes, evenly: a test set from other examples, or a
        validation set ``among`` those that no client holds. Clients may share rows; one without classes gets
        none."""
        require(Whole, size=size)
        require(Seed, seed=seed)
        labels = as_labels(labels)
        pool = torch.arange(len(labels)) if among is None else among
        key = Key(seed, purpose=f"partition.{purpose}")
        pools: dict[int, Tensor] = {}
        out = []
        for i, classes in enumerate(self.classes):
            mine = []
            for j, c in enumerate(classes):
                rows = pools.setdefault(c, pool[labels[pool] == c])
                take = size // len(classes) + (j < size % len(classes))
                if take > len(rows):
                    raise SettingsError(
                        f"class {c} has {len(rows)} examples to draw from, but {size} examples for {purpose} "
                        f"take {take} of them; ask for a smaller {purpose} set"
                    )
                u = key.at(purpose=str(c)).uniform(torch.tensor([i]), (len(rows),))[0]
                mine.append(rows[torch.topk(u, take, largest=False).indices])
            out.append(joined(mine).sort().values)
        return Partition(tuple(out), self.classes, self.rest)

    def alike(self, labels: Tensor, others: Tensor, seed: int, purpose: str = "test") -> Partition:
        """All of ``others`` dealt among the same clients: each class in proportion to how many examples of
        it a client holds here, where ``labels`` are those of the examples that were dealt here."""
        require(Seed, seed=seed)
        own, others = self._own(labels), as_labels(others)
        key = Key(seed, purpose=f"partition.{purpose}")
        kinds, codes = own.unique(return_inverse=True)
        place = {c: k for k, c in enumerate(kinds.tolist())}
        counts = self._table(codes, len(kinds))
        decks = shuffled_by_class(others, key.at(purpose="rows"))
        most, known = max(decks) + 1, int(own.max()) + 1
        if most > known:
            raise SettingsError(f"these examples have {most} classes, those dealt {known}")
        mine: list[list[Tensor]] = [[] for _ in self.rows]
        for c, deck in decks.items():
            if c in place and int(counts[:, place[c]].sum()):
                shares = apportioned(len(deck), counts[:, place[c]], key.at(purpose=f"ties-{c}"))
                for hand, part in zip(mine, deck.split(shares), strict=True):
                    hand.append(part)
        dealt = Partition.of([joined(hand) for hand in mine], others)
        return Partition(dealt.rows, self.classes, dealt.rest)

    def held_out(self, labels: Tensor, share: float, seed: int) -> tuple[Partition, Partition]:
        """This partition without a share of each client's examples, and those: of every class as many as
        it has examples; a client keeps at least one."""
        require(Factor, share=share)
        require(Seed, seed=seed)
        labels = self._own(labels)
        key = Key(seed, purpose="partition.held-out")
        remaining, out = [], []
        for i, rows in enumerate(self.rows):
            wanted = min(round(share * len(rows)), max(len(rows) - 1, 0))
            decks = [rows[labels[rows] == c] for c in labels[rows].unique().tolist()]
            own = key.at(purpose=str(i))
            counts = torch.tensor([len(deck) for deck in decks])
            takes = apportioned(wanted, counts, own.at(purpose="ties")) if decks else []
            u = own.uniform(key.server(), (len(rows),), torch.float64)[0]
            gone = torch.zeros(len(rows), dtype=torch.bool)
            for deck, take in zip(decks, takes, strict=True):
                places = torch.searchsorted(rows, deck)
                gone[places[torch.topk(u[places], take, largest=False).indices]] = True
            remaining.append(rows[~gone])
            out.append(rows[gone])
        return Partition(tuple(remaining), self.classes, self.rest), Partition(
            tuple(out), self.classes, self.rest
        )


def as_labels(labels: Any) -> Tensor:
    """Classes of examples as whole numbers from 0 on, ``[n]``; anything else is refused by its row."""
    read = as_tensor(labels, "labels")
    if read.dim() != 1:
        raise DataError(f"labels: one for each example, [n], not shape {tuple(read.shape)}")
    numbers = read.double()
    wrong = ~((numbers == numbers.round()) & (numbers >= 0) & (numbers < LARGEST_LABEL))
    if not len(read) or bool(wrong.any()):
        row = int(wrong.nonzero()[0]) if len(read) else 0
        detail = f": that of row {row} is {float(numbers[row]):g}" if len(read) else ""
        raise SettingsError(
            f"there must be examples to deal, with labels from 0 on, in whole numbers{detail}"
        )
    return read.to(torch.int64)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several parts, which may be none."""
    return torch.cat(list(parts)) if len(parts) else torch.empty(0, dtype=torch.int64)


def kinds_for(classes: int, labels: Tensor) -> list[int]:
    """The classes that there are, if a client can hold so many different ones."""
    kinds: list[int] = labels.unique().tolist()
    if classes > len(kinds):
        raise SettingsError(f"{classes} classes per client asked for, but there are only {len(kinds)}")
    return kinds


def shuffled_by_class(labels: Tensor, key: Key) -> dict[int, Tensor]:
    """The rows of each class that there is, in random order."""
    u = key.uniform(key.server(), (len(labels),), torch.float64)[0]
    order = u.argsort()
    order = order[labels[order].argsort(stable=True)]
    kinds, counts = labels.unique(return_counts=True)
    return dict(zip(kinds.tolist(), order.split(counts.tolist()), strict=True))


def apportioned(total: int, weights: Tensor, key: Key) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to the weights as nearly as can be; the key
    decides who is rounded up where remainders are the same."""
    exact = weights.double() * (total / float(weights.sum()))
    whole = exact.floor()
    missing = total - int(whole.sum())
    u = key.uniform(key.server(), (len(weights),), torch.float64)[0]
    # Remainders that differ by rounding errors only are the same.
    order = ((exact - whole).mul(1e6).round() + u * 0.5 - (weights == 0) * 1e9).argsort(descending=True)
    whole[order[:missing]] += 1
    return [int(n) for n in whole]
