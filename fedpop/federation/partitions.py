"""Labelled examples dealt out to clients: so many classes each, so many examples each, nothing twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Checked, Count, Whole
from fedpop.errors import SettingsError
from fedpop.keys import Key


@dataclass(frozen=True)
class ByClass(Checked):
    """Client i holds ``sizes[i]`` examples of ``classes`` classes, as evenly as can be.

    Classes are dealt like cards, so that all are held by about equally many clients. No example goes
    to two clients.

    >>> import torch
    >>> labels = torch.arange(4).repeat(30)
    >>> parts = ByClass(classes=2, sizes=(5, 10)).deal(labels, seed=0)
    >>> [len(rows) for rows in parts.rows], [len(set(labels[r].tolist())) for r in parts.rows]
    ([5, 10], [2, 2])
    """

    classes: Count
    sizes: Sequence[Whole]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes:
            raise SettingsError("a partition needs one size, 0 or more, for each client")

    def deal(self, labels: Tensor, seed: int) -> Partition:
        """Rows of ``labels`` for each client; what is left over goes to no client."""
        key = Key(seed, purpose="partition")
        kinds = int(labels.max()) + 1
        if self.classes > kinds:
            raise SettingsError(f"{self.classes} classes per client asked for, but there are only {kinds}")
        held = self._hands(kinds, key)
        decks = _shuffled_by_class(labels, key.at(purpose="rows"))
        used = [0] * kinds
        rows = []
        for classes, size in zip(held, self.sizes, strict=True):
            mine = []
            for j, c in enumerate(classes):
                take = size // self.classes + (j < size % self.classes)
                if used[c] + take > len(decks[c]):
                    raise SettingsError(
                        f"class {c} has {len(decks[c])} examples, fewer than its clients ask for; use "
                        "fewer or smaller clients"
                    )
                mine.append(decks[c][used[c] : used[c] + take])
                used[c] += take
            rows.append(torch.cat(mine).sort().values)
        rest = torch.cat([deck[n:] for deck, n in zip(decks, used, strict=True)])
        return Partition(tuple(rows), tuple(held), rest.sort().values)

    def _hands(self, kinds: int, key: Key) -> list[tuple[int, ...]]:
        """Each client's classes, from decks that are shuffled anew when they run out."""
        hands: list[tuple[int, ...]] = []
        deck: list[int] = []
        shuffles = 0
        for _ in self.sizes:
            hand: list[int] = []
            while len(hand) < self.classes:
                if not any(c not in hand for c in deck):
                    u = key.at(purpose=f"deck-{shuffles}").uniform(key.server(), (kinds,))[0]
                    deck = deck + u.argsort().tolist()
                    shuffles += 1
                hand.append(deck.pop(next(i for i, c in enumerate(deck) if c not in hand)))
            hands.append(tuple(hand))
        return hands


@dataclass(frozen=True)
class Partition:
    """Rows and classes of each client, and the rows that no client holds."""

    rows: tuple[Tensor, ...]
    classes: tuple[tuple[int, ...], ...]
    rest: Tensor

    def draw(
        self, labels: Tensor, size: int, seed: int, purpose: str, among: Tensor | None = None
    ) -> Partition:
        """For each client ``size`` rows of its own classes, evenly: a test set from other examples, or a
        validation set ``among`` those that no client holds. Clients may share rows."""
        pool = torch.arange(len(labels)) if among is None else among
        key = Key(seed, purpose=f"partition.{purpose}")
        out = []
        for i, classes in enumerate(self.classes):
            mine = []
            for j, c in enumerate(classes):
                rows = pool[labels[pool] == c]
                take = size // len(classes) + (j < size % len(classes))
                if take > len(rows):
                    raise SettingsError(f"class {c} has {len(rows)} examples to draw from, not {take}")
                u = key.at(purpose=str(c)).uniform(torch.tensor([i]), (len(rows),))[0]
                mine.append(rows[torch.topk(u, take, largest=False).indices])
            out.append(torch.cat(mine).sort().values)
        return Partition(tuple(out), self.classes, self.rest)


def _shuffled_by_class(labels: Tensor, key: Key) -> list[Tensor]:
    u = key.uniform(key.server(), (len(labels),), torch.float64)[0]
    order = u.argsort()
    return [order[labels[order] == c] for c in range(int(labels.max()) + 1)]
