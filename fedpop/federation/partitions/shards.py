"""FedRep's scheme: every class cut into equal shards, and the same number of classes for every client."""

from __future__ import annotations

import heapq
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
        kinds = kinds_for(self.classes, labels)
        cards = self.b * self.classes
        if cards > len(labels):
            raise SettingsError(
                f"{self.b} clients with {self.classes} classes each need {cards} examples at least, but "
                f"there are {len(labels)}; use fewer clients or fewer classes per client"
            )
        key = Key(seed, purpose="partition.shards")
        hands = [[kinds[k] for k in hand] for hand in self._hands(len(kinds), key)]
        decks = shuffled_by_class(labels, key.at(purpose="rows"))
        holders: dict[int, list[int]] = {}
        for i, hand in enumerate(hands):
            for c in hand:
                holders.setdefault(c, []).append(i)
        mine: list[list[Tensor]] = [[] for _ in hands]
        for c, own in sorted(holders.items()):
            deck = decks[c]
            if len(own) > len(deck):
                raise SettingsError(
                    f"class {c} has {len(deck)} examples for the {len(own)} clients that hold it; use "
                    "fewer clients or fewer classes per client"
                )
            shares = apportioned(len(deck), torch.ones(len(own)), key.at(purpose=f"ties-{c}"))
            for i, part in zip(own, deck.split(shares), strict=True):
                mine[i].append(part)
        dealt = Partition.of([torch.cat(parts) for parts in mine], labels)
        return Partition(dealt.rows, tuple(tuple(sorted(hand)) for hand in hands), dealt.rest)

    def _hands(self, kinds: int, key: Key) -> list[list[int]]:
        """Each client's classes: cards are shuffled and dealt, then those that are twice in a hand change
        places with others, beginning with the hands that have the fewest classes."""
        cards = self.b * self.classes
        copies = apportioned(cards, torch.ones(kinds), key.at(purpose="copies"))
        deck = torch.repeat_interleave(torch.arange(kinds), torch.tensor(copies))
        order = key.at(purpose="cards").uniform(key.server(), (cards,), torch.float64)[0].argsort()
        hands = deck[order].reshape(self.b, self.classes)
        poor = [(n, i) for i, hand in enumerate(hands.tolist()) if (n := len(set(hand))) < self.classes]
        heapq.heapify(poor)
        swaps = 0
        while poor:
            n, i = heapq.heappop(poor)
            if n < len(set(hands[i].tolist())):
                continue  # it has got more since
            for changed in (i, self._swap(i, hands, key.at(purpose=f"swap-{swaps}"))):
                if (n := len(set(hands[changed].tolist()))) < self.classes:
                    heapq.heappush(poor, (n, changed))
            swaps += 1
        out: list[list[int]] = hands.tolist()
        return out

    def _swap(self, i: int, hands: Tensor, key: Key) -> int:
        """One card that the hand with the fewest classes has twice, for one that it lacks; gives whose.

        No class has more cards than there are clients, so somebody lacks the card that is too many here; with
        at least as many classes, none of them this one, they hold a class that this hand lacks. They lose no
        class by the swap, and this hand gains one: swaps come to an end.
        """
        poor = hands[i].tolist()
        twice = next(c for c in poor if poor.count(c) > 1)
        u = key.uniform(key.server(), (self.b,), torch.float64)[0]
        j = int(u.masked_fill_((hands == twice).any(1), torch.inf).argmin())
        other = hands[j].tolist()
        wanted = max((c for c in other if c not in poor), key=other.count)
        hands[i, poor.index(twice)], hands[j, other.index(wanted)] = wanted, twice
        return j
