"""What is said of numbers over seeds: means and medians with intervals, lines through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from scipy import stats

from fedpop.report.results import mean


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x by least squares, and the share of the variance it explains."""

    intercept: float
    slope: float
    r2: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """
    >>> fit_line([0, 1, 2], [1, 3, 5])
    Line(intercept=1.0, slope=2.0, r2=1.0)
    """
    n = len(xs)
    mx, my = sum(xs) / n, sum(ys) / n
    xx = sum((x - mx) ** 2 for x in xs)
    xy = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    yy = sum((y - my) ** 2 for y in ys)
    slope = xy / xx
    return Line(my - slope * mx, slope, 1.0 if yy == 0 else xy**2 / (xx * yy))


@dataclass(frozen=True)
class Slope:
    """A slope with its 95 % interval over seeds."""

    value: float
    low: float
    high: float
    line: Line

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def slope_over_seeds(xs: Sequence[float], rows: Sequence[Sequence[float]], log: bool = False) -> Slope:
    """The slope of the line through the means over seeds; ``rows`` has one list of ys for each seed.

    With ``log`` it is the exponent of a power law. The interval is the jackknife's: seeds are what varies,
    and the points of one seed are not independent of each other.
    """
    whole = _through_means(xs, rows, log)
    n = len(rows)
    left_out = [_through_means(xs, [*rows[:i], *rows[i + 1 :]], log).slope for i in range(n)]
    centre = sum(left_out) / n
    error = math.sqrt((n - 1) / n * sum((s - centre) ** 2 for s in left_out))
    reach = student(n - 1) * error
    return Slope(whole.slope, whole.slope - reach, whole.slope + reach, whole)


def _through_means(xs: Sequence[float], rows: Sequence[Sequence[float]], log: bool) -> Line:
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    if not log:
        return fit_line(xs, means)
    return fit_line([math.log(x) for x in xs], [math.log(abs(m)) for m in means])


def student(degrees: int) -> float:
    """The quantile of Student's t that 95 % intervals reach to.

    >>> round(student(9), 2)
    2.26
    """
    return float(stats.t.ppf(0.975, degrees))


def interval95(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and Student's 95 % interval of it; of paired differences over seeds, say.

    >>> interval95([1.0, 2.0, 3.0])
    (2.0, -0.48..., 4.48...)
    """
    if len(numbers) < 2:
        return mean(numbers), math.nan, math.nan
    centre = mean(numbers)
    half = student(len(numbers) - 1) * stdev(numbers) / len(numbers) ** 0.5
    return centre, centre - half, centre + half


def middle_of(numbers: Sequence[float | None]) -> float:
    """The median, a run that never got there counting as infinite.

    >>> middle_of([3.0, None, 5.0])
    5.0
    """
    ordered = sorted(math.inf if v is None else v for v in numbers)
    half = len(ordered) // 2
    if not ordered:
        return math.nan
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def interval_of(numbers: Sequence[float | None], level: float = 0.95) -> tuple[float, float]:
    """A distribution-free interval of the median: two order statistics, all of them for very few seeds.

    >>> interval_of([float(i) for i in range(1, 11)])
    (2.0, 9.0)
    """
    ordered = sorted(math.inf if v is None else v for v in numbers)
    n = len(ordered)
    cut = 0
    # Ordered number cut + 1 and its mirror cover the median unless cut or fewer lie on one side of it.
    while cut + 1 < n / 2 and 1 - 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n >= level:
        cut += 1
    return ordered[cut], ordered[n - 1 - cut]
