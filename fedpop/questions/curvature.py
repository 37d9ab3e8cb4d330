"""The largest curvature of every U_i where a Langevin chain starts: what is stable there, and how stiff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.client.losses import finite
from fedpop.client.potential import Potential
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.models.base import Model
from fedpop.questions.base import Question, Units

STEP = 0.25
"""The step where none is given, in units of one over the largest curvature."""


def stable_step(largest: float, like: Tensor) -> Tensor:
    """gamma for a chain whose potential has this largest curvature."""
    if not largest > 0:
        raise SettingsError("U has no curvature at the start, so a step must be given: step=...")
    return like.new_tensor(STEP / largest)


@dataclass(frozen=True)
class Curvature(Question[Tensors]):
    """Each unit finds its L_i at w and stores it as ``curvature``; nothing is sent."""

    model: Model
    w: Tensor
    name: ClassVar[str] = "curvature"
    lasting: ClassVar[bool] = True

    def ask(self, known: Tensors) -> Tensors:
        return {"w": self.w}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        u, largest = self._largest(asked, units, key)
        # Nothing is sent that could be refused: a unit without a finite one is found out in its rounds.
        everyone = torch.ones(len(largest), dtype=torch.bool, device=largest.device)
        return Answer(everyone, local={"curvature": largest}, cost=u.cost)

    def _largest(self, asked: Tensors, units: Units, key: Key) -> tuple[Potential, Tensor]:
        u = Potential(self.model, units.cohort)
        return u, u.largest(asked["w"].expand(len(units.cohort), -1), key)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {}


@dataclass(frozen=True)
class CurvatureStep(Curvature):
    """Each unit sends its L_i; known is ``gamma`` = 0.25 / (sum_i L_i + lambda), a common chain's step."""

    prior_precision: float
    quorum: ClassVar[float] = 0.0  # a unit that is not finite is left out, as in the rounds
    guarded: ClassVar[tuple[str, ...]] = ("curvature",)

    def possible(self, vectors: Tensors) -> Tensor | None:
        return (vectors["curvature"] >= 0).all(1)

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        u, largest = self._largest(asked, units, key)
        return Answer(finite(largest.unsqueeze(1)), {"curvature": largest.unsqueeze(1)}, cost=u.cost)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        largest = float(total.plain_sum("curvature", self.w.new_zeros(())))
        return {"gamma": stable_step(largest + self.prior_precision, self.w)}
