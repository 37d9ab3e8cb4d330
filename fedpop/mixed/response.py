"""What is on the left of a formula: numbers, counts, yes or no, or so many of so many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedpop.errors import DataError, SettingsError
from fedpop.mixed.design import Design, codes_of
from fedpop.mixed.families import Family
from fedpop.mixed.formula import Formula, FormulaPart, columns_of
from fedpop.mixed.table import Rows


@dataclass(frozen=True)
class Response:
    """y ``[n]`` with weights, and what the log-density has beside them, summed over rows of each."""

    y: np.ndarray
    weight: np.ndarray
    constant: np.ndarray
    """``[n]``: terms without a parameter (of binomials the ways to choose, of weighted normals log w /
    2)."""
    trials: bool = False


def response_of(
    formula: Formula, family: Family, design: Design, rows: Rows, weights: FormulaPart | None
) -> Response:
    """The checked response of these rows."""
    ones = np.ones(len(rows))
    weight = (
        ones
        if weights is None
        else _checked(
            design.numbers(weights, rows), _positive, rows, f"the weight {weights.text}", "positive"
        )
    )
    part = formula.response
    if part.tokens[0] == "cbind" and len(part.tokens) > 1:
        return _trials(part, family, design, rows, weights)
    y = _yes_or_no(part, design, rows) if family.binomial else design.numbers(part, rows)
    if family.gaussian:
        return Response(y, weight, 0.5 * np.log(weight))
    if not family.binomial:
        good, must = (_positive, "positive") if family.name == "gamma" else (_count, COUNT)
        return Response(_checked(y, good, rows, part.text, must), weight, np.zeros(len(rows)))
    if weights is None:
        text = "0 or 1 (so many of so many are written cbind(successes, failures))"
        return Response(_checked(y, lambda v: (v == 0) | (v == 1), rows, part.text, text), ones, 0 * ones)
    y = _checked(y, lambda v: (v >= 0) & (v <= 1), rows, part.text, "a share between 0 and 1")
    whole = "whole, as numbers of trials are, with a whole number of successes"
    weight = _checked(weight, lambda w: w == w.round(), rows, f"the weight {weights.text}", whole)
    hits = y * weight
    _checked(
        hits, lambda v: np.abs(v - v.round()) < 1e-6 * (1 + v), rows, f"{part.text} times its weight", whole
    )
    return Response(hits.round() / weight, weight, ways(hits.round(), weight), True)


def _trials(
    part: FormulaPart, family: Family, design: Design, rows: Rows, weights: FormulaPart | None
) -> Response:
    if not family.binomial:
        raise SettingsError(f"{part.text} is a response of family='binomial', not {family.name!r}")
    if weights is not None:
        raise SettingsError(f"{part.text} has its trials already; leave weights out")
    inner, cuts, depth = part.tokens[2:-1], [], 0
    for i, token in enumerate(inner):
        depth += (token == "(") - (token == ")")
        if token == "," and depth == 0:
            cuts.append(i)
    if len(cuts) != 1:
        raise SettingsError(f"{part.text}: cbind() takes successes and failures")
    halves = [FormulaPart(part.text, t) for t in (inner[: cuts[0]], inner[cuts[0] + 1 :])]
    counts = [
        _checked(
            design.numbers(half, rows),
            _count,
            rows,
            f"{what} in {part.text}",
            COUNT,
        )
        for half, what in zip(halves, ("successes", "failures"), strict=True)
    ]
    total = counts[0] + counts[1]
    share = np.divide(counts[0], total, out=np.zeros(len(total)), where=total > 0)
    return Response(share, total, ways(counts[0], total), True)


def ways(hits: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """log of the number of ways to choose."""
    h, n = torch.tensor(hits), torch.tensor(trials)
    found: np.ndarray = (torch.lgamma(n + 1) - torch.lgamma(h + 1) - torch.lgamma(n - h + 1)).numpy()
    return found


def _yes_or_no(part: FormulaPart, design: Design, rows: Rows) -> np.ndarray:
    """A column of two categories as 0 and 1, the first in the alphabet being 0; else numbers."""
    column = part.column
    if column is None or not hasattr(rows.columns[column], "cat"):
        return design.numbers(part, rows)
    values = rows.columns[column].cat.remove_unused_categories()
    if design.outcomes:
        return codes_of(values, design.outcomes, column, rows).astype(np.float64)
    require_two(column, [str(c) for c in values.cat.categories])
    found: np.ndarray = values.cat.codes.to_numpy().astype(np.float64)
    return found


def require_two(column: str, names: Sequence[str]) -> None:
    """Raise unless there are two outcomes."""
    if len(names) != 2:
        raise DataError(
            f"the response {column!r} has {len(names)} categories ({', '.join(names[:5])}); a "
            "yes or no has two"
        )


COUNT = "a whole number, 0 or more"


def _count(values: np.ndarray) -> np.ndarray:
    return np.asarray((values >= 0) & (values == values.round()))


def _positive(values: np.ndarray) -> np.ndarray:
    return np.asarray(values > 0)


def _checked(
    values: np.ndarray, good: Callable[[np.ndarray], np.ndarray], rows: Rows, what: str, must: str
) -> np.ndarray:
    bad = ~good(values)
    if bad.any():
        i = int(bad.argmax())
        raise DataError(f"row {int(rows.numbers[i])}: {what} is {values[i]:g}; it must be {must}")
    return values


def response_columns(formula: Formula, weights: FormulaPart | None) -> list[str]:
    """Columns that the response and its weights are made of."""
    tokens = (*formula.response.tokens, *(() if weights is None else ("+", *weights.tokens)))
    return columns_of(tokens)
