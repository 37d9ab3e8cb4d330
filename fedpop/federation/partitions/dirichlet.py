"""Classes spread over clients in Dirichlet proportions: uneven in sizes and in what clients have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Checked, Few, Positive, Whole
from fedpop.errors import SettingsError
from fedpop.federation.partitions.base import Partition, Scheme, apportioned, shuffled_by_class
from fedpop.keys import Key

PARTITION_ATTEMPTS = 100
"""Draws after which it is given up that every client gets enough examples."""

SMALLEST_ALPHA = 1e-300
"""An alpha by which each class goes to one client, as by any smaller one; logarithms are finite by it."""


@dataclass(frozen=True)
class Dirichlet(Checked, Scheme):
    """The examples of each class go to clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    Args:
        b: How many clients there are, a million at most.
        alpha: How even proportions are, above 0: a small one such as 0.1 gives each class to few
            clients, a large one such as 100 to all about equally.
        least: How many examples everybody must have (default: 1). Proportions are drawn anew until that is
            so, 100 times at most.

    >>> import torch
    >>> labels = torch.arange(3).repeat(40)
    >>> parts = Dirichlet(b=4, alpha=0.5).deal(labels, seed=0)
    >>> sum(parts.sizes), len(parts.rest)
    (120, 0)
    """

    b: Few
    alpha: Positive
    least: Whole = 1

    def deal(self, labels: Tensor, seed: int) -> Partition:
        if self.b * self.least > len(labels):
            raise SettingsError(
                f"{self.b} clients with at least {self.least} examples each need {self.b * self.least}, but "
                f"there are {len(labels)}"
            )
        key = Key(seed, purpose="partition.dirichlet")
        decks = shuffled_by_class(labels, key.at(purpose="rows"))
        for attempt in range(PARTITION_ATTEMPTS):
            now = key.at(purpose=f"attempt-{attempt}")
            shares = [self._shares(deck, now.at(purpose=str(c))) for c, deck in decks.items()]
            if int(torch.tensor(shares).sum(0).min()) >= self.least:
                parts = [deck.split(own) for deck, own in zip(decks.values(), shares, strict=True)]
                return Partition.of([torch.cat(mine) for mine in zip(*parts, strict=True)], labels)
        raise SettingsError(
            f"in {PARTITION_ATTEMPTS} draws with alpha={self.alpha:g} some client of {self.b} always had "
            f"fewer than {self.least} examples; use a larger alpha, fewer clients, or a smaller least"
        )

    def _shares(self, deck: Tensor, key: Key) -> list[int]:
        weights = log_gamma_draws(max(self.alpha, SMALLEST_ALPHA), self.b, key).softmax(0)
        return apportioned(len(deck), weights, key.at(purpose="ties"))


def log_gamma_draws(shape: float, count: int, key: Key) -> Tensor:
    """Logarithms of draws from Gamma(shape, 1), by Marsaglia and Tsang's rejection; those of a shape below
    one are powers of uniform numbers times those of one more, which underflow unless they are logarithms."""
    a = shape + (shape < 1)
    d = a - 1 / 3
    c = 1 / (9 * d) ** 0.5
    out = torch.full((count,), torch.nan, dtype=torch.float64)
    step = 0
    while bool(out.isnan().any()):
        x = key.at(purpose="normal").normal(key.server(), (count,), torch.float64, step)[0]
        u = key.at(purpose="accept").uniform(key.server(), (count,), torch.float64, step)[0]
        v = (1 + c * x) ** 3
        good = (v > 0) & (u.log() < 0.5 * x * x + d - d * v + d * v.clamp(min=1e-300).log())
        out = torch.where(out.isnan() & good, (d * v.clamp(min=1e-300)).log(), out)
        step += 1
    if shape < 1:
        out = out + key.at(purpose="power").uniform(key.server(), (count,), torch.float64)[0].log() / shape
    return out
