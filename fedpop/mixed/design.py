"""Columns of the design, row by row, in R's coding: what a site computes from its rows and an agreed
schema. Expressions are arithmetic and a few functions, nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.mixed.bases import Basis, BasisCall
from fedpop.mixed.formula import (
    LOGICALS,
    WHOLE,
    Formula,
    FormulaPart,
    FormulaTerms,
    Tokens,
    closing,
    columns_of,
    is_name,
    scanned,
    shown,
    unquoted,
)
from fedpop.mixed.table import Rows, as_categories, labels, word
from fedpop.questions.schema import Levels, Moments, Schema, Summary

INTERCEPT = "(Intercept)"
YES_OR_NO = ("FALSE", "TRUE")
SHOWN = 3


@dataclass(frozen=True)
class Wanted:
    """What of which columns has to be agreed before rows can be coded."""

    categorical: tuple[str, ...]
    scaled: tuple[FormulaPart, ...]
    bases: tuple[BasisCall, ...] = ()
    """``poly()`` and ``ns()``, by their texts."""

    @classmethod
    def of(cls, formula: Formula, named: Collection[str]) -> Wanted:
        """Columns that hold names (``named``), those inside ``factor()``, and those that are scaled by all
        rows."""
        categorical, scaled = [], []
        for part in formula.parts[1:]:
            column, made = part.column, part.factor_of
            if made is not None:
                categorical.append(made)
            elif column is not None and column in named:
                categorical.append(column)
        for part in formula.parts:
            scaled += [FormulaPart(text, inner) for text, inner in scaled_parts(part.tokens).items()]
        bases = [BasisCall.of(part) for part in formula.parts if part.basis]
        for call in bases:
            if scaled_parts(call.inner.tokens):
                raise SettingsError(f"{call.text}: {call.kind}() scales by itself; leave scale() out")
            scaled += [call.inner] if call.by_moments else []
        named_bases = {call.text: call for call in bases}
        once = tuple(dict.fromkeys(scaled))
        return cls(tuple(dict.fromkeys(categorical)), once, tuple(named_bases.values()))

    def schema(self, minimum: int, many: bool = False) -> Schema:
        return Schema(tuple(scale_name(p.text) for p in self.scaled), self.categorical, minimum, many)

    def table(self, rows: Rows) -> dict[str, Any]:
        """The columns that a site summarises."""
        categories = {n: as_categories(rows.columns[n]) for n in self.categorical}
        wanted = [*self.scaled, *[call.inner for call in self.bases if call.needs]]
        return {scale_name(p.text): _finite(p, rows) for p in wanted} | categories


def _finite(part: FormulaPart, rows: Rows, moments: Mapping[str, Moments] | None = None) -> np.ndarray:
    """An expression's numbers, or an error that names the row where it has none."""
    values = evaluated(part, rows.columns, moments or {})
    bad = ~np.isfinite(values)
    if bad.any():
        i = int(bad.argmax())
        names = columns_of(part.tokens)
        values_there = ", ".join(f"{n} = {rows.columns[n].iloc[i]}" for n in names[:SHOWN])
        raise DataError(f"{part.text} is {values[i]} in row {int(rows.numbers[i])} ({values_there})")
    return values


def scale_name(column: str) -> str:
    """Under which name moments of a column are asked for: it may have categories as well."""
    return f"scale({column})"


