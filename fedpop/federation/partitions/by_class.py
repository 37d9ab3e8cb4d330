"""So many classes for each client, and so many examples, nothing twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Checked, Count, Whole
from fedpop.errors import SettingsError
from fedpop.federation.partitions.base import Partition, Scheme, kinds_for, shuffled_by_class
from fedpop.keys import Key


@dataclass(frozen=True)
class ByClass(Checked, Scheme):
    """Clients of given sizes, each with the same number of classes, as evenly as can be.

    Classes are dealt like cards, so that all are held by about equally many clients. No example goes to
    two clients, and what is left over goes to none.

    Args:
        classes: How many different classes each client is dealt. One with fewer examples than that has
            one of each of the first of them; its test set is of all.
        sizes: How many examples each client holds, one number (0 or more) for each; ``share_sizes``
            makes the paper's.

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
        """What is left over goes to no client."""
        key = Key(seed, purpose="partition")
        kinds = kinds_for(self.classes, labels)
        held = [tuple(kinds[k] for k in hand) for hand in self._hands(len(kinds), key)]
        decks = shuffled_by_class(labels, key.at(purpose="rows"))
        used = dict.fromkeys(kinds, 0)
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
        rest = torch.cat([deck[used[c] :] for c, deck in decks.items()])
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
