"""Rates of local steps that change over the rounds, for every method whose clients train by SGD."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fedpop.message import Tensors
from fedpop.methods.base import Algorithm, Facts
from fedpop.server.schedules import Constant, Schedule

SMALLEST_RATE = 1e-12
"""A rate is above 0, even where a schedule has come to its end."""


@dataclass(frozen=True, kw_only=True)
class Paced(Algorithm):
    """All rates of a round are its schedule's factor times those given (``Round.pace``); the server tells
    which it is, as a site does not know how many rounds there are. What follows training (fine-tuning, a
    newcomer's own epochs) has the rates given."""

    schedule: Schedule = field(default_factory=Constant)

    def pace(self, k: int, facts: Facts) -> Tensors:
        if isinstance(self.schedule, Constant):
            return {}
        factor = max(self.schedule.factor(k, facts.stage), SMALLEST_RATE)
        return {"pace": torch.tensor(factor, dtype=torch.float64)}