@dataclass(frozen=True)
class Design:
    """The design of a formula, given levels (the first is the baseline) and moments that all agree
    on."""

    formula: Formula
    levels: Mapping[str, Sequence[str]]
    moments: Mapping[str, Moments]
    outcomes: tuple[str, ...] = ()
    """What the two outcomes of a yes or no are called, where sites had to agree on that."""
    contrasts: Mapping[str, str] = field(default_factory=dict)
    """How factors are coded that are not by treatment contrasts: by column, and ``C(x, sum)`` by its
    text."""
    ordered: tuple[str, ...] = ()
    """Factors that the tables say are ordered from low to high."""
    bases: Mapping[str, Basis] = field(default_factory=dict)
    """Polynomials and splines, by the texts of their calls."""
    dropped: tuple[str, ...] = ()
    """Fixed effects that are combinations of others, and are left out."""

    @classmethod
    def agreed(
        cls,
        formula: Formula,
        summary: Summary,
        given: Mapping[str, Sequence[Any]],
        minimum: int,
        contrasts: Mapping[str, str] | None = None,
        at_sites: bool = False,
    ) -> Design:
        """From the federation's summary; ``given`` are levels in the user's order, ``contrasts`` how columns
        are coded. Where rows are ``at_sites``, these say for themselves whether they have others than
        these."""
        levels = {}
        for name, found in summary.items():
            if not isinstance(found, Levels):
                continue
            if found.suppressed and not (at_sites and len(found.names) > 1):
                raise DataError(
                    f"column {name!r} has {found.suppressed} row(s) at levels of fewer than "
                    f"{minimum} rows, which are "
                    "suppressed; merge these levels, leave the rows out, or allow smaller cells: min_count=1"
                )
            names = found.names
            if not found.agreed and name not in given:
                raise DataError(
                    f"tables order the levels of {name!r} differently ({', '.join(names[:10])}); say which "
                    f"order is meant: levels={{{name!r}: [...]}}"
                )
            if name in given:
                order = [word(v) for v in given[name]]
                unknown = sorted(set(names) - set(order))
                if unknown:
                    raise SettingsError(
                        f"levels of {name!r}: {unknown[0]!r} is in the data and not in the list"
                    )
                names = [n for n in order if n in found.counts]
            if len(names) < 2:
                raise DataError(f"column {name!r} has one level only ({names[0]!r}): it is constant")
            levels[name] = tuple(names)
        extra = sorted(set(given) - set(levels))
        if extra:
            raise SettingsError(f"levels were given for {extra[0]!r}, which is no categorical predictor here")
        moments = {n[6:-1]: v for n, v in summary.items() if isinstance(v, Moments)}
        flat = [n for n, v in moments.items() if not v.sd > 0]
        if flat:
            raise DataError(f"column {flat[0]!r} is constant and cannot be scaled")
        extra = sorted(set(contrasts or {}) - set(levels))
        if extra:
            raise SettingsError(
                f"contrasts were given for {extra[0]!r}, which is no categorical predictor here"
            )
        coded = {name: coding_named(kind) for name, kind in (contrasts or {}).items()}
        coded |= {p.text: coding_named(p.contrast) for p in formula.parts[1:] if p.contrast is not None}
        ordered = tuple(n for n, found in summary.items() if isinstance(found, Levels) and found.ordered)
        return cls(formula, levels, moments, contrasts=coded, ordered=ordered)

    @property
    def predictors(self) -> list[str]:
        """Columns that new rows must have, beside the group."""
        parts = self.formula.parts[1:]
        return list(dict.fromkeys(c for part in parts for c in columns_of(part.tokens)))

    # --- names ---------------------------------------------------------------------------------

    @cached_property
    def fixed_names(self) -> list[str]:
        return [name for name in self._names(self.formula.fixed) if name not in self.dropped]

    @cached_property
    def random_names(self) -> list[str]:
        """Of the innermost factor first."""
        names = [n for block in self.formula.blocks for n in self._names(block)]
        within = list(zip(names, self.factor_of, strict=True))
        twice = [n for i, (n, at) in enumerate(within) if (n, at) in within[:i]]
        if twice:
            raise SettingsError(f"the random effect {twice[0]!r} is there twice; a term belongs to one block")
        return names

    @cached_property
    def factor_of(self) -> list[int]:
        """For each random effect the position of its grouping factor."""
        pairs = zip(self.formula.blocks, self.formula.factor_of, strict=True)
        return [at for block, at in pairs for _ in self._names(block)]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """How many random effects a level of each grouping factor has."""
        return tuple(self.factor_of.count(i) for i in range(len(self.formula.factors)))

    @property
    def effect_names(self) -> list[str]:
        """Random effects, told apart by their factors where there are several."""
        if len(self.formula.factors) == 1:
            return self.random_names
        factors = [self.formula.factors[at].name for at in self.factor_of]
        return [f"{name}|{factor}" for name, factor in zip(self.random_names, factors, strict=True)]

    @cached_property
    def blocks(self) -> list[int]:
        """For each random effect, the block in which it is correlated with others."""
        return [i for i, block in enumerate(self.formula.blocks) for _ in self._names(block)]

    @property
    def factors_of_double_bars(self) -> str | None:
        """The term after a double bar that has a factor, whose effects are correlated all the same."""
        if "||" not in scanned(self.formula.text):
            return None
        for block in self.formula.blocks:
            if not block.intercept and any(self.part_levels(part) is not None for part in block.parts):
                return ":".join(part.text for part in block.parts)
        return None

    def _names(self, terms: FormulaTerms) -> list[str]:
        out = [INTERCEPT] if terms.intercept else []
        for term, coded in zip(terms.terms, self._coded(terms), strict=True):
            pieces = [self.piece_names(part, full) for part, full in zip(term, coded, strict=True)]
            # The first factor varies fastest, as in R.
            out += [":".join(reversed(names)) for names in product(*reversed(pieces))]
        return out

    @cached_property
    def fixed_terms(self) -> list[int]:
        """Of each fixed effect the position of its term; -1: the intercept. All are there, those that were
        dropped too."""
        terms = self.formula.fixed
        out = [-1] if terms.intercept else []
        for i, (term, coded) in enumerate(zip(terms.terms, self._coded(terms), strict=True)):
            pieces = [self.piece_names(part, full) for part, full in zip(term, coded, strict=True)]
            out += [i] * math.prod(map(len, pieces))
        return out

    def level_column(self, part: FormulaPart) -> str | None:
        """The column of whose categories this part's columns are made; None for numbers."""
        made = part.factor_of
        if made is not None:
            return made
        return part.column if part.column in self.levels else None

    def part_levels(self, part: FormulaPart) -> Sequence[str] | None:
        """The levels of a factor, the baseline first; None for numbers."""
        if part.yes_or_no:
            return YES_OR_NO
        column = self.level_column(part)
        if column is None:
            return None
        levels, first = self.levels[column], part.baseline
        if first is None:
            return levels
        if first not in levels:
            raise SettingsError(f"{part.text}: there is no level {first!r}; there are {', '.join(levels)}")
        return (first, *[level for level in levels if level != first])

    def coding(self, part: FormulaPart, full: bool) -> tuple[list[str], np.ndarray]:
        """What the columns of a factor are called beside its name, and the columns at each of its levels,
        ``[levels, columns]``: an indicator of each level, or contrasts."""
        levels = self.part_levels(part)
        assert levels is not None
        if full:
            return list(levels), np.eye(len(levels))
        of_column = self.contrasts.get(self.level_column(part) or "", "treatment")
        found = self.contrasts.get(part.text, of_column)
        return _centred(levels) if found == CENTRED else CODINGS[found](levels)

    def piece_names(self, part: FormulaPart, full: bool) -> list[str]:
        """What a part's columns are called."""
        if self.part_levels(part) is None:
            return BasisCall.of(part).names if part.basis else [part.text]
        return [f"{part.text}{name}" for name in self.coding(part, full)[0]]

    def _coded(self, terms: FormulaTerms) -> list[list[bool]]:
        """For each part of each term: as all of its levels, or as contrasts to the baseline. Contrasts
        where the term without the factor is in the model, or, as R has it, within a term before; without an
        intercept the first factor has all."""
        first = not terms.intercept
        before, out = [frozenset[FormulaPart]()], []
        for term in terms.terms:
            full = []
            for part in term:
                categories = self.part_levels(part) is not None
                rest = frozenset(term) - {part}
                every = categories and not any(rest <= one for one in before)
                if categories and first:
                    every, first = True, False
                full.append(every)
            before.append(frozenset(term))
            out.append(full)
        return out

    # --- numbers -------------------------------------------------------------------------------

    def fixed(self, rows: Rows) -> np.ndarray:
        """``[n, p]``."""
        whole = self.all_fixed(rows)
        if not self.dropped:
            return whole
        return whole[:, [name not in self.dropped for name in self._names(self.formula.fixed)]]

    def all_fixed(self, rows: Rows) -> np.ndarray:
        """The same with those that were dropped."""
        return self._matrix(self.formula.fixed, rows)

    def random(self, rows: Rows) -> np.ndarray:
        """``[n, q]``."""
        return np.concatenate([self._matrix(block, rows) for block in self.formula.blocks], axis=1)

    def offset(self, rows: Rows) -> np.ndarray:
        """``[n]``."""
        total = np.zeros(len(rows))
        for part in self.formula.offsets:
            total = total + self.numbers(part, rows)
        return total

    def numbers(self, part: FormulaPart, rows: Rows) -> np.ndarray:
        """An expression's numbers, or an error that names the row where it has none."""
        return _finite(part, rows, self.moments)

    def _matrix(self, terms: FormulaTerms, rows: Rows) -> np.ndarray:
        return self.columns_of_terms(terms, len(rows), lambda part, full: self._piece(part, full, rows))

    def columns_of_terms(
        self, terms: FormulaTerms, count: int, piece: Callable[[FormulaPart, bool], list[np.ndarray]]
    ) -> np.ndarray:
        """``[count, p]`` products of what parts are, each coded by all levels or not."""
        columns = [np.ones(count)] if terms.intercept else []
        made: dict[tuple[FormulaPart, bool], list[np.ndarray]] = {}
        for term, coded in zip(terms.terms, self._coded(terms), strict=True):
            pieces = []
            for key in zip(term, coded, strict=True):
                if key not in made:
                    made[key] = piece(*key)
                pieces.append(made[key])
            for chosen in product(*reversed(pieces)):
                column = chosen[0]
                for other in chosen[1:]:
                    column = column * other
                columns.append(column)
        return np.stack(columns, axis=1) if columns else np.zeros((count, 0))

    def _piece(self, part: FormulaPart, full: bool, rows: Rows) -> list[np.ndarray]:
        levels = self.part_levels(part)
        if levels is None:
            if not part.basis:
                return [self.numbers(part, rows)]
            inner = BasisCall.of(part).inner
            return list(self.bases[part.text].columns(self.numbers(inner, rows)).T)
        column = self.level_column(part)
        if column is None:
            codes = self.numbers(part, rows).astype(np.int64)
        else:
            codes = codes_of(as_categories(rows.columns[column]), levels, column, rows)
        return [values[codes] for values in self.coding(part, full)[1].T]


