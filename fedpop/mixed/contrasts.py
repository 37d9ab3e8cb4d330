"""Questions about fixed effects, answered from estimates, their covariance and degrees of freedom:
hypotheses, contrasts, analysis of variance, marginal means and their differences."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.mixed.degrees import Laws, laws_of
from fedpop.mixed.design import CENTRED, Design
from fedpop.mixed.formula import FormulaPart, columns_of
from fedpop.mixed.inference import f_tail, t_quantile, two_sided
from fedpop.mixed.table import pandas, rows_of

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

NUMBER = re.compile(r"\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?")
ADJUSTED = ("none", "tukey", "bonferroni", "holm")
TYPES = {"2": "second", "II": "second", "3": "third", "III": "third"}
"""How types of hypotheses are written."""
LARGEST_REFERENCE_GRID = 100_000
"""Combinations of levels at most that marginal means are averages over."""
SAME_SPAN = 1e-8
"""Residual at which columns of two codings span the same space."""


@dataclass(frozen=True)
class Hypothesis:
    """The test of one or several linear hypotheses about fixed effects: t of one, F of several; where the law
    of estimates is normal, z and chi-square."""

    text: str
    statistic: float
    numerator: int
    denominator: float
    p_value: float
    estimate: float | None = None
    """Of a single hypothesis, its left side less its right one, and the standard error."""
    standard_error: float | None = None

    def __str__(self) -> str:
        p = f"p = {self.p_value:.4g}"
        normal = math.isinf(self.denominator)
        if self.estimate is not None:
            law = "z" if normal else f"t on {self.denominator:.2f} degrees of freedom"
            at = f"estimate {self.estimate:.6g} (standard error {self.standard_error:.4g})"
            return f"{self.text}: {at}, {law} = {self.statistic:.4f}, {p}"
        if normal:
            return f"{self.text}: chi-square {self.statistic:.4f} on {self.numerator} degrees of freedom, {p}"
        degrees = f"{self.numerator} and {self.denominator:.2f}"
        return f"{self.text}: F {self.statistic:.4f} on {degrees} degrees of freedom, {p}"


# --- hypotheses ------------------------------------------------------------------------------------


def hypothesis(fit: MixedFit, text: str | Sequence[str], degrees: str | None) -> Hypothesis:
    """The test of an equation, or of several at once."""
    texts = [text] if isinstance(text, str) else list(text)
    if not texts:
        raise SettingsError("there is nothing to test: write an equation, as 'x = 0'")
    names, laws = list(fit.coefficients), laws_of(fit, degrees)
    read = [equation(one, names) for one in texts]
    rows, values = torch.stack([row for row, _ in read]), laws.b.new_tensor([value for _, value in read])
    shown = "; ".join(t.strip() for t in texts)
    if len(rows) == 1:
        (found,) = _estimates(laws, rows)
        t = (found.estimate - float(values[0])) / found.se
        left = found.estimate - float(values[0])
        return Hypothesis(shown, t, 1, found.df, two_sided(t, found.df), left, found.se)
    tested = laws.tested(rows, values)
    p = f_tail(tested.statistic, tested.numerator, tested.denominator)
    times = tested.numerator if math.isinf(tested.denominator) else 1
    return Hypothesis(shown, times * tested.statistic, tested.numerator, tested.denominator, p)


def equation(text: str, names: Sequence[str]) -> tuple[Tensor, float]:
    """The row and the right side of a linear equation in names of coefficients.

    >>> equation("2 * x - x:sb = 1", ["(Intercept)", "x", "x:sb"])
    (tensor([ 0.,  2., -1.], dtype=torch.float64), 1.0)
    """
    left, sign, right = _halves(text, names)
    total = _side(left, names, text) - (_side(right, names, text) if sign else 0.0)
    if not bool(total[:-1].any()):
        raise SettingsError(f"{text!r} names no coefficient; there are {', '.join(names)}")
    return total[:-1], -float(total[-1])


def _pieces(text: str, names: Sequence[str]) -> list[str]:
    """Names, numbers and signs, in their order; the longest name that fits is meant."""
    out, at, longest = list[str](), 0, sorted(names, key=len, reverse=True)
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        name = next((n for n in longest if text.startswith(n, at)), None)
        number = NUMBER.match(text, at)
        piece = name or (number[0] if number else text[at])
        if name is None and number is None and text[at] not in "+-*/=":
            word = re.split(r"[\s+*/=-]", text[at:])[0] or text[at]
            raise SettingsError(f"{text!r}: there is no coefficient {word!r}; there are {', '.join(names)}")
        out.append(piece)
        at += len(piece)
    return out


def _halves(text: str, names: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    pieces = _pieces(text, names)
    if pieces.count("=") > 1:
        raise SettingsError(f"{text!r}: an equation has one =")
    at = pieces.index("=") if "=" in pieces else len(pieces)
    return pieces[:at], at < len(pieces), pieces[at + 1 :]


def _side(pieces: Sequence[str], names: Sequence[str], text: str) -> Tensor:
    """Coefficients of names, and a number last."""
    total = torch.zeros(len(names) + 1, dtype=torch.float64)
    sign, factor, at, divide, any_here = 1.0, 1.0, len(names), False, False

    def close() -> None:
        if not any_here:
            raise SettingsError(f"cannot read {text!r}: write an equation such as '2 * x - z = 1'")
        total[at] += sign * factor

    for piece in pieces:
        if piece in "+-":
            if any_here:
                close()
                sign, factor, at, divide, any_here = 1.0, 1.0, len(names), False, False
            sign = -sign if piece == "-" else sign
        elif piece in names:
            if at < len(names) or divide:
                raise SettingsError(f"{text!r} is not linear in the coefficients")
            at, any_here = names.index(piece), True
        elif piece in "*/":
            divide = piece == "/"
        else:
            factor, divide, any_here = factor / float(piece) if divide else factor * float(piece), False, True
    close()
    return total


# --- contrasts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Estimate:
    estimate: float
    se: float
    df: float


def _estimates(laws: Laws, rows: Tensor) -> list[_Estimate]:
    middle = rows @ laws.b
    se = torch.einsum("ki,ij,kj->k", rows, laws.covariance, rows).clamp(min=0).sqrt()
    return [
        _Estimate(float(m), float(s), laws.degrees(row) if float(s) > 0 else math.inf)
        for m, s, row in zip(middle, se, rows, strict=True)
    ]


def table(laws: Laws, rows: Tensor, index: Any, level: float, tests: bool = True) -> Any:
    """Estimates, standard errors, degrees of freedom and intervals of combinations, and tests against
    zero."""
    found, law = _estimates(laws, rows), "z" if laws.name == "none" else "t"
    out = []
    for one in found:
        wide = t_quantile(level, one.df) * one.se
        row = {"estimate": one.estimate, "se": one.se, "df": one.df}
        row |= {"lower": one.estimate - wide, "upper": one.estimate + wide}
        if tests:
            t = one.estimate / one.se if one.se > 0 else math.nan
            row |= {law: t, "p": two_sided(t, one.df)}
        out.append(row)
    return pandas().DataFrame(out, index=index)


def contrasts(fit: MixedFit, weights: Mapping[str, Any], level: float, degrees: str | None) -> Any:
    """A row for each combination; ``weights`` are of one, by coefficients, or of several by name."""
    several = all(isinstance(v, Mapping) for v in weights.values()) and len(weights) > 0
    named: Mapping[str, Any] = weights if several else {_shown(weights): weights}
    names, rows = list(fit.coefficients), []
    for each in named.values():
        unknown = [n for n in each if n not in names]
        if unknown or not each:
            what = f"there is no coefficient {unknown[0]!r}" if unknown else "a contrast has no coefficient"
            raise SettingsError(f"{what}; there are {', '.join(names)}")
        rows.append([float(each.get(n, 0.0)) for n in names])
    return table(laws_of(fit, degrees), torch.tensor(rows, dtype=torch.float64), list(named), level)


def _shown(weights: Mapping[str, Any]) -> str:
    text = " + ".join(n if float(w) == 1 else f"{float(w):g} * {n}" for n, w in weights.items())
    return text.replace("+ -1 * ", "- ").replace("+ -", "- ")


# --- analysis of variance --------------------------------------------------------------------------


def anova(fit: MixedFit, kind: int | str, degrees: str | None) -> Any:
    """A row for each term, as lmerTest has them: F, or chi-square where the law of estimates is normal."""
    if str(kind) not in TYPES:
        raise SettingsError(f"type is 2 or 3, not {kind!r}")
    design = fit.design
    if design.dropped:
        raise SettingsError(
            f"columns were dropped ({', '.join(design.dropped)}), so that hypotheses about terms are not "
            "what they seem: leave those terms out of the formula, or test coefficients by fit.test([...])"
        )
    laws, terms = laws_of(fit, degrees), design.fixed_terms
    hypotheses = (_marginal if TYPES[str(kind)] == "third" else _after_others)(fit)
    out = {}
    for i, term in enumerate(design.formula.fixed.terms):
        rows = hypotheses(terms, i)
        found = laws.tested(rows, rows.new_zeros(len(rows)))
        p = f_tail(found.statistic, found.numerator, found.denominator)
        if laws.name == "none":
            row = {"chisq": found.statistic * found.numerator, "df": found.numerator, "p": p}
        else:
            mean = found.statistic * float(fit.sigma or 1.0) ** 2
            row = {
                "sum_sq": mean * found.numerator,
                "mean_sq": mean,
                "num_df": found.numerator,
                "den_df": found.denominator,
                "F": found.statistic,
                "p": p,
            }
        out[":".join(part.text for part in term)] = row
    return pandas().DataFrame.from_dict(out, orient="index")


def _marginal(fit: MixedFit) -> Any:
    """Type III: coefficients of a term where all factors are coded to sum to zero, as differences from the
    baseline: degrees of freedom of several at once depend on which they are."""
    design = fit.design
    summed = replace(design, contrasts={p.text: CENTRED for p in design.formula.fixed.parts})
    columns, others = (_made_up(d) for d in (design, summed))
    to, *_ = np.linalg.lstsq(others, columns, rcond=None)
    if np.abs(others @ to - columns).max() > SAME_SPAN * np.abs(columns).max():
        raise SettingsError("the terms of this formula have no hypotheses of type III; take type=2")
    matrix = torch.from_numpy(to)
    return lambda terms, i: matrix[[at == i for at in terms]]


def _made_up(design: Design) -> np.ndarray:
    """The design's columns at made-up rows: what two codings have to do with each other shows on any."""
    count = 8 * len(design.fixed_names) + 40
    codes, numbers = dict[str, np.ndarray](), dict[str, list[np.ndarray]]()

    def drawn(column: str) -> np.ndarray:
        u = Key(0, purpose=f"rows of {column}").uniform(torch.tensor([0]), (count,), torch.float64)
        return u[0].numpy()

    for part in design.formula.fixed.parts:
        levels = design.part_levels(part)
        column = design.level_column(part) or part.text
        if levels is not None and column not in codes:
            codes[column] = np.minimum((drawn(column) * len(levels)).astype(int), len(levels) - 1)
        elif levels is None and part.text not in numbers:
            numbers[part.text] = [drawn(name) for name in design.piece_names(part, False)]

    def piece(part: FormulaPart, full: bool) -> list[np.ndarray]:
        levels = design.part_levels(part)
        if levels is None:
            return numbers[part.text]
        column = design.level_column(part)
        at = codes[column or part.text]
        if column is not None and part.baseline is not None:  # the same level, under another number
            at = np.array([levels.index(name) for name in design.levels[column]])[at]
        return [values[at] for values in design.coding(part, full)[1].T]

    return design.columns_of_terms(design.formula.fixed, count, piece)


