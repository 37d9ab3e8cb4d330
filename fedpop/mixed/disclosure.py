"""What a formula would show of few rows: a site checks the design before anything that is made of it leaves.

Sums over rows are exact, so that a column which is zero but in a few rows shows these, and so does a weight,
a cell of factors, a group of one row, a combination of columns, or the difference of two formulas. Columns
that a formula may name say nothing about that: ``I(id == 7)`` names an innocent one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedpop.federation.table_format import MINIMUM
from fedpop.message import Tensors
from fedpop.mixed.design import INTERCEPT, Design, Wanted, evaluated
from fedpop.mixed.formula import FormulaPart, FormulaTerms, columns_of
from fedpop.mixed.nesting import RowOrder
from fedpop.mixed.response import response_of
from fedpop.mixed.study import FormulaStudy
from fedpop.mixed.table import Rows, as_categories
from fedpop.site.refusal import Code, Refusal

CARRIED = 1e-3
"""The share of a column's sum of squares about its median that rows beside a few have to carry."""
ZERO_COMBINATION = 1e-9
"""A combination of columns that is as small as this, in units of their size, is zero but for rounding."""
SINGLE_SHARE = 0.5
"""Groups of one row, as a share of all, above which a grouping singles out rows."""


@dataclass(frozen=True)
class DesignColumns:
    """The columns that sums are made of, by name ``[n]``, and which rows of the table they are of."""

    formula: str
    columns: Mapping[str, np.ndarray]
    rows: np.ndarray

    def tensors(self) -> Tensors:
        """For a file at the site."""
        named = {"rows": self.rows} | {f"column {name}": values for name, values in self.columns.items()}
        return {n: torch.from_numpy(np.array(v)) for n, v in named.items()}

    @classmethod
    def read(cls, formula: str, tensors: Tensors) -> DesignColumns:
        """Back from a file."""
        found = {n.removeprefix("column "): v.numpy() for n, v in tensors.items() if n != "rows"}
        return cls(formula, found, tensors["rows"].numpy())


def design_columns(study: FormulaStudy, rows: Rows) -> DesignColumns:
    """All columns of a design at a site's rows: fixed and random effects', response, offset, weights."""
    design = study.design
    assert design is not None
    response = response_of(design.formula, study.family, design, rows, study.weights)
    found = dict(zip(design.fixed_names, design.fixed(rows).T, strict=True))
    found |= dict(zip(design.random_names, design.random(rows).T, strict=True))
    if design.formula.offsets:
        found["offset"] = design.offset(rows)
    if study.weights is not None:
        found[weights_name(study.weights)] = response.weight
    found[design.formula.response.text] = response.y
    columns = {n: np.asarray(v, dtype=np.float64) for n, v in found.items()}
    return DesignColumns(study.formula.text, columns, rows.numbers)


def weights_name(weights: FormulaPart) -> str:
    """Under which name weights are a column."""
    return f"weights = {weights.text}"


