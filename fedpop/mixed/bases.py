"""Columns that a formula makes of a whole column: ``poly()`` and ``ns()``, from sums over rows.

Orthogonal polynomials follow from power sums of t = (x - mean) / sd: with H their Hankel matrix, H = L L',
columns of (1, t, t^2, ...) L^-T are orthonormal, and they are R's. Knots of natural splines are quantiles,
which no sum has: rows are counted in the bins of a grid, a site's bins of few rows go together with their
neighbours before they leave it, and knots are at the bins where a share of all rows has been counted.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError, SettingsError
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.formula import BASES, FormulaPart, Tokens, arguments, calls_in, shown
from fedpop.questions import Question, Units
from fedpop.questions.schema import Moments

KNOT_BINS = 200
"""Bins of the grid that knots are rounded to."""
KNOT_REACH = 5.0
"""How many standard deviations it reaches on either side of the mean, where no range is given."""
WORST_CONDITION = 1e8
"""Of power sums scaled to one: beyond it a polynomial has fewer than eight digits of R's."""
EXACT = "exact"


@dataclass(frozen=True)
class BasisCall:
    """``poly(x, 2)`` or ``ns(x, 4)``: what of, and how it was asked for."""

    text: str
    kind: str
    inner: FormulaPart
    count: int
    """The degree, or the degrees of freedom; 0 where knots say it."""
    raw: bool = False
    knots: tuple[float, ...] | None = None
    exact: bool = False
    """Knots are quantiles of the rows themselves."""
    boundary: tuple[float, float] | None = None
    reach: tuple[float, float] | None = None
    """Ends of the grid."""

    @classmethod
    def of(cls, part: FormulaPart) -> BasisCall:
        """What a part that is a basis asks for.

        >>> from fedpop.mixed.formula import scanned
        >>> tokens = scanned("ns(log(x), df = 3, range = c(0, 5))")
        >>> call = BasisCall.of(FormulaPart(shown(tokens), tokens))
        >>> call.inner.text, call.count, call.reach
        ('log(x)', 3, (0.0, 5.0))
        """
        kind = part.tokens[0]
        first, *others = arguments(part.tokens)
        places = ["degree"] if kind == "poly" else ["df", "knots"]
        known = (*places, "raw") if kind == "poly" else (*places, "Boundary.knots", "range")
        given: dict[str, Tokens] = {}
        for tokens in others:
            if tokens[1:2] == ("=",):
                name, value = tokens[0], tokens[2:]
            else:
                name, value = next((n for n in places if n not in given), ""), tokens
            if name not in known:
                listed = ", ".join(known)
                raise SettingsError(f"{part.text}: {kind}() takes a column or an expression, and {listed}")
            given[name] = value
        if not first or any(call in BASES for call in calls_in(first)):
            raise SettingsError(f"{part.text}: {kind}() takes a column or an expression first")
        inner = FormulaPart(shown(first), first)
        numbers = {n: _numbers(part, n, v) for n, v in given.items() if n != "raw" and '"' not in v[0]}
        count = int(numbers.get("degree", numbers.get("df", (1.0 if kind == "poly" else 0.0,)))[0])
        knots, words = numbers.get("knots"), given.get("knots", ())
        if words and knots is None and words != (f'"{EXACT}"',):
            raise SettingsError(f'{part.text}: knots are numbers, c(1, 2), or "exact"')
        if max(count, len(knots or ())) > KNOT_BINS:
            raise SettingsError(f"{part.text}: {kind}() makes no more than {KNOT_BINS} columns")
        if not knots and count < 1:
            raise SettingsError(f"{part.text}: say how many columns, as in {kind}(x, 3)")
        if knots and "df" in given:
            raise SettingsError(f"{part.text}: give df or knots, not both")
        ends = {n: _ends(part, n, numbers[n]) for n in ("Boundary.knots", "range") if n in numbers}
        raw = given.get("raw", ("FALSE",))[0] in ("TRUE", "T")
        boundary, reach = ends.get("Boundary.knots"), ends.get("range")
        return cls(part.text, kind, inner, count, raw, knots, bool(words) and knots is None, boundary, reach)

    @property
    def columns(self) -> int:
        return len(self.knots) + 1 if self.knots else self.count

    @property
    def names(self) -> list[str]:
        """Of its columns, as R has them."""
        many = range(1, self.columns + 1)
        return [f"{self.text}{j}" for j in many] if self.columns > 1 else [self.text]

    @property
    def needs(self) -> bool:
        """Something has to be known of all rows."""
        if self.kind == "poly":
            return not self.raw
        return not self.exact and (self.boundary is None or (self.knots is None and self.count > 1))

    @property
    def by_moments(self) -> bool:
        """That is reckoned from the mean."""
        return self.needs and self.reach is None