def _after_others(fit: MixedFit) -> Any:
    """Type II: a term after all that do not contain it, those that do being left out of it. One contains
    another that has the same numbers in it and fewer factors."""
    design, products = fit.design, fit.groups.products
    sets = [frozenset(term) for term in design.formula.fixed.terms]
    numbers = [frozenset(p for p in s if design.part_levels(p) is None) for s in sets]

    def hypotheses(terms: Sequence[int], i: int) -> Tensor:
        around = {j for j, s in enumerate(sets) if sets[i] < s and numbers[i] == numbers[j]}
        mine = [k for k, at in enumerate(terms) if at == i]
        before = [k for k, at in enumerate(terms) if at != i and at not in around]
        after = [k for k, at in enumerate(terms) if at in around]
        rest = products[mine]
        if before:
            inner = torch.linalg.lstsq(products[before][:, before], products[before]).solution
            rest = rest - products[mine][:, before] @ inner
        rows = torch.zeros((len(mine), len(terms)), dtype=torch.float64)
        rows[:, mine + after] = rest[:, mine + after]
        # As lmerTest writes them, on which degrees of freedom of several at once depend: one by one where
        # others contain the term, by its coefficients where none does.
        root = torch.linalg.cholesky(rest[:, mine]) if after else rest[:, mine]
        found: Tensor = torch.linalg.solve(root, rows)
        return found / found[:, mine].diagonal().unsqueeze(1)

    return hypotheses