@dataclass(frozen=True)
class SmallCounts:
    """What a site does not show."""

    minimum: int = MINIMUM
    """Fewer rows than these are not set apart from the rest; 1 allows everything."""
    single_rows: bool = False
    """A grouping with mostly single rows is allowed."""

    def check(self, study: FormulaStudy, rows: Rows, earlier: Sequence[DesignColumns]) -> DesignColumns:
        """The design's columns; a refusal that names what would set few rows apart, also beside ``earlier``
        designs, which were answered."""
        found = design_columns(study, rows)
        if self.minimum <= 1:
            return found
        self._require_rows(study, rows)
        bare = study.response
        for name, values in found.columns.items():
            if self._few_others(values) or (name not in (INTERCEPT, bare) and self._few(values)):
                raise self._refusal(f"the column {name!r}", "sets")
        self._require_cells(study, rows)
        self._require_groups(study, rows)
        apart = [v for n, v in found.columns.items() if n != bare]
        if study.weights is not None:
            weight = found.columns[weights_name(study.weights)]
            apart += [v * weight for v in apart if len(np.unique(v)) <= self.minimum]
        if self._combined(np.stack(apart, axis=1)):
            raise self._refusal("a combination of the formula's columns", "sets")
        for before in earlier:
            self._require_alike(found, before)
        self._require_together(found, earlier)
        return found

    def check_scaled(self, study: FormulaStudy, rows: Rows, earlier: Sequence[DesignColumns]) -> None:
        """Of expressions inside ``scale()`` moments are asked for before there is a design: a refusal where
        these, or squares in them, would show few rows."""
        scaled = Wanted.of(study.formula, ()).scaled
        if self.minimum <= 1 or not scaled:
            return
        self._require_rows(study, rows)
        found = {p.text: np.asarray(evaluated(p, rows.columns, {}), dtype=np.float64) for p in scaled}
        for name, values in found.items():
            if self._few(values):
                raise self._refusal(f"the expression {name!r}, whose moments are asked for,", "sets")
        named = {c: rows.columns[c] for p in scaled for c in columns_of(p.tokens)}
        bare = {c: v.to_numpy(np.float64) for c, v in named.items() if not hasattr(v, "cat")}
        columns = {INTERCEPT: np.ones(len(rows))} | bare | found
        if self._combined(np.stack(list(columns.values()), axis=1)):
            raise self._refusal("a combination of the columns inside scale(), poly() or ns()", "sets")
        for before in earlier:
            self._require_alike(DesignColumns(study.formula.text, found, rows.numbers), before)

    def _refusal(self, what: str, verb: str) -> Refusal:
        words = f"{what} {verb} fewer than {self.minimum} rows apart from the rest"
        return Refusal(f"{words}, which would show them: this site does not answer it", Code.FEW_ROWS)

    def _require_rows(self, study: FormulaStudy, rows: Rows) -> None:
        if len(rows) < self.minimum:
            words = f"this site has fewer than {self.minimum} rows for {study.formula.text!r}"
            raise Refusal(f"{words}, which sums would show", Code.FEW_ROWS)

    def _few_others(self, values: np.ndarray) -> bool:
        """Whether all rows but a few have the same value."""
        several, counts = np.unique(values, return_counts=True)
        return len(several) > 1 and len(values) - int(counts.max()) < self.minimum

    def _few(self, values: np.ndarray) -> bool:
        """Whether a column sets few rows apart: all others have the same value, or as good as that."""
        if self._few_others(values):
            return True
        squares = np.sort((values - np.median(values)) ** 2)
        whole = float(squares.sum())
        return whole > 0 and float(squares[: 1 - self.minimum].sum()) < CARRIED * whole

    def _require_cells(self, study: FormulaStudy, rows: Rows) -> None:
        """Every term's cells, the baseline's too, for which there is no column."""
        design = study.design
        assert design is not None
        for terms in (design.formula.fixed, *design.formula.blocks):
            for factors in _factors(design, terms):
                codes = np.stack(
                    [as_categories(rows.columns[c]).cat.codes.to_numpy() for c in factors], axis=1
                )
                _, counts = np.unique(codes, axis=0, return_counts=True)
                if len(counts) > 1 and int(counts.min()) < self.minimum:
                    raise self._refusal(f"a cell of {' and '.join(map(repr, factors))}", "sets")

    def _require_groups(self, study: FormulaStudy, rows: Rows) -> None:
        """Of each factor. Sums over hundreds of groups hide the smallest; those over a handful are, by what
        changes with theta, as good as one of each."""
        design, order = study.design, RowOrder.of(rows)
        assert design is not None
        effects = design.random(rows)[order.rows]
        for level, factor in enumerate(design.formula.factors):
            own = [c for c, of in enumerate(design.factor_of) if of == level]
            starts = order.starts(level)
            sizes = np.diff(starts, append=len(rows))
            if not self.single_rows and float((sizes == 1).mean()) > SINGLE_SHARE:
                raise Refusal(
                    f"most groups of {factor.name!r} have a single row, which sums would show; this site "
                    "allows that with single_rows = true in site.toml",
                    Code.FEW_ROWS,
                )
            if 1 < len(sizes) < self.minimum:
                if self._alone(np.array([sizes, sizes])):
                    raise self._refusal(f"a group of {factor.name!r}, which has few here,", "sets")
                for column in effects[:, own].T:
                    parts = np.split(column, starts[1:])
                    beside = [len(v) - np.unique(v, return_counts=True)[1].max() for v in parts]
                    if self._alone(np.array([beside, sizes])):
                        raise self._refusal(f"an effect within a group of {factor.name!r}", "sets")

    def _alone(self, counted: np.ndarray) -> bool:
        """Whether few rows are counted in groups of some kind; groups that look the same hide each other.

        Args:
            counted: Rows of each group that are set apart, and all of its rows, ``[2, K]``.
        """
        _, of = np.unique(counted, axis=1, return_inverse=True)
        total = np.bincount(of.ravel(), weights=counted[0])
        return bool(((total > 0) & (total < self.minimum)).any())

    def _combined(self, columns: np.ndarray) -> bool:
        """Whether a combination of columns is zero but in a few rows, or as good as that.

        Of a vector of unit length that lives on S rows one has a square of 1/S or more, and no more than its
        leverage: the search begins at each such row, with the combination that has most of its length there,
        and adds the row that has most of the rest.
        """
        size = np.abs(columns).max(axis=0)
        scaled = columns[:, size > 0] / size[size > 0]
        if not scaled.shape[1]:
            return False
        u, spread, _ = np.linalg.svd(scaled, full_matrices=False)
        u = u[:, spread > ZERO_COMBINATION * spread[0] * len(scaled) ** 0.5]
        if len(u) - u.shape[1] < self.minimum - 1:
            return True  # as many columns as rows: some combination is zero but in a few
        leverage = (u**2).sum(axis=1)
        for first in np.flatnonzero(leverage >= (1 - CARRIED) / (self.minimum - 1)):
            few = [int(first)]
            while True:
                _, share, along = np.linalg.svd(u[few], full_matrices=False)
                if share[0] ** 2 > 1 - CARRIED:
                    return True
                if len(few) == self.minimum - 1:
                    break
                rest = np.abs(u @ along[0])
                rest[few] = 0.0
                few.append(int(rest.argmax()))
        return False

    def _require_alike(self, found: DesignColumns, before: DesignColumns) -> None:
        """Two designs of nearly the same rows, or with nearly the same column, differ in few rows."""
        both = np.isin(found.rows, before.rows)
        other = np.isin(before.rows, found.rows)
        differ = int((~both).sum()) + int((~other).sum())
        if 0 < differ < self.minimum:
            raise self._refusal(f"the difference to the formula {before.formula!r}, answered before,", "sets")
        if not both.any():
            return
        answered = f"to the formula {before.formula!r}, answered before,"
        for name, values in found.columns.items():
            for earlier in before.columns.values():
                if 0 < int((values[both] != earlier[other]).sum()) < self.minimum:
                    raise self._refusal(f"the difference of {name!r} {answered}", "sets")
        names = [n for n in found.columns if n not in before.columns]
        if names:
            together = [found.columns[n][both] for n in names] + [v[other] for v in before.columns.values()]
            if self._combined(np.stack(together, axis=1)):
                what = f"columns beside those of the formula {before.formula!r}, answered before,"
                raise self._refusal(what, "set")

    def _require_together(self, found: DesignColumns, earlier: Sequence[DesignColumns]) -> None:
        """Several formulas can set few rows apart where no two of them do: by their columns, or by the rows
        that they leave out."""
        if len(earlier) < 2:
            return
        same = [d for d in earlier if np.array_equal(d.rows, found.rows)]
        known = {v.tobytes(): v for design in same for v in design.columns.values()}
        new = {v.tobytes(): v for v in found.columns.values()}
        every = np.stack(list((known | new).values()), axis=1)
        if len(same) > 1 and not new.keys() <= known.keys() and self._combined(every):
            raise self._refusal("columns beside those of all formulas answered before", "set")
        if not same:
            everyone = np.unique(np.concatenate([d.rows for d in (found, *earlier)]))
            present = np.stack([np.isin(everyone, d.rows) for d in (found, *earlier)], axis=1)
            if self._combined(np.unique(present, axis=1).astype(np.float64)):
                raise self._refusal("the rows beside those of all formulas answered before", "set")


def _factors(design: Design, terms: FormulaTerms) -> list[list[str]]:
    """Columns of categories in each term."""
    named = [[design.level_column(part) for part in term] for term in terms.terms]
    return [found for term in named if (found := [c for c in term if c is not None])]
