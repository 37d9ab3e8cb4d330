"""Clients that the data name themselves: a writer, a hospital, a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.checked import Checked
from fedpop.errors import SettingsError
from fedpop.federation.inputs import as_name
from fedpop.federation.partitions.base import Partition, Scheme


@dataclass(frozen=True)
class ByKey(Checked, Scheme):
    """One client for each different key; the seed changes nothing.

    Args:
        keys: One for every example, in the order of the labels: a name or a number that says whose it
            is; 1 and "1" are one client. Clients come in the order in which their keys are first met.

    >>> import torch
    >>> scheme = ByKey(["anna", "ben", "anna"])
    >>> scheme.names, scheme.deal(torch.tensor([0, 1, 1]), seed=0).sizes
    (('anna', 'ben'), (2, 1))
    """

    keys: Sequence[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        for i, key in enumerate(self.keys):
            as_name(key, f"the key of example {i}")
        if not self.keys:
            raise SettingsError("a partition by keys needs one key for every example")

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, in their order."""
        return tuple(dict.fromkeys(map(str, dict.fromkeys(self.keys))))

    def deal(self, labels: Tensor, seed: int) -> Partition:
        if len(self.keys) != len(labels):
            raise SettingsError(f"there are {len(labels)} examples but {len(self.keys)} keys")
        place = {name: i for i, name in enumerate(self.names)}
        known = {key: place[str(key)] for key in dict.fromkeys(self.keys)}
        owner = torch.tensor([known[key] for key in self.keys])
        rows = torch.argsort(owner, stable=True)
        return Partition.of(rows.split(torch.bincount(owner).tolist()), labels)
