"""What columns of tables at many sites have in common, without seeing a row: moments and names of levels.

Two questions before a fit. The first asks for totals: of a numeric column how many rows and their sum, of a
categorical one how many rows each level has, which is a sum under the level's name. The second asks for
squares about the means that the first found: sums of squares themselves would lose every digit of a column
whose mean is far from zero. Cells of fewer than ``minimum`` rows are suppressed: at sites of many units
before the answer leaves, and in the total for everyone. (Where each unit is a site by itself
the server that adds up sees its counts.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpop.checked import Whole, require
from fedpop.errors import DataError
from fedpop.federation.table_format import MINIMUM
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.questions.base import Question, Table, Units

Ask = Callable[[Question[Any], Tensors], Any]
"""Whoever carries a question to those who are asked, given what is known, and gives what is made of it."""


@dataclass(frozen=True)
class Moments:
    """Of a numeric column: how many values, their mean, the sum of squares about it; least and largest
    stay at the site.

    >>> Moments.of([1.0, 2.0, 3.0])
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

    @property
    def sd(self) -> float:
        """The standard deviation, with n - 1 below."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass(frozen=True)
class Levels:
    """Of a categorical column: rows of each level; and how many rows are of suppressed levels."""

    counts: Mapping[str, int] = field(default_factory=dict)
    suppressed: int = 0
    places: Mapping[str, float] | None = None
    """Where tables give levels another order than the usual one; NaN where they do not agree on it."""
    ordered: bool = False
    """They say that it is an order from low to high."""

    def without_small(self, minimum: int) -> Levels:
        """Without cells below the minimum."""
        large = {n: c for n, c in self.counts.items() if c >= minimum}
        suppressed = self.suppressed + sum(self.counts.values()) - sum(large.values())
        return Levels(large, suppressed, self.places, self.ordered)

    @property
    def names(self) -> list[str]:
        """In the order that tables give; else sorted: as numbers where all are numbers. The first is the
        baseline.

        >>> Levels({"10": 7, "9": 7}).names, Levels({"b": 7, "a10": 7}).names
        (['9', '10'], ['a10', 'b'])
        >>> Levels({"high": 7, "low": 7}, places={"low": 0.0, "high": 1.0}).names
        ['low', 'high']
        """
        if self.places is None or not self.agreed:
            return sorted_levels(self.counts)
        return sorted(self.counts, key=lambda name: (self.places or {})[name])

    @property
    def agreed(self) -> bool:
        """Whoever gives levels an order gives the same."""
        return self.places is None or not any(
            math.isnan(self.places.get(name, math.nan)) for name in self.counts
        )


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
    """Which columns are asked about.

    Args:
        numeric: Columns of numbers, whose mean and deviation are wanted.
        categorical: Columns of names, whose levels are.
        minimum: The smallest cell that is not suppressed; 5 by default.
        many: Sites hold many units, and small cells do not leave them.
    """

    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    minimum: int = MINIMUM
    many: bool = True

    def __post_init__(self) -> None:
        require(Whole, minimum=self.minimum)

    def asked(self, ask: Ask) -> Summary:
        """What the sums say, as everyone receives it."""
        known: Tensors = {}
        for question in self.questions:
            known |= ask(question, known)
        out: dict[str, Moments | Levels] = {}
        for column in self.numeric:
            count, mean, squares = known[_moments(column)].tolist()
            out[column] = Moments(round(count), mean, squares)
        return out | {
            column: _levels(column, known).without_small(self.minimum) for column in self.categorical
        }

    @property
    def questions(self) -> tuple[Question[Tensors], ...]:
        """In the order in which they follow from one another."""
        if not (self.numeric or self.categorical):
            return ()
        totals = ColumnTotals(self.numeric, self.categorical, self.minimum, self.many)
        return (totals, ColumnSquares(self.numeric, self.minimum, self.many)) if self.numeric else (totals,)


@dataclass(frozen=True)
class ColumnTotals(Question[Tensors]):
    """Rows of every level, and rows and means of columns of numbers."""

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    minimum: int
    many: bool
    name: ClassVar[str] = "schema"
    varied: ClassVar[bool] = True

    def suppressing(self, minimum: int, exempt: Collection[str]) -> ColumnTotals:
        if set(self.categorical) <= set(exempt) and not self.numeric:
            return self
        return replace(self, minimum=max(self.minimum, minimum))

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        least = self.minimum if self.many else 0
        sums: Tensors = {_moments(column): _numbers(0, 0) for column in self.numeric}
        sums |= {_level(column, None): _numbers(0) for column in self.categorical}
        for table in units.tables():
            for column in self.numeric:
                values = _values(table, column)
                if len(values) >= least:
                    sums[_moments(column)] += _numbers(len(values), float(values.sum()))
            for column in self.categorical:
                values = _column(table, column)
                every = Levels(dict(zip(*counted(values), strict=True)))
                levels, given = every.without_small(max(least, 1)), given_places(values)
                sums[_level(column, None)] += levels.suppressed
                for level, count in levels.counts.items():
                    name = _level(column, level)
                    sums[name] = sums.get(name, _numbers(0)) + count
                    if given is not None:
                        place = given[level]
                        name, none = _place(column, level), _numbers(0, 0, 0)
                        sums[name] = sums.get(name, none) + count * _numbers(1, place, place * place)
                if hasattr(values, "cat") and values.cat.ordered:
                    sums[_place(column, None)] = _numbers(1)
        return Answer(_everyone(units), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        found = dict(total.plain)
        for column in self.numeric:
            count, added = total.plain_sum(_moments(column), _numbers(0, 0)).tolist()
            found[_moments(column)] = _numbers(count, added / count if count else 0)
        return found


@dataclass(frozen=True)
class ColumnSquares(Question[Tensors]):
    """Squares about the means, by which columns are standardised."""

    numeric: tuple[str, ...]
    minimum: int
    many: bool
    name: ClassVar[str] = "standardisation"

    def suppressing(self, minimum: int, exempt: Collection[str]) -> ColumnSquares:
        return replace(self, minimum=max(self.minimum, minimum))

    def ask(self, known: Tensors) -> Tensors:
        return {"mean": torch.stack([known[_moments(column)][1] for column in self.numeric])}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        least, sums = self.minimum if self.many else 0, {c: _numbers(0, 0) for c in self.numeric}
        for table in units.tables():
            for column, mean in zip(self.numeric, asked["mean"].tolist(), strict=True):
                values = _values(table, column)
                if len(values) >= least:
                    sums[column] += _numbers(len(values), float(np.square(values - mean).sum()))
        return Answer(_everyone(units), sums={_moments(column): value for column, value in sums.items()})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        found = {}
        for column in map(_moments, self.numeric):
            # Whoever answered the first question alone is in the mean, and not in the deviation.
            count, squares = total.plain_sum(column, _numbers(0, 0)).tolist()
            found[column] = _numbers(count, float(known[column][1]), squares)
        return found


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _everyone(units: Units) -> Tensor:
    return torch.ones(len(units.cohort), dtype=torch.bool, device=units.cohort.device)


def _moments(column: str) -> str:
    """Under which name a column's numbers are summed."""
    return json.dumps([column])