def codes_of(values: Any, levels: Sequence[str], column: str, rows: Rows) -> np.ndarray:
    """Positions of levels ``[n]``, or an error that names one that was not there in training."""
    place = {name: j for j, name in enumerate(levels)}
    known = np.array([place.get(str(c), -1) for c in values.cat.categories], dtype=np.int64)
    codes: np.ndarray = known[values.cat.codes.to_numpy()]
    if (codes < 0).any():
        i = int((codes < 0).argmax())
        raise DataError(
            f"column {column!r}, row {int(rows.numbers[i])}: level {str(values.iloc[i])!r} was not there in "
            f"training; there were {', '.join(levels[:10])}"
        )
    return codes


# --- codings of factors ------------------------------------------------------------------------------

Coding = tuple[list[str], np.ndarray]


def _treatment(levels: Sequence[str]) -> Coding:
    return list(levels[1:]), np.eye(len(levels))[:, 1:]


def _sum(levels: Sequence[str]) -> Coding:
    k = len(levels)
    return [str(j) for j in range(1, k)], np.vstack((np.eye(k - 1), -np.ones(k - 1)))


def _helmert(levels: Sequence[str]) -> Coding:
    k = len(levels)
    below = np.triu(-np.ones((k, k - 1)))
    return [str(j) for j in range(1, k)], below + np.diag(np.arange(1.0, k), -1)[:, : k - 1]


