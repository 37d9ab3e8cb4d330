"""Clients alike: examples shuffled and dealt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Checked, Count, Whole
from fedpop.errors import SettingsError
from fedpop.federation.partitions.base import Partition, Scheme, apportioned
from fedpop.keys import Key


@dataclass(frozen=True)
class IID(Checked, Scheme):
    """Examples go to clients at random, so that all clients are alike.

    Args:
        b: How many clients there are.
        sizes: How many examples each client gets, one number (0 or more) for each; what is left over
            goes to none. None (the default) deals all of them, equally many to each.

    >>> import torch
    >>> IID(b=3).deal(torch.zeros(10, dtype=torch.int64), seed=0).sizes
    (4, 3, 3)
    """

    b: Count
    sizes: tuple[Whole, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None and len(self.sizes) != self.b:
            raise SettingsError(f"give one size, 0 or more, for each of {self.b} clients")

    def deal(self, labels: Tensor, seed: int) -> Partition:
        key = Key(seed, purpose="partition.iid")
        n = len(labels)
        if self.sizes is None and self.b > n:
            raise SettingsError(f"{n} examples are too few for {self.b} clients")
        sizes = self.sizes or apportioned(n, torch.ones(self.b), key.at(purpose="ties"))
        if sum(sizes) > n:
            raise SettingsError(f"clients ask for {sum(sizes)} examples, but there are {n}")
        order = key.uniform(key.server(), (n,), torch.float64)[0].argsort()
        return Partition.of(order[: sum(sizes)].split(list(sizes)), labels)
