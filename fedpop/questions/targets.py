"""How large targets are: where the annealing of the noise variance starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.models.base import Model
from fedpop.questions.base import Question, Units


@dataclass(frozen=True)
class TargetSize(Question[Tensors]):
    """The variance of everyone's y about the model's intercept: about the mean where it has one, else about
    zero, and then only squares are summed. Units with fewer than ``minimum`` examples add nothing.
    """

    model: Model
    minimum: int
    name: ClassVar[str] = "target size"
    quorum: ClassVar[float] = 0.0  # a start can be made without those who are not finite

    guarded: ClassVar[tuple[str, ...]] = ("size",)

    def possible(self, vectors: Tensors) -> Tensor | None:
        return (vectors["size"][:, : 1 + self.model.outputs] >= 0).all(1)

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        cohort, model = units.cohort, self.model
        y = model.likelihood.encode(cohort.y, model.outputs, torch.float64)
        y = torch.where((cohort.sizes >= self.minimum)[cohort.owner].unsqueeze(1), y, torch.zeros_like(y))
        sizes = torch.where(cohort.sizes >= self.minimum, cohort.sizes, torch.zeros_like(cohort.sizes))
        rows = torch.cat((y.square(), y), 1) if model.intercept else y.square()
        sums = y.new_zeros((len(cohort), rows.shape[1])).index_add(0, cohort.owner, rows)
        size = torch.cat((sizes.double().unsqueeze(1), sums), 1)
        return Answer(torch.isfinite(size).all(1), {"size": size})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        width = 1 + self.model.outputs * (2 if self.model.intercept else 1)
        like = self.model.initial_phi().new_zeros(width, dtype=torch.float64)
        size = total.plain_sum("size", like)
        count, squares = float(size[0]), size[1 : 1 + self.model.outputs]
        if count == 0:
            return {}
        second = squares / count
        if self.model.intercept:
            second = second - (size[1 + self.model.outputs :] / count).square()
        found = float(second.clamp(min=0).mean())
        return {"target_size": like.new_tensor(found)} if math.isfinite(found) else {}