def _poly(levels: Sequence[str]) -> Coding:
    """Orthogonal polynomials in the number of the level."""
    k = len(levels)
    at = np.arange(k) - (k - 1) / 2
    orthogonal, upper = np.linalg.qr(np.vander(at, k, increasing=True))
    named = [".L", ".Q", ".C", *[f"^{j}" for j in range(4, k)]]
    return named[: k - 1], (orthogonal * np.sign(np.diag(upper)))[:, 1:]


def _centred(levels: Sequence[str]) -> Coding:
    """Each level against the baseline, about the mean of all: what lmerTest's hypotheses are written in."""
    names, columns = _treatment(levels)
    return names, columns - 1 / len(levels)


CENTRED = "centred treatment"
CODINGS: dict[str, Callable[[Sequence[str]], Coding]] = {
    "treatment": _treatment,
    "sum": _sum,
    "helmert": _helmert,
    "poly": _poly,
}
"""What ``contrasts`` may say."""


def coding_named(name: str) -> str:
    """The coding of a name, R's among them.

    >>> coding_named("contr.sum")
    'sum'
    """
    found = str(name).removeprefix("contr.")
    if found not in CODINGS:
        raise SettingsError(f"contrasts are one of {', '.join(CODINGS)}, not {name!r}")
    return found