# --- marginal means --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarginalMeans:
    """Means of the linear predictor by levels, averaged over all others with equal weights and at the means
    of numbers, as emmeans has them; and their differences."""

    means: Any
    """A data frame: estimate, se, df, lower, upper; ``response`` is the inverse link of the estimate."""
    differences: Any
    """The same of differences of each two, with tests."""
    at: Mapping[str, float]
    """Where numbers were."""
    adjust: str

    def __str__(self) -> str:
        at = ", ".join(f"{name} = {value:.6g}" for name, value in self.at.items())
        lines = [f"Means of the linear predictor{f' at {at}' if at else ''}:", self.means.to_string()]
        how = "not adjusted" if self.adjust == "none" else f"adjusted by {self.adjust}"
        return "\n".join([*lines, "", f"Differences (p-values {how}):", self.differences.to_string()])


def marginal_means(
    fit: MixedFit,
    of: str | Sequence[str],
    at: Mapping[str, float],
    level: float,
    adjust: str,
    degrees: str | None,
) -> MarginalMeans:
    """Averages over the grid of all levels."""
    if adjust not in ADJUSTED:
        raise SettingsError(f"adjust is one of {', '.join(ADJUSTED)}, not {adjust!r}")
    of, design, pd = [of] if isinstance(of, str) else list(of), fit.design, pandas()
    fixed = list(dict.fromkeys(c for p in design.formula.fixed.parts for c in columns_of(p.tokens)))
    factors = {c: list(design.levels[c]) for c in fixed if c in design.levels and c not in at}
    unknown = [c for c in of if c not in factors]
    if unknown or not of:
        what = f"{unknown[0]!r} is no categorical predictor" if unknown else "name a predictor"
        raise SettingsError(f"{what}; there are {', '.join(factors) or 'none'}")
    numbers = {c: float(at[c]) if c in at else _mean(fit, c) for c in fixed if c not in factors}
    if math.prod(map(len, factors.values())) > LARGEST_REFERENCE_GRID:
        raise SettingsError("there are too many combinations of levels to average over; fix some by at={...}")
    grid = pd.DataFrame(list(product(*factors.values())), columns=list(factors)).assign(**numbers)
    for column in factors:
        grid[column] = pd.Categorical(grid[column], factors[column])
    beside = {c: 0.0 for c in design.predictors if c not in grid}
    rows = rows_of(grid.assign(**beside), design.formula, columns=fixed, missing="error", group=False)
    x = torch.from_numpy(np.ascontiguousarray(design.fixed(rows)))
    cells = list(product(*(factors[c] for c in of)))
    place = [tuple(values) for values in grid[of].astype(str).itertuples(index=False)]
    means = torch.stack([x[[p == cell for p in place]].mean(0) for cell in cells])
    laws, names = laws_of(fit, degrees), [" ".join(cell) for cell in cells]
    index = pd.Index(names, name=" ".join(of))
    found = table(laws, means, index, level, tests=False)
    if not fit.family.gaussian:
        eta = torch.from_numpy(found["estimate"].to_numpy().copy())
        found["response"] = fit.family.mean(eta).numpy()
    pairs = list(combinations(range(len(cells)), 2))
    rows_apart = torch.stack([means[i] - means[j] for i, j in pairs]) if pairs else means[:0]
    labels = [f"{names[i]} - {names[j]}" for i, j in pairs]
    apart = table(laws, rows_apart, labels, level)
    if len(pairs) and adjust != "none":
        apart["p"] = adjusted(apart, adjust, len(cells))
    return MarginalMeans(found, apart, numbers, adjust)


def _mean(fit: MixedFit, column: str) -> float:
    """Of a column of numbers over all rows, where the model has it as it is."""
    names, moments = fit.design.fixed_names, fit.design.moments
    if column not in names and column in moments:
        return moments[column].mean
    if column not in names:
        raise SettingsError(
            f"say at which {column!r} means are wanted, at={{{column!r}: ...}}: its mean is not "
            "known, since the formula has it inside expressions only"
        )
    return float(fit.groups.means[names.index(column)])


def adjusted(apart: Any, how: str, means: int) -> np.ndarray:
    """p-values of all differences together."""
    p, count = apart["p"].to_numpy(), len(apart)
    if how == "bonferroni":
        return np.asarray(np.minimum(p * count, 1.0))
    if how == "holm":
        order = np.argsort(p)
        worst = np.maximum.accumulate(np.minimum(p[order] * np.arange(count, 0, -1), 1.0))
        out = np.empty(count)
        out[order] = worst
        return out
    from scipy import stats  # takes a second

    t = np.abs(apart["t" if "t" in apart else "z"].to_numpy()) * math.sqrt(2)
    found: np.ndarray = stats.studentized_range.sf(t, means, apart["df"].to_numpy())
    return found
