"""FedRep's scheme: every class cut into equal shards, and the same number of classes for every client."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Checked, Count
from fedpop.errors import SettingsError
from fedpop.federation.partitions.base import Partition, Scheme, apportioned, kinds_for, shuffled_by_class
from fedpop.keys import Key


@dataclass(frozen=True)
class Shards(Checked, Scheme):
    """All examples go to clients, each of which has the same number of classes.

    A class is held by as many clients as any other (by one more where they do not come out even) and cut
    into equal shards for them. Who holds what is a random deal, in which hands with a class twice swap
    cards with other clients until there is none. ``Partition.alike`` deals test examples the same way.

    Args:
        b: How many clients there are.
        classes: How many different classes each of them holds, exactly.

    >>> import torch
    >>> labels = torch.arange(4).repeat(30)
    >>> parts = Shards(b=6, classes=2).deal(labels, seed=0)
    >>> parts.sizes, [len(set(labels[r].tolist())) for r in parts.rows]
    ((20, 20, 20, 20, 20, 20), [2, 2, 2, 2, 2, 2])
    """

    b: Count
    classes: Count

    def deal(self, labels: Tensor, seed: int) -> Partition:
        key = Key(seed, purpose="partition.shards")
        kinds = kinds_for(self.classes, labels)
        hands = self._hands(kinds, key)
        decks = shuffled_by_class(labels, key.at(purpose="rows"))
        mine: list[list[Tensor]] = [[] for _ in hands]
        for c, deck in enumerate(decks):
            holders = [i for i, hand in enumerate(hands) if c in hand]
            if len(holders) > len(deck):
                raise SettingsError(
                    f"class {c} has {len(deck)} examples for the {len(holders)} clients that hold it; use "
                    "fewer clients or fewer classes per client"
                )
            if holders:
                shares = apportioned(len(deck), torch.ones(len(holders)), key.at(purpose=f"ties-{c}"))
                for i, part in zip(holders, deck.split(shares), strict=True):
                    mine[i].append(part)
        dealt = Partition.of([torch.cat(parts) for parts in mine], labels)
        return Partition(dealt.rows, tuple(tuple(sorted(hand)) for hand in hands), dealt.rest)

    def _hands(self, kinds: int, key: Key) -> list[list[int]]:
        """Each client's classes: cards are shuffled and dealt, then those that are twice in a hand change
        places with others."""
        cards = self.b * self.classes
        copies = apportioned(cards, torch.ones(kinds), key.at(purpose="copies"))
        deck = torch.repeat_interleave(torch.arange(kinds), torch.tensor(copies))
        order = key.at(purpose="cards").uniform(key.server(), (cards,), torch.float64)[0].argsort()
        hands: list[list[int]] = deck[order].reshape(self.b, self.classes).tolist()
        swaps = 0
        while True:
            poor = min(hands, key=lambda hand: len(set(hand)))
            if len(set(poor)) == self.classes:
                return hands
            self._swap(poor, hands, key.at(purpose=f"swap-{swaps}"))
            swaps += 1

    def _swap(self, poor: list[int], hands: list[list[int]], key: Key) -> None:
        """One card that the hand with the fewest classes has twice, for one that it lacks.

        No class has more cards than there are clients, so somebody lacks the card that is too many here; with
        at least as many classes, none of them this one, they hold a class that this hand lacks. They lose no
        class by the swap, and this hand gains one: swaps come to an end.
        """
        twice = next(c for c in poor if poor.count(c) > 1)
        order = key.uniform(key.server(), (len(hands),), torch.float64)[0].argsort().tolist()
        other = next(hands[i] for i in order if twice not in hands[i])
        lacking = [c for c in other if c not in poor]
        wanted = max(lacking, key=other.count)
        poor[poor.index(twice)], other[other.index(wanted)] = wanted, twice