# --- expressions -----------------------------------------------------------------------------------


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "I": lambda x: x,
    "abs": np.abs,
    "as.integer": np.trunc,
    "as.numeric": lambda x: x,
    "ceiling": np.ceil,
    "cos": np.cos,
    "exp": np.exp,
    "expm1": np.expm1,
    "floor": np.floor,
    "ifelse": lambda where, yes, no: np.where(where, yes, no),
    "log": lambda x, base=None: np.log(x) if base is None else np.log(x) / np.log(base),
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "pmax": lambda first, *others: reduce(np.maximum, others, first),
    "pmin": lambda first, *others: reduce(np.minimum, others, first),
    "round": lambda x, digits=None: np.round(x, int(digits or False)),
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Not: np.logical_not,
    ast.And: np.logical_and,
    ast.Or: np.logical_or,
}
SPELLED = {"^": "**", "&": " and ", "|": " or ", "!": " not "}
"""R's operators as Python has them, with the same precedence."""


def evaluated(part: FormulaPart, rows: Mapping[str, Any], moments: Mapping[str, Moments]) -> np.ndarray:
    """Numbers ``[n]`` of an expression at these rows; ``moments`` are those of columns that it
    scales."""
    names: dict[str, str] = {}
    for token in filter(is_name, part.tokens):
        names.setdefault(token, f"v{len(names)}")
    columns = {alias: unquoted(token) for token, alias in names.items()}

    def parsed(tokens: Tokens) -> ast.expr:
        try:
            source = " ".join(names.get(token, SPELLED.get(token, token)) for token in tokens)
            return ast.parse(source, mode="eval").body
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise SettingsError(f"cannot read the expression {part.text!r} in the formula") from error

    tree = parsed(part.tokens)
    scaled = {ast.unparse(parsed(inner)): text for text, inner in scaled_parts(part.tokens).items()}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.Name):
            name = columns[node.id]
            return float(name == "TRUE") if name in LOGICALS else _numbers(rows, name, part)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.BoolOp):
            return reduce(OPERATORS[type(node.op)], [value(v) for v in node.values]) * 1.0
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
            sides = (node.left, node.comparators[0])
            if any(isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides):
                return OPERATORS[type(node.ops[0])](*map(words, sides)) * 1.0
            return OPERATORS[type(node.ops[0])](value(node.left), value(node.comparators[0])) * 1.0
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return call(columns[node.func.id], node.args)
        raise SettingsError(f"cannot read the expression {part.text!r} in the formula")

    def words(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Name):
            return labels(rows[columns[node.id]]).astype(str)
        raise SettingsError(f"{part.text}: a text is compared with a column")

    def call(name: str, arguments: list[ast.expr]) -> Any:
        if name in WHOLE:
            if len(arguments) != 1:
                raise SettingsError(f"{part.text}: {name}() takes a column, or an expression of columns")
            known = moments[scaled[ast.unparse(arguments[0])]]
            centred = value(arguments[0]) - known.mean
            return centred if name == "center" else centred / known.sd
        if name not in FUNCTIONS:
            raise SettingsError(
                f"{part.text}: there is no function {name!r} for formulas; there are "
                f"{', '.join(sorted((*FUNCTIONS, 'factor', *WHOLE)))}"
            )
        try:
            return FUNCTIONS[name](*[value(a) for a in arguments])
        except TypeError as error:
            raise SettingsError(f"{part.text}: {name}() does not take {len(arguments)} arguments") from error

    try:
        with np.errstate(all="ignore"):  # whoever asked names the row that is not finite
            found = np.asarray(value(tree), dtype=np.float64)
    except (ArithmeticError, RecursionError) as error:
        raise SettingsError(f"cannot work out the expression {part.text!r}: {error}") from error
    length = len(next(iter(rows.values())))
    return np.broadcast_to(found, (length,))


