"""How well held-out examples are predicted while training goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import Algorithm
from fedpop.questions import Question, Units


@dataclass(frozen=True)
class ValidationScore(Question[float]):
    """Mean predictive log-likelihood of validation examples, nan where nobody has any; units' models are
    their states as they would enter a round."""

    method: Algorithm
    split: str = "validation"
    name: ClassVar[str] = "validation score"
    quorum: ClassVar[float] = 0.0  # worth knowing without a site that is away

    def ask(self, known: Tensors) -> Tensors:
        return known

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        held_out = units.split(self.split)
        value, examples = self.method.score(asked, units.cohort, held_out, units.personal(), key)
        everyone = torch.ones(len(value), dtype=torch.bool, device=value.device)
        return Answer(everyone, sums={"score": torch.stack((value.sum(), examples.sum()))})

    def finish(self, known: Tensors, total: Total) -> float:
        value, examples = (float(v) for v in total.weighted.get("score", torch.zeros(2)))
        return value / examples if examples else math.nan
