"""How many examples everyone holds: what a network's weight decay goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedpop.channel import Answer, Tensors, Total
from fedpop.keys import Key
from fedpop.questions.base import Question, Units


@dataclass(frozen=True)
class Examples(Question[Tensors]):
    """The number of everyone's training examples, those who cannot be heard left out."""

    name: ClassVar[str] = "examples"
    quorum: ClassVar[float] = 0.0  # a decay can be chosen without a few of them

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        sizes = units.cohort.sizes
        return Answer(torch.ones_like(sizes, dtype=torch.bool), {"examples": sizes.double().unsqueeze(1)})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {"examples": total.plain_sum("examples", torch.zeros(1, dtype=torch.float64))[0]}
