"""How large features are: the prior's scale at which the head's outputs have variance one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.channel import Answer, Tensors, Total
from fedpop.federation.inputs import leaves
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.questions.base import Question, Units


@dataclass(frozen=True)
class FeatureScale(Question[Tensors]):
    """The sum of squares of everyone's features at phi, and the number of examples behind it."""

    model: Model
    phi: Tensor
    bounds: tuple[float, float]
    name: ClassVar[str] = "feature scale"
    quorum: ClassVar[float] = 0.0  # a start can be made without those who are not finite

    def ask(self, known: Tensors) -> Tensors:
        return {"phi": self.phi}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        phi, cohort = asked["phi"], units.cohort
        with torch.no_grad():
            features = self.model.features(phi, cohort)
        size = phi.new_zeros(len(cohort), dtype=torch.float64)
        if isinstance(features, Tensor):
            features = self.model.split_offset(features)[0]
        for leaf in leaves(features):
            if leaf.is_floating_point():
                rows = leaf.double().square().unsqueeze(-1).flatten(1).sum(1)
                size = size.index_add(0, cohort.owner, rows)
        good = torch.isfinite(size.to(phi.dtype))  # one broken client must not set everyone's scale
        return Answer(good, {"size": torch.stack((size, cohort.sizes.double()), 1)})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        size, count = total.plain_sum("size", self.phi.new_zeros(2, dtype=torch.float64)).tolist()
        low, high = self.bounds
        scale = math.sqrt(count / size) if size > 0 and math.isfinite(size) else 1.0
        return {"scale": self.phi.new_tensor(min(max(scale, low), high), dtype=torch.float64)}
