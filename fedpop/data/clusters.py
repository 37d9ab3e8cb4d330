"""The synthetic task with a population in two clusters, and clients that take no part in training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpop.checked import Count, Positive, Whole
from fedpop.data.synthetic import Synthetic, SyntheticTask
from fedpop.errors import SettingsError
from fedpop.keys import Key


@dataclass(frozen=True)
class ClusterTask(SyntheticTask):
    """y = x' phi z + noise with z from a mixture of Normals; ``new`` further clients are set aside.

    >>> data, new = ClusterTask(b=4, new=2, k=3).split(seed=0)
    >>> len(data.clients), len(new.clients)
    (4, 2)
    """

    b: Count = 200
    centres: tuple[tuple[float, ...], ...] = ((1.5, 0.5), (-1.0, -1.0))
    weights: tuple[Positive, ...] = (0.6, 0.4)
    sd: Positive = 0.3
    new: Whole = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(len(c) != self.d for c in self.centres) or len(self.weights) != len(self.centres):
            raise SettingsError("every cluster needs a centre of d numbers and a weight")
        if abs(sum(self.weights) - 1) > 1e-9:
            raise SettingsError(f"weights add up to one, not to {sum(self.weights)}")

    def _effects(self, ids: Tensor, key: Key) -> Tensor:
        edges = torch.tensor(self.weights, dtype=torch.float64).cumsum(0)[:-1]
        chosen = (key.at(purpose="cluster").uniform(ids, (1,), torch.float64) > edges).sum(1)
        centres = torch.tensor(self.centres, dtype=torch.float64)
        out: Tensor = centres[chosen] + self.sd * key.normal(ids, (self.d,), torch.float64)
        return out

    def split(self, seed: int) -> tuple[Synthetic, Synthetic]:
        """Data to train on, and clients never seen; every one of the new has ``n_large`` examples."""
        small = round(self.share_small * self.b) / (self.b + self.new)
        drawn = replace(self, b=self.b + self.new, share_small=small).make(seed)
        parts = (slice(None, self.b), slice(self.b, None))
        known, new = (Synthetic(self, drawn.clients[s], drawn.phi, drawn.z[s]) for s in parts)
        return known, new