def _level(column: str, level: str | None) -> str:
    """Under which name rows of a level are; None: of suppressed ones."""
    return json.dumps([column, level])


def _place(column: str, level: str | None) -> str:
    """Under which name the place of a level in its table's order is; None: whether it is one from low to
    high."""
    return json.dumps([column, level, "place"])


def _levels(column: str, known: Tensors) -> Levels:
    read = [(json.loads(name), values) for name, values in known.items()]
    counts = {k[1]: round(float(v)) for k, v in read if len(k) == 2 and k[0] == column}
    places = {k[1]: v for k, v in read if len(k) == 3 and k[0] == column}
    suppressed, ordered = counts.pop(None, 0), places.pop(None, None) is not None
    return Levels(counts, suppressed, {n: _agreed(v) for n, v in places.items()} or None, ordered)


def _agreed(sums: Tensor) -> float:
    """The place of a level, from how many rows give it one, and their sums of places and squares; NaN where
    they are not the same."""
    rows, place, square = sums.tolist()
    return place / rows if square * rows - place * place < 0.5 else math.nan


def given_places(values: Any) -> Mapping[str, int] | None:
    """Places of levels in the order that a pandas categorical gives them, where it is not the usual one."""
    if not hasattr(values, "cat"):
        return None
    names = [str(c) for c in values.cat.categories]
    return {n: i for i, n in enumerate(names)} if names != sorted_levels(names) else None


def _column(table: Table, column: str) -> Any:
    if column not in table:
        raise DataError(f"there is no column {column!r} in a site's table")
    return table[column]


def _values(table: Table, column: str) -> npt.NDArray[np.float64]:
    return np.asarray(_column(table, column), dtype=np.float64)


def counted(values: Any) -> tuple[list[str], list[int]]:
    """Levels of a column and how often they are there; of a pandas categorical without looking at rows
    one by one."""
    if hasattr(values, "cat"):
        codes = values.cat.codes.to_numpy()
        counts = np.bincount(codes[codes >= 0], minlength=len(values.cat.categories))
        return [str(c) for c in values.cat.categories], counts.tolist()
    names, counts = np.unique(np.asarray(values, dtype=str), return_counts=True)
    return names.tolist(), counts.tolist()