def _numbers(rows: Mapping[str, Any], column: str, part: FormulaPart) -> np.ndarray:
    values = rows[column]
    if hasattr(values, "cat") and set(values.cat.categories) <= set(YES_OR_NO):
        return np.asarray(values == "TRUE", dtype=np.float64)
    if hasattr(values, "cat"):
        raise DataError(f"{part.text}: column {column!r} has categories, not numbers")
    return np.asarray(values, dtype=np.float64)


def scaled_parts(tokens: Tokens) -> dict[str, Tokens]:
    """What is inside ``scale()`` or ``center()``, by its text; of a column by its name."""
    out: dict[str, Tokens] = {}
    for i, token in enumerate(tokens[:-2]):
        if token in WHOLE and tokens[i + 1] == "(":
            inner = tokens[i + 2 : closing(tokens, i + 1)]
            if any(other in WHOLE for other in inner):
                raise SettingsError(f"{shown(tokens)}: {token}() within another needs the rows twice")
            out[unquoted(inner[0]) if len(inner) == 1 else shown(inner)] = inner
    return out


@dataclass(frozen=True)
class Coordinates:
    """Columns are centred where that is the same model, and scaled; fixed effects that say nothing new are
    left out."""

    x_centre: Tensor
    x_scale: Tensor
    z_centre: Tensor
    z_scale: Tensor
    y_centre: float
    y_scale: float
    """Of chains: exact engines leave y in its units."""
    x_names: tuple[str, ...]
    z_names: tuple[str, ...]
    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    """How many random effects a group has at each level of nesting, the innermost first."""
    kept: tuple[int, ...] | None = None
    """Positions of the design's fixed effects that are in the model; None: all."""

    @property
    def intercept(self) -> bool:
        """There is a fixed intercept; it comes first."""
        return INTERCEPT in self.x_names

    def x(self, fixed: Tensor) -> Tensor:
        """The columns in the model, of all fixed ones of the design."""
        return fixed if self.kept is None else fixed[:, list(self.kept)]

    def fixed(self, b: Tensor) -> Tensor:
        """Coefficients on the user's scale ``[p]``."""
        return self.fixed_map @ b + self.fixed_shift

    @cached_property
    def fixed_map(self) -> Tensor:
        """Internal coefficients to the user's, ``[p, p]``."""
        out = torch.diag(1 / self.x_scale)
        if self.intercept:
            out[0] -= self.x_centre / self.x_scale
        return out

    @property
    def fixed_shift(self) -> Tensor:
        out = torch.zeros_like(self.x_scale)
        if self.intercept:
            out[0] = self.y_centre
        return out

    @cached_property
    def random_map(self) -> Tensor:
        """The same for random effects, ``[q, q]``: within a block its intercept takes what was
        centred."""
        out = torch.diag(1 / self.z_scale)
        for i, name in enumerate(self.z_names):
            if name == INTERCEPT:
                same = torch.tensor([b == self.blocks[i] for b in self.blocks])
                out[i] -= torch.where(same, self.z_centre / self.z_scale, 0.0)
        return out


def columns(cohort: Cohort) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All columns of the design X and Z ``[n, q]``, y, offset, weight and constant ``[n]``, as they are."""
    x = cohort.x
    assert isinstance(x, dict)
    offset, weight, constant = x["beside"].unbind(1)
    return x["fixed"], x["random"], cohort.y, offset, weight, constant


def coded(cohort: Cohort, units: Coordinates) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X ``[n, p]`` and Z ``[n, q]`` in internal coordinates, y, offset and weight ``[n]`` as they are."""
    x, z, y, offset, weight, _ = columns(cohort)
    x, z = (units.x(x) - units.x_centre) / units.x_scale, (z - units.z_centre) / units.z_scale
    return x, z, y, offset, weight


def everyone(cohort: Cohort) -> Tensor:
    return torch.ones(len(cohort), dtype=torch.bool)
