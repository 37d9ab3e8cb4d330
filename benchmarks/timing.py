"""Programs timed in turns, and the spread of their ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

Advance = Callable[[float], None]
"""Called with the share of a benchmark that is done."""


@dataclass(frozen=True)
class Lap:
    """One run of a program: processor seconds and seconds."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, between their quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        if len(numbers) < 2:
            return cls(numbers[0], numbers[0], numbers[0])
        low, middle, high = quantiles(numbers, n=4, method="inclusive")
        return cls(middle, low, high)

    def metrics(self, name: str) -> dict[str, float]:
        return {name: self.middle, f"{name}_low": self.low, f"{name}_high": self.high}


def lap(program: Callable[[], object]) -> Lap:
    cpu, wall = time.process_time(), time.perf_counter()
    program()
    return Lap(time.process_time() - cpu, time.perf_counter() - wall)


def in_turns(
    programs: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least: int,
    advance: Advance = lambda share: None,
) -> dict[str, list[Lap]]:
    """Laps of all programs, there and back, for about so many seconds; the first lap warms up."""
    laps: dict[str, list[Lap]] = {name: [] for name in programs}
    for program in programs.values():
        program()
    started, turn = time.perf_counter(), 0
    while turn < least or time.perf_counter() - started < seconds:
        for name in list(programs)[:: 1 if turn % 2 == 0 else -1]:
            laps[name].append(lap(programs[name]))
        turn += 1
        advance(min(turn / least, (time.perf_counter() - started) / seconds, 1.0))
    return laps


def ratio(over: Sequence[Lap], under: Sequence[Lap]) -> dict[str, float]:
    """Ratios of laps made in the same turn."""
    cpu = Spread.of([a.cpu / b.cpu for a, b in zip(over, under, strict=True)])
    wall = Spread.of([a.wall / b.wall for a, b in zip(over, under, strict=True)])
    return cpu.metrics("ratio") | wall.metrics("ratio_wall")


def shown(metrics: Mapping[str, float], name: str, digits: int = 2) -> str:
    """A number with its quartiles, for a table."""
    middle, low, high = (metrics[name + end] for end in ("", "_low", "_high"))
    return f"{middle:.{digits}f}  ({low:.{digits}f} to {high:.{digits}f})"
