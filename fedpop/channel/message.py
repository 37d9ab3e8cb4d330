"""What a method answers with, and what the server gets to see of everyone's answers: sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedpop.errors import SettingsError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Answer:
    """A cohort's work, or that of the units at ``rows`` of it: what each one has to say, and what it cost.

    ``vectors`` are each unit's own, by name, ``[C, D]``. ``sums`` are sums over the units fit to be heard
    that were made by one backward pass, where the round gave coefficients for them. ``local`` is
    provisional: a unit keeps it once it was heard (what the method ``keeps`` in any case excepted).
    """

    good: Tensor
    """Who is fit to be heard, ``[C]``: clients whose numbers are not finite are not."""
    vectors: Tensors = field(default_factory=dict)
    local: Tensors = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    """Numbers that add up: passes, steps, log-likelihoods."""
    sums: Tensors = field(default_factory=dict)
    named: Mapping[str, tuple[str, Tensor]] = field(default_factory=dict)
    """Further sums that the method wants: of which vector, with which coefficients ``[C]``."""
    rows: Tensor | None = None


@dataclass(frozen=True)
class Total:
    """Sums over those who were heard, and how many they were; sums over nobody are zeros of any shape.

    ``weighted`` counts each unit with its participation weight, ``plain`` counts all alike, ``named`` holds
    sums with coefficients that a method asked for. ``of`` is the number of units in all (the paper's b).
    """

    weighted: Tensors
    plain: Tensors
    named: Tensors
    count: int
    weight: float
    of: int
    ratio: bool
    """Weights are b/|A|: a round of nobody says nothing at all, not even about the hyperprior."""

    @classmethod
    def of_nobody(cls, of: int, ratio: bool = True) -> Total:
        return cls({}, {}, {}, 0, 0.0, of, ratio)

    @property
    def silent(self) -> bool:
        """No step is to be made: nobody was heard, and b/|A| is undefined."""
        return self.count == 0 and self.ratio

    @property
    def scale(self) -> float:
        """What weighted sums are to be multiplied by: b/|A|, or one where weights are 1/p_i."""
        return self.of / max(self.count, 1) if self.ratio else 1.0

    def estimate(self, name: str, like: Tensor) -> Tensor:
        """The unbiased estimate of the sum over *all* units, in the shape of ``like``."""
        total, scale = self._sum(self.weighted, name, like), self.scale
        return total if scale == 1 else total * scale

    def plain_sum(self, name: str, like: Tensor) -> Tensor:
        """The sum over those who were heard, each counted once."""
        if name not in self.plain and self.count and name in self.weighted:
            raise SettingsError(f"the plain sum of {name!r} was not formed: it came as one weighted sum")
        return self._sum(self.plain, name, like)

    def named_sum(self, name: str, like: Tensor) -> Tensor:
        """A sum with the method's own coefficients."""
        return self._sum(self.named, name, like)

    def mean(self, name: str, by: str) -> Tensor | None:
        """The ratio of two weighted sums, such as of moves n_i d_i and of sizes n_i; None over nothing."""
        if self.count == 0 or float(self.weighted[by]) == 0:
            return None
        return self.weighted[name] / self.weighted[by]

    @staticmethod
    def _sum(sums: Tensors, name: str, like: Tensor) -> Tensor:
        if name not in sums:
            return torch.zeros_like(like)
        return sums[name].reshape(like.shape)