def _numbers(part: FormulaPart, name: str, tokens: Tokens) -> tuple[float, ...]:
    inner = arguments(tokens) if tokens[:2] == ("c", "(") else [tokens]
    try:
        values = tuple(float(ast.literal_eval("".join(one))) for one in inner)
        if not all(map(math.isfinite, values)):
            raise ValueError("infinite")
        return values
    except (ValueError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise SettingsError(f"{part.text}: {name} is a number, or several, as in c(1, 2.5)") from error


def _ends(part: FormulaPart, name: str, values: Sequence[float]) -> tuple[float, float]:
    if len(values) != 2 or not values[0] < values[1]:
        raise SettingsError(f"{part.text}: {name} are two numbers, the smaller first")
    return values[0], values[1]


@dataclass(frozen=True)
class Basis:
    """What columns are made by: of ``poly`` mean and sd, and rows of coefficients; of ``ns`` knots."""

    kind: str
    centre: float = 0.0
    scale: float = 1.0
    coefficients: tuple[tuple[float, ...], ...] = ()
    knots: tuple[float, ...] = ()
    boundary: tuple[float, float] = (0.0, 1.0)

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Basis:
        rows = tuple(tuple(map(float, row)) for row in plain["coefficients"])
        knots, (low, high) = tuple(map(float, plain["knots"])), plain["boundary"]
        kind, centre, scale = str(plain["kind"]), float(plain["centre"]), float(plain["scale"])
        return cls(kind, centre, scale, rows, knots, (float(low), float(high)))

    def columns(self, x: np.ndarray) -> np.ndarray:
        """``[n, k]``."""
        if self.kind == "ns":
            return natural_spline(x, self.knots, self.boundary)
        t = (x - self.centre) / self.scale
        powers = np.vander(t, len(self.coefficients[0]), increasing=True)
        return np.asarray(powers @ np.array(self.coefficients).T)

    @property
    def words(self) -> str:
        """Where knots are."""
        low, high = self.boundary
        inside = ", ".join(f"{knot:.6g}" for knot in self.knots)
        return f"knots = c({inside}), Boundary.knots = c({low:.6g}, {high:.6g})"


def natural_spline(x: np.ndarray, knots: Sequence[float], boundary: tuple[float, float]) -> np.ndarray:
    """R's ``ns``: cubic B-splines without second derivatives at the boundary, and linear beyond it."""
    from scipy.interpolate import BSpline  # takes a second

    at = np.sort(np.array([*boundary * 4, *knots], dtype=np.float64))
    splines = BSpline(at, np.eye(len(at) - 4), 3)
    bent = splines.derivative(2)(np.array(boundary))[:, 1:]
    turn = np.linalg.qr(bent.T, mode="complete")[0][:, 2:]
    inside = np.clip(x, *boundary)
    slope = splines.derivative(1)(inside) * (x - inside)[:, None]
    return np.asarray((splines(inside) + slope)[:, 1:] @ turn)


# --- polynomials -------------------------------------------------------------------------------------


def powers_of(column: str) -> str:
    """Under which name power sums of a column are."""
    return json.dumps([column, "powers"])


@dataclass(frozen=True)
class PowerSums(Question[Tensors]):
    """Sums of powers of standardised columns, up to twice the degree. A site of many units answers where it
    has more rows than powers, which few rows would solve for."""

    columns: tuple[str, ...]
    degrees: tuple[int, ...]
    minimum: int
    many: bool
    name: ClassVar[str] = "power sums"
    varied: ClassVar[bool] = True

    def ask(self, known: Tensors) -> Tensors:
        return {"mean": known["mean"], "sd": known["sd"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        sums: Tensors = {
            powers_of(column): torch.zeros(2 * degree + 1, dtype=torch.float64)
            for column, degree in zip(self.columns, self.degrees, strict=True)
        }
        for table in units.tables():
            each = zip(self.columns, self.degrees, asked["mean"], asked["sd"], strict=True)
            for column, degree, mean, sd in each:
                t = (torch.from_numpy(np.array(table[column], dtype=np.float64)) - mean) / sd
                if len(t) >= (2 * degree + self.minimum if self.many else 0):
                    powers = [t**k for k in range(2 * degree + 1)]
                    sums[powers_of(column)] += torch.stack([p.sum() for p in powers])
        return Answer(torch.ones(len(units.cohort), dtype=torch.bool), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


def polynomial(call: BasisCall, moments: Moments, sums: Tensor) -> Basis:
    """From power sums."""
    size = call.count + 1
    hankel = np.array([[float(sums[i + j]) for j in range(size)] for i in range(size)])
    root = np.sqrt(np.abs(np.diag(hankel)))
    scaled = hankel / np.outer(root, root) if root.all() else np.zeros_like(hankel)
    if not np.linalg.cond(scaled) < WORST_CONDITION:
        raise DataError(
            f"{call.text}: the rows do not determine a polynomial of degree {call.count}, or not to the "
            "digits that R has; take a lower degree, a transformed column, or ns()"
        )
    inverse = np.linalg.inv(np.linalg.cholesky(scaled)) / root
    rows = tuple(tuple(row) for row in inverse[1:].tolist())
    return Basis("poly", moments.mean, moments.sd, rows)


# --- knots -------------------------------------------------------------------------------------------


def bins_of(column: str) -> str:
    """Under which name counts of a column's bins are."""
    return json.dumps([column, "bins"])


@dataclass(frozen=True)
class BinCounts(Question[Tensors]):
    """How many rows are in each bin of a grid; what is outside counts for the outermost ones."""

    columns: tuple[str, ...]
    bins: int
    minimum: int
    many: bool
    name: ClassVar[str] = "counts of bins"
    varied: ClassVar[bool] = True

    def ask(self, known: Tensors) -> Tensors:
        return {"low": known["low"], "high": known["high"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        sums = {bins_of(column): torch.zeros(self.bins, dtype=torch.float64) for column in self.columns}
        for table in units.tables():
            for column, low, high in zip(self.columns, asked["low"], asked["high"], strict=True):
                x = np.asarray(table[column], dtype=np.float64)
                width = (float(high) - float(low)) / self.bins
                place = np.clip(np.floor((x - float(low)) / width), 0, self.bins - 1).astype(np.int64)
                counts = np.bincount(place, minlength=self.bins)
                if self.many:
                    counts = merged(counts, self.minimum)
                sums[bins_of(column)] += torch.from_numpy(counts.astype(np.float64))
        return Answer(torch.ones(len(units.cohort), dtype=torch.bool), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


def merged(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Bins put together from either end until each has so many rows, counted where the median of them is;
    none where there are fewer in all.

    >>> merged(np.array([1, 0, 4, 5, 3, 1, 1]), 5).tolist()
    [0, 0, 5, 5, 5, 0, 0]
    """
    out, half = np.zeros_like(counts), int(counts.sum()) / 2
    if counts.sum() < minimum:
        return out
    middle = int(np.searchsorted(counts.cumsum(), half))
    rest = np.zeros_like(counts)
    for places in (range(middle), range(len(counts) - 1, middle, -1)):
        cell: list[int] = []
        for i in places:
            cell += [i] * int(counts[i])
            if len(cell) >= minimum:
                out[cell[len(cell) // 2]] += len(cell)
                cell = []
        np.add.at(rest, cell, 1)
    rest[middle] += counts[middle]
    last = np.repeat(np.arange(len(counts)), rest)
    if 0 < len(last) < minimum:  # it joins the cell beside it
        beside = np.flatnonzero(out)
        out[beside[np.abs(beside - middle).argmin()]] += len(last)
    elif len(last):
        out[last[len(last) // 2]] += len(last)
    return out


def grid_of(call: BasisCall, moments: Mapping[str, Moments]) -> tuple[float, float]:
    """Where the bins of a column begin and end."""
    if call.reach is not None:
        return call.reach
    known = moments[call.inner.text]
    return known.mean - KNOT_REACH * known.sd, known.mean + KNOT_REACH * known.sd


def spline(call: BasisCall, ends: tuple[float, float], counts: Tensor, minimum: int) -> Basis:
    """Boundary knots at the outermost bins with rows enough, others where each share of rows inside is
    reached; all at the middles of bins."""
    each = merged(counts.round().long().numpy(), minimum)
    low, high = ends
    middles = low + (np.arange(len(each)) + 0.5) * (high - low) / len(each)
    there = np.flatnonzero(each)
    if len(there) < 2:
        raise DataError(f"{call.text}: all rows are in one bin of the grid; give range = c(low, high)")
    boundary = call.boundary or (float(middles[there[0]]), float(middles[there[-1]]))
    knots = call.knots
    if knots is None:
        inside = (middles >= boundary[0]) & (middles <= boundary[1])
        share = np.where(inside, each, 0).cumsum()
        wanted = share[-1] * np.arange(1, call.count) / call.count
        knots = tuple(float(middles[i]) for i in np.searchsorted(share, wanted))
    return _checked(call, knots, boundary)


def _checked(call: BasisCall, knots: tuple[float, ...], boundary: tuple[float, float]) -> Basis:
    every = [boundary[0], *sorted(knots), boundary[1]]
    if any(a >= b for a, b in pairwise(every)):
        shown_knots = ", ".join(f"{k:.6g}" for k in every)
        raise DataError(
            f"{call.text}: knots fall together or outside ({shown_knots}): take fewer degrees of freedom, a "
            "narrower range = c(low, high), or give knots = and Boundary.knots ="
        )
    return Basis("ns", knots=tuple(sorted(knots)), boundary=boundary)


def without_sums(call: BasisCall, values: np.ndarray | None) -> Basis:
    """Where nothing has to be asked: raw powers, knots that are given, or exact ones of these rows."""
    if call.kind == "poly":
        eye = np.eye(call.count + 1)[1:]
        return Basis("poly", coefficients=tuple(tuple(row) for row in eye.tolist()))
    boundary, knots = call.boundary, call.knots or ()
    if call.exact:
        if values is None:
            raise SettingsError(f'{call.text}: knots = "exact" needs all rows in one place; leave it out')
        boundary = boundary or (float(values.min()), float(values.max()))
        inside = values[(values >= boundary[0]) & (values <= boundary[1])]
        knots = tuple(float(v) for v in np.quantile(inside, np.arange(1, call.count) / call.count))
    assert boundary is not None
    return _checked(call, knots, boundary)
