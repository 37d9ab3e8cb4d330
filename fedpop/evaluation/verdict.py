"""The verdict on theta at the end of a run: converged or not, by how much, and from what that is known."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONVERGED_NATS = 0.05
"""Nats below a local optimum at which theta counts as converged: a tenth of the half nat that one standard
error of one parameter costs."""
SETTLED_SHARE, SETTLED_FALL = 0.01, (0.005, 0.02)
"""What a network's training loss may still fall by over the last quarter, in nats per example: a hundredth of
what it has fallen by in all, but at least and at most so much."""


class Verdict(ABC):
    """Whether theta has converged (None: not known), and a sentence about it."""

    @property
    @abstractmethod
    def converged(self) -> bool | None: ...

    @property
    @abstractmethod
    def words(self) -> str: ...

    def __str__(self) -> str:
        return self.words

    def plain(self) -> dict[str, Any]:
        """Plain values for files."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {"kind": type(self).__name__} | fields | {"converged": self.converged, "words": self.words}


@dataclass(frozen=True)
class Distance(Verdict):
    """How far below a local optimum theta is, by score and information.

    >>> Distance(9.1, 0.0, 0, exact=True).words
    'not converged: about 9.1 nats below a local optimum; run more rounds'
    >>> Distance(0.003, 0.01, 0, exact=False).words
    'converged to a local optimum: 0.003 +- 0.010 nats below it'
    """

    nats: float
    error: float
    """The Monte-Carlo standard error of ``nats``; 0 where posteriors are closed-form."""
    upwards: int
    """Directions in which the objective curves upwards: there is no maximum near."""
    exact: bool

    @property
    def converged(self) -> bool | None:
        if self.upwards:
            return False
        if self.error < CONVERGED_NATS / 4:  # known well enough to be taken as it is
            return self.nats < CONVERGED_NATS
        if self.nats + self.error < CONVERGED_NATS:
            return True
        return False if self.nats - 2 * self.error > CONVERGED_NATS else None

    @property
    def words(self) -> str:
        if self.upwards:
            return (
                f"not converged: the likelihood curves upwards in {self.upwards} direction(s), so that no "
                "maximum is near; run more rounds"
            )
        size = "less than 0.001" if self.nats < 0.001 else f"{self.nats:.2g}"
        error = f" +- {self.error:.3f}" if self.error >= 0.0005 else ""
        if self.converged:
            return f"converged to a local optimum: {size}{error} nats below it"
        if self.converged is None:
            return (
                f"converged or not cannot be told from these draws: {size}{error} nats below a local "
                "optimum; take more, final=Final(draws=...)"
            )
        return f"not converged: about {size}{error} nats below a local optimum; run more rounds"


@dataclass(frozen=True)
class LossTrend(Verdict):
    """The proxy for networks: what the training loss lost between the two halves of the run's last quarter,
    against a hundredth of what it has lost since the first round (.005 to .02 nats per example).

    It says whether this run, on its schedule, has stopped improving; a rate that was decreased too soon stops
    it as well.

    >>> LossTrend(0.03, 0.004, gained=1.2).words
    'not settled: the training loss still fell by 0.0300 +- 0.0040 nats per example; run more rounds'
    """

    fall: float
    error: float
    gained: float

    @property
    def converged(self) -> bool | None:
        least, most = SETTLED_FALL
        enough = min(max(SETTLED_SHARE * self.gained, least), most)
        if self.error < enough / 4:
            return abs(self.fall) < enough
        if abs(self.fall) - 2 * self.error > enough:
            return False
        return True if abs(self.fall) + self.error < enough else None

    @property
    def words(self) -> str:
        verb = "fell" if self.fall >= 0 else "rose"
        size = f"{verb} by {abs(self.fall):.4f} +- {self.error:.4f} nats per example"
        if self.converged:
            return f"settled, as far as the training loss tells: it {size} over the last quarter"
        if self.converged is None:
            return f"settled or not cannot be told from the training loss: it {size}"
        return f"not settled: the training loss still {size}; run more rounds"


def loss_trend(history: Sequence[Mapping[str, Any]], start: int = 0) -> LossTrend | None:
    """From the rounds after ``start``; None where their last quarter has fewer than eight losses."""
    own = [m for m in history if m["round"] > start]
    tail = own[-(len(own) // 4) :] if len(own) >= 4 else []
    losses = [float(m["loss"]) for m in tail if m.get("loss") is not None and math.isfinite(m["loss"])]
    if len(losses) < 8:
        return None
    # Losses of neighbouring rounds go together: four means of each half, not single rounds, are compared.
    length = len(losses) // 8
    losses = losses[len(losses) - 8 * length :]
    means = [sum(losses[i * length : (i + 1) * length]) / length for i in range(8)]
    fall = (sum(means[:4]) - sum(means[4:])) / 4
    slope, level = sum((i - 3.5) * v for i, v in enumerate(means)) / 42, sum(means) / 8
    spread = sum((v - level - (i - 3.5) * slope) ** 2 for i, v in enumerate(means)) / 6
    first = next(float(m["loss"]) for m in history if m.get("loss") is not None)
    gained = first - sum(means[4:]) / 4
    return LossTrend(fall, math.sqrt(spread / 2), gained if math.isfinite(gained) else 0.0)


def verdict_of(plain: Mapping[str, Any] | None) -> Verdict | None:
    """Read back from plain values."""
    if plain is None:
        return None
    kind = {c.__name__: c for c in (Distance, LossTrend)}[plain["kind"]]
    return kind(**{n: v for n, v in plain.items() if n not in ("kind", "converged", "words")})
