"""What columns of tables at many sites have in common, without seeing a row: moments and names of
levels.
 Asked once before a fit. A site answers with plain values that can be written as JSON: of a numeric
column how many, mean and sum of squares about it; of a categorical one how many rows each level has.
Answers add up. Cells of fewer than ``minimum`` rows are not told: at sites that hold many units before
the answer leaves, and in the total for everyone. (Where each unit is a site of its own its rows are its
own few: the server that adds up sees its counts.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedpop.checked import Whole, require
from fedpop.errors import DataError

MINIMUM = 5


@dataclass(frozen=True)
class Moments:
    """Of a numeric column: how many values, their mean, the sum of squares about it; least and largest
    stay at the site.

    >>> Moments.of([1.0, 2.0]) + Moments.of([3.0])
    Moments(count=3, mean=2.0, squares=2.0)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        array = np.asarray(values, dtype=np.float64)
        if not len(array):
            return cls()
        mean = float(array.mean())
        return cls(len(array), mean, float(np.square(array - mean).sum()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        share = other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * share
        return Moments(count, self.mean + apart * share, squares)

    @property
    def sd(self) -> float:
        """The standard deviation, with n - 1 below."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass(frozen=True)
class Levels:
    """Of a categorical column: rows of each level; and how many rows are of levels that are not told."""

    counts: Mapping[str, int] = field(default_factory=dict)
    untold: int = 0

    @classmethod
    def of(cls, names: Iterable[str], counts: Iterable[int]) -> Levels:
        return cls({str(n): int(c) for n, c in zip(names, counts, strict=True) if c})

    def __add__(self, other: Levels) -> Levels:
        counts = dict(self.counts)
        for name, count in other.counts.items():
            counts[name] = counts.get(name, 0) + count
        return Levels(counts, self.untold + other.untold)

    def told(self, minimum: int) -> Levels:
        """Without cells below the minimum."""
        kept = {n: c for n, c in self.counts.items() if c >= minimum}
        return Levels(kept, self.untold + sum(self.counts.values()) - sum(kept.values()))

    @property
    def names(self) -> list[str]:
        """Sorted: as numbers where all are numbers, the first one being the baseline.

        >>> Levels({"10": 7, "9": 7}).names, Levels({"b": 7, "a10": 7}).names
        (['9', '10'], ['a10', 'b'])
        """
        return sorted_levels(self.counts)


def sorted_levels(names: Iterable[str]) -> list[str]:
    """Names in the order of their numbers, where all of them are numbers; else in that of the
    alphabet."""
    names = list(names)
    try:
        return sorted(names, key=lambda n: (float(n), n))
    except ValueError:
        return sorted(names)


Summary = Mapping[str, Moments | Levels]


@dataclass(frozen=True)
class Schema:
    """Which columns are asked about; ``minimum`` is the smallest cell that is told of.

    >>> schema = Schema(numeric=("age",), categorical=("sex",), minimum=2)
    >>> anna = schema.answer({"age": [30.0, 40.0], "sex": ["f", "f"]})
    >>> ben = schema.answer({"age": [50.0], "sex": ["m"]})
    >>> found = schema.finish([anna, ben])
    >>> found["age"].mean, found["sex"]
    (40.0, Levels(counts={'f': 2}, untold=1))
    """

    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    minimum: int = MINIMUM

    def __post_init__(self) -> None:
        require(Whole, minimum=self.minimum)

    def answer(self, table: Mapping[str, Any], many: bool = False) -> Summary:
        """A site's part; ``many``: it holds many units, and small cells do not leave it."""
        out: dict[str, Moments | Levels] = {}
        for name in (*self.numeric, *self.categorical):
            if name not in table:
                raise DataError(f"there is no column {name!r} in a site's table")
        for name in self.numeric:
            moments = Moments.of(table[name])
            out[name] = Moments() if many and moments.count < self.minimum else moments
        for name in self.categorical:
            levels = Levels.of(*counted(table[name]))
            out[name] = levels.told(self.minimum) if many else levels
        return out

    def finish(self, answers: Iterable[Summary]) -> Summary:
        """What everyone is told of the sum."""
        total: dict[str, Moments | Levels] = {n: Moments() for n in self.numeric}
        total |= {n: Levels() for n in self.categorical}
        for answer in answers:
            total = {n: v + answer[n] for n, v in total.items()}  # type: ignore[operator]
        return {n: v.told(self.minimum) if isinstance(v, Levels) else v for n, v in total.items()}

    @staticmethod
    def plain(summary: Summary) -> dict[str, dict[str, Any]]:
        """As plain values, for a message."""
        return {
            n: {"counts": dict(v.counts), "untold": v.untold}
            if isinstance(v, Levels)
            else {"count": v.count, "mean": v.mean, "squares": v.squares}
            for n, v in summary.items()
        }

    @staticmethod
    def read(plain: Mapping[str, Mapping[str, Any]]) -> Summary:
        """A summary out of plain values."""
        return {n: Levels(**v) if "counts" in v else Moments(**v) for n, v in plain.items()}


def counted(values: Any) -> tuple[list[str], list[int]]:
    """Levels of a column and how often they are there; of a pandas categorical without looking at rows
    one by one."""
    if hasattr(values, "cat"):
        codes = values.cat.codes.to_numpy()
        counts = np.bincount(codes[codes >= 0], minlength=len(values.cat.categories))
        return [str(c) for c in values.cat.categories], counts.tolist()
    names, counts = np.unique(np.asarray(values, dtype=str), return_counts=True)
    return names.tolist(), counts.tolist()
