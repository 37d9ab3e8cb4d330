"""How a server step changes over the rounds: a factor on its rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from fedpop.errors import SettingsError
from fedpop.settings import Setting


class Schedule(Setting, ABC):
    """A factor as a function of the round k = 0, ..., K-1."""

    @abstractmethod
    def factor(self, k: int, rounds: int) -> float: ...


@dataclass(frozen=True)
class Constant(Schedule):
    """No change.

    >>> Constant().factor(70, rounds=100)
    1.0
    """

    def factor(self, k: int, rounds: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial(Schedule):
    """(1 + k)^-power, the paper's decreasing steps.

    >>> Polynomial(power=0.5).factor(3, rounds=100)
    0.5
    """

    power: float = 0.6

    def __post_init__(self) -> None:
        if self.power < 0:
            raise SettingsError(f"the power of a decreasing step must be 0 or more, not {self.power}")

    def factor(self, k: int, rounds: int) -> float:
        return float((1 + k) ** -self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 to ``end`` along half a cosine.

    >>> Cosine().factor(0, rounds=100), round(Cosine().factor(50, rounds=100), 6)
    (1.0, 0.5)
    """

    end: float = 0.0

    def factor(self, k: int, rounds: int) -> float:
        wave = 0.5 * (1 + math.cos(math.pi * min(k / max(rounds, 1), 1.0)))
        return self.end + (1 - self.end) * wave


@dataclass(frozen=True)
class Decay(Schedule):
    """Constant for a share of the rounds, then linear to ``end``.

    >>> [Decay(constant=0.5).factor(k, rounds=100) for k in (0, 50, 75)]
    [1.0, 1.0, 0.5]
    """

    constant: float = 0.5
    end: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.constant < 1:
            raise SettingsError(f"the constant share lies in [0, 1), not {self.constant}")

    def factor(self, k: int, rounds: int) -> float:
        start = self.constant * rounds
        if k < start:
            return 1.0
        return self.end + (1 - self.end) * max(0.0, 1 - (k - start) / max(rounds - start, 1))
