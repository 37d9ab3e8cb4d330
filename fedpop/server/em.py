"""The rate of stochastic-approximation EM steps on the population prior (``Normal.em_step``)."""

from __future__ import annotations

from dataclasses import dataclass

from fedpop.checked import Fraction
from fedpop.errors import SettingsError
from fedpop.server.schedules import Rounds, Stage
from fedpop.settings import Setting


@dataclass(frozen=True)
class EM(Setting):
    """Steps of stochastic-approximation EM on a prior of one or several Normals.

    Args:
        rate: How much of EM's own step is made in the first half of the rounds, above 0 and at most 1; 1
            unless told, which is EM itself. Rounds with few clients take less of it.
        final: The rate falls to this from half of the rounds to the last one, and noise with it; above
            0, at most ``rate``, 0.1 unless told.

    >>> step = EM(rate=1.0, final=0.1)
    >>> step.at(0, rounds=100), round(step.at(75, rounds=100), 2)
    (1.0, 0.55)
    """

    rate: Fraction = 1.0
    final: Fraction = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final > self.rate:
            raise SettingsError(f"EM rates satisfy 0 < final <= rate <= 1, not {self}")

    def at(self, k: int, rounds: Rounds) -> float:
        share = Stage.of(rounds).share(k)
        return self.rate if share < 0.5 else self.rate + (self.final - self.rate) * (2 * share - 1)
