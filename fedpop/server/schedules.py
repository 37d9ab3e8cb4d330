"""How a server step changes over the rounds: a factor on its rate.

A run is made of stages: one, unless it is extended or runs until it has converged. What is defined by the
number of rounds (a decay, the tail that is averaged) is defined by those of the present stage, and starts
anew with the next one; what goes by the round alone (``Constant``, ``Polynomial``) goes on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from fedpop.checked import Factor, NotNegative, Whole
from fedpop.settings import Setting


class Stage(NamedTuple):
    """Rounds k = start, ..., end - 1 of a run.

    >>> Stage(100, 300).share(150)
    0.25
    """

    start: int
    end: int

    @classmethod
    def of(cls, rounds: Rounds) -> Stage:
        """A number of rounds is a run of one stage."""
        return cls(0, rounds) if isinstance(rounds, int) else rounds

    def share(self, k: int) -> float:
        """How much of the stage is over before round k."""
        return min(max(k - self.start, 0) / max(self.end - self.start, 1), 1.0)


Rounds = int | Stage


class Schedule(Setting, ABC):
    """A factor as a function of the round k = 0, ..., K-1."""

    @abstractmethod
    def factor(self, k: int, rounds: Rounds) -> float: ...


@dataclass(frozen=True)
class Constant(Schedule):
    """No change.

    >>> Constant().factor(70, rounds=100)
    1.0
    """

    def factor(self, k: int, rounds: Rounds) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial(Schedule):
    """(1 + k)^-power, the paper's decreasing steps.

    Args:
        power: 0 or more, 0.6 unless told; above 0.5 and up to 1 stochastic approximation converges.

    >>> Polynomial(power=0.5).factor(3, rounds=100)
    0.5
    """

    power: NotNegative = 0.6

    def factor(self, k: int, rounds: Rounds) -> float:
        return float((1 + k) ** -self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """A factor that falls from 1 along half a cosine, after a linear rise where one is asked for.

    Args:
        end: The factor at the end of the run (of each stage, where it is extended); 0 unless told.
        warm_up: How many of the first rounds the factor rises in; 0 unless told. A few help Adam on a
            deep network, whose first steps are all of full size.

    >>> Cosine().factor(0, rounds=100), round(Cosine().factor(50, rounds=100), 6)
    (1.0, 0.5)
    >>> [round(Cosine(warm_up=10).factor(k, rounds=10**6), 3) for k in (0, 4, 9, 10)]
    [0.1, 0.5, 1.0, 1.0]
    """

    end: NotNegative = 0.0
    warm_up: Whole = 0

    def factor(self, k: int, rounds: Rounds) -> float:
        wave = 0.5 * (1 + math.cos(math.pi * Stage.of(rounds).share(k)))
        return (self.end + (1 - self.end) * wave) * min(1.0, (k + 1) / max(self.warm_up, 1))


@dataclass(frozen=True)
class Decay(Schedule):
    """A factor that is 1 for a share of the rounds and then falls linearly.

    Args:
        constant: The share of the rounds (of each stage, where a run is extended) in which it is 1, in
            [0, 1); 0.5 unless told.
        end: The factor at the end; 0 unless told.

    >>> [Decay(constant=0.5).factor(k, rounds=100) for k in (0, 50, 75)]
    [1.0, 1.0, 0.5]
    >>> [Decay(constant=0.5).factor(k, Stage(100, 200)) for k in (100, 150, 175)]  # a run of 100, extended
    [1.0, 1.0, 0.5]
    """

    constant: Factor = 0.5
    end: NotNegative = 0.0

    def factor(self, k: int, rounds: Rounds) -> float:
        first, last = Stage.of(rounds)
        start = self.constant * (last - first)
        if k - first < start:
            return 1.0
        return self.end + (1 - self.end) * max(0.0, 1 - (k - first - start) / max(last - first - start, 1))
