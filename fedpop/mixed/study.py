"""A formula as what a federation is about: its description for sites, and what a site makes of its table.

A site learns the formula, reads its table and says which columns hold names. Then levels are agreed on,
the design is known, and its rows become groups with columns in double precision, by the same code wherever
they are. Last come the coordinates that engines work in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.entries import called, entry_named
from fedpop.errors import DataError, SchemaError
from fedpop.federation.cells import require_proportion, require_range
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.reading import require_separator, require_units
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.asking import role
from fedpop.mixed.bases import Basis
from fedpop.mixed.common_key import NO_KEY, CommonKey
from fedpop.mixed.design import Coordinates, Design, Wanted, everyone
from fedpop.mixed.drawing import Drawing
from fedpop.mixed.families import Family, family_named
from fedpop.mixed.formula import Formula, FormulaPart, columns_of, parse, scanned, shown
from fedpop.mixed.nesting import BEGINS, CELLS, RowOrder, cells
from fedpop.mixed.response import Response, response_of
from fedpop.mixed.table import NA, Rows, as_categories, as_frame, read_file, rows_of
from fedpop.questions import Question, Table, Units
from fedpop.questions.schema import Moments
from fedpop.site.plan import Plan
from fedpop.site.study import SiteData, Study, UnitData, table_units

GROUP_BYTES = 2**27
"""Bytes that work on a cohort may take at most, about; data and stored states aside."""
MISSING_IN = ', "missing"]'
LEFT_OUT, MARKS = "rows left out", "marks of rows"
"""Columns of a site's table: one that is true for each row that was left out, and numbers by which rows of
two fits are told apart."""
NAMES, NUMBERS = "names", "numbers"
SITE = "site"
"""A grouping factor that needs no column: where a table has none of this name its site is meant."""


@dataclass(frozen=True)
class FormulaStudy(Study):
    """A mixed model over tables at sites; groups are the units."""

    formula: Formula
    family: Family
    weights: FormulaPart | None = None
    missing: str = "drop"
    na: tuple[str, ...] = NA
    """Words of a file that stand for missing values."""
    design: Design | None = None
    """How rows are coded, once that is agreed on; before, sites are asked about their tables."""
    coordinates: Coordinates | None = None
    drawing: Drawing | None = None
    """Responses are drawn in place of the observed ones."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """What sites compare their columns with before anything of these leaves: ``range``, ``unit``, and once
    they are known ``medians``, as ``federation.cells`` has them."""
    common_key: CommonKey = NO_KEY
    """What a site has in common with others, by which groups are compared; it does not travel."""

    fixed: ClassVar[bool] = True

    @classmethod
    def from_text(
        cls,
        formula: str,
        family: str = "gaussian",
        weights: str | None = None,
        missing: str = "drop",
        na: Sequence[str] = NA,
    ) -> FormulaStudy:
        """From texts, as ``mixed_model`` takes them."""
        return cls(parse(formula), family_named(family), _weight(weights), missing, tuple(na))

    @property
    def columns(self) -> list[str]:
        """Columns that rows must have, beside the group."""
        parts = [*self.formula.parts, *(() if self.weights is None else (self.weights,))]
        return [column for part in parts for column in columns_of(part.tokens)]

    @property
    def response(self) -> str | None:
        """The response's column, where it is one."""
        return self.formula.response.column

    # --- what a site receives ------------------------------------------------------------------

    def description(self) -> tuple[dict[str, Any], Tensors]:
        description: dict[str, Any] = {
            "formula": self.formula.text,
            "family": self.family.text,
            "weights": None if self.weights is None else self.weights.text,
            "missing": self.missing,
            "na": list(self.na),
        }
        if self.form:
            description["form"] = dict(self.form)
        if self.design is not None:
            moments = {n: [m.count, m.mean, m.squares] for n, m in self.design.moments.items()}
            levels = {n: list(names) for n, names in self.design.levels.items()}
            description["design"] = {
                "levels": levels,
                "moments": moments,
                "outcomes": list(self.design.outcomes),
                "contrasts": dict(self.design.contrasts),
                "bases": {n: basis.plain() for n, basis in self.design.bases.items()},
            }
        tensors: Tensors = {}
        if self.drawing is not None:
            description["drawing"], tensors = self.drawing.description()
        if (units := self.coordinates) is not None:
            named = ("x_names", "z_names", "blocks", "widths", "y_centre", "y_scale", "kept")
            description["coordinates"] = {name: getattr(units, name) for name in named}
            tensors |= {n: getattr(units, n) for n in ("x_centre", "x_scale", "z_centre", "z_scale")}
        return description, tensors

    @classmethod
    def from_description(cls, description: Mapping[str, Any], tensors: Tensors) -> FormulaStudy:
        told = ("formula", "family", "weights", "missing", "na")
        study = cls.from_text(*(description[name] for name in told))
        study = replace(study, form=description.get("form", {}))
        if "design" in description:
            levels = {n: tuple(names) for n, names in description["design"]["levels"].items()}
            moments = {n: Moments(*numbers) for n, numbers in description["design"]["moments"].items()}
            outcomes = tuple(description["design"]["outcomes"])
            contrasts = description["design"]["contrasts"]
            bases = {n: Basis.from_plain(p) for n, p in description["design"]["bases"].items()}
            design = Design(study.formula, levels, moments, outcomes, contrasts, bases=bases)
            study = replace(study, design=design)
        if "drawing" in description:
            study = replace(study, drawing=Drawing.from_description(description["drawing"], tensors))
            tensors = {n: v for n, v in tensors.items() if not n.startswith("drawn_")}
        if "coordinates" in description:
            plain: dict[str, Any] = {
                n: tuple(v) if isinstance(v, list) else v for n, v in description["coordinates"].items()
            }
            study = replace(study, coordinates=Coordinates(**{**tensors, **plain}))
        return study

    # --- what a site makes of it -----------------------------------------------------------------

    def rows(self, frame: Any, sites: str | None = None) -> Rows:
        """The rows of a table that miss nothing."""
        return rows_of(frame, self.formula, columns=self.columns, sites=sites, missing=self.missing)

    def read(self, place: SiteData) -> Rows:
        """Errors that the server may see name columns, and no value."""
        who, frame = f"site {place.site!r}", table_at(place, self.na)
        if SITE in self.formula.group_columns and SITE not in frame.columns:
            frame = frame.assign(**{SITE: place.site})
        names = list(dict.fromkeys([*self.columns, *self.formula.group_columns]))
        require_separator(list(map(str, frame.columns)), names, place.table.separator, who, users_table=False)
        for name in names:
            if name not in frame.columns:
                raise SchemaError(f"{who} has no column {name!r}, which the federation needs")
        if not len(frame):
            raise SchemaError(f"{who} has no rows")
        wanted = frame[names]
        if self.missing == "drop" and bool(wanted.isna().any(axis=1).all()):
            raise SchemaError(f"{who} has no row in which nothing is missing of {', '.join(wanted.columns)}")
        require_units(self.form, place.table, who)
        rows = self.rows(frame)
        numbers = {n: v.to_numpy() for n, v in rows.columns.items() if not hasattr(v, "cat")}
        for column in (*self.form.get("range", ()), *self.form.get("unit", ())):
            if column not in numbers:
                raise SchemaError(f"{who}: column {column!r} holds names, and numbers are wanted")
        require_range(who, numbers, self.form)
        require_proportion(who, numbers, self.form)
        for column, levels in () if self.design is None else self.design.levels.items():
            other = int((~as_categories(rows.columns[column]).isin(levels)).sum())
            if other:
                raise SchemaError(
                    f"{who} has {other} row(s) of {column!r} at levels that too few rows have to be told: "
                    "merge these levels, or leave the rows out"
                )
        return rows

    def response_of(self, rows: Rows) -> Response:
        """The response of rows: observed, or drawn."""
        assert self.design is not None
        known = response_of(self.formula, self.family, self.design, rows, self.weights)
        if self.drawing is None:
            return known
        x = (self.design.all_fixed(rows), self.design.random(rows), self.design.offset(rows))
        return self.drawing.response(*x, rows, self.family, known)

    def unit_data(self, data: Any) -> UnitData:
        assert isinstance(data, Rows)
        if self.design is None:
            tables = self._tables(data)
            many = None if data.sites is None else {name: [name] for name in tables}
            return UnitData(table_units(tables), list(tables.values()), many)
        response = self.response_of(data)
        federation = packed(self.design, response, data, self.family.gaussian)
        return UnitData(federation, sites=groups_of_sites(data))

    def _tables(self, rows: Rows) -> dict[str, Table]:
        """Columns to be asked about, by site; ``here`` where none is named."""
        named = [name for name, values in rows.columns.items() if hasattr(values, "cat")]
        columns = dict(rows.columns) | Wanted.of(self.formula, named).table(rows)
        marks = np.zeros(len(rows)) if rows.marks is None else rows.marks
        lost = {LEFT_OUT: rows.dropped} | {_missing_in(n): count for n, count in rows.missing.items()}
        beside = {name: np.ones(count) for name, count in lost.items()}
        if rows.sites is None:
            return {"here": columns | beside | {MARKS: marks}}
        tables: dict[str, Table] = {}
        for site in dict.fromkeys(rows.sites.tolist()):
            at = rows.sites == site
            tables[str(site)] = {n: v[at] for n, v in columns.items()} | beside | {MARKS: marks[at]}
            beside = {LEFT_OUT: np.ones(0)}  # whose they were is not known any more: they are the first one's
        return tables

    def same_rows(self, other: Study) -> bool:
        return isinstance(other, FormulaStudy) and (
            self.design is not None and self.design is other.design and self.drawing is other.drawing
        )

    def plan(self, federation: Federation, budget: int) -> Plan:
        return Plan(0.0, 0.0, min(budget, GROUP_BYTES))


@role.register
def _(value: Coordinates) -> str:
    return "coordinates"


@role.register
def _(value: Family) -> str:
    return "family"


def _weight(text: str | None) -> FormulaPart | None:
    if text is None:
        return None
    tokens = scanned(text)
    return FormulaPart(shown(tokens), tokens)


def table_at(place: SiteData, na: Sequence[str]) -> Any:
    """A site's table as a data frame."""
    if ":" in place.where:
        return as_frame(called(place.where, entry_named(place.where, place.folder), place.site))
    return read_file(Path(place.where), na, place.table)


def _missing_in(column: str) -> str:
    """Under which name rows are counted in which a column is missing."""
    return json.dumps([column, "missing"])


def groups_of_sites(rows: Rows) -> Mapping[str, Sequence[str]] | None:
    """Groups of each site, as the rows say; None where each group is by itself."""
    if rows.sites is None:
        return rows.by_site
    assert rows.groups is not None
    pairs = set(zip(rows.groups.tolist(), rows.sites.tolist(), strict=True))
    out: dict[str, list[str]] = {}
    for group, site in sorted(pairs):
        out.setdefault(str(site), []).append(str(group))
    return out


def packed(design: Design, response: Response, rows: Rows, products: bool) -> Federation:
    """Rows of each group next to each other, groups in the order of their names; those of nested factors
    within them. With ``products`` of columns, of each innermost group, beside them."""
    order = RowOrder.of(rows)
    sizes = torch.from_numpy(order.sizes)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[order.rows], dtype=np.float64))

    beside = np.stack((design.offset(rows), response.weight, response.constant), axis=1)
    x = {"fixed": tensor(design.fixed(rows)), "random": tensor(design.random(rows)), "beside": tensor(beside)}
    if order.begins.shape[1]:
        x[BEGINS] = torch.from_numpy(order.begins)
    splits = {"train": Packed(x, tensor(response.y), torch.cumsum(sizes, 0) - sizes, sizes)}
    if products:
        splits[CELLS] = cells(splits["train"])
    return Federation(order.names[-1], splits)


# --- the first question ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kinds:
    """Which columns hold names, not numbers; how many rows were left out, and in how many each column is
    missing; and a number that other rows would have other than these."""

    named: frozenset[str] = frozenset()
    left_out: int = 0
    missing: Mapping[str, int] = field(default_factory=dict)
    marks: float = 0.0


@dataclass(frozen=True)
class ColumnKinds(Question[Kinds]):
    """What columns hold, as sites read them: each is counted under the kind that it has there."""

    columns: tuple[str, ...]
    name: ClassVar[str] = "kinds of columns"
    varied: ClassVar[bool] = True

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        sums: Tensors = {}

        def add(name: str, value: float) -> None:
            sums[name] = sums.get(name, torch.zeros(1, dtype=torch.float64)) + value

        for table in units.tables():
            add("left out", len(table[LEFT_OUT]))
            add(json.dumps([MARKS]), float(np.sum(table[MARKS])))
            for name in table:
                if name.startswith("[") and name.endswith(MISSING_IN):
                    add(name, len(table[name]))
            for column in self.columns:
                add(json.dumps([column, NAMES if hasattr(table[column], "cat") else NUMBERS]), 1)
        return Answer(everyone(units.cohort), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Kinds:
        sums = dict(total.plain)
        left_out = round(float(sums.pop("left out")))
        found = {tuple(json.loads(name)): float(value) for name, value in sums.items()}
        for column in self.columns:
            if (column, NAMES) in found and (column, NUMBERS) in found:
                names, numbers = round(found[column, NAMES]), round(found[column, NUMBERS])
                raise DataError(
                    f"column {column!r} holds names at {names} site(s) and numbers at {numbers}: mend it"
                )
        return Kinds(
            frozenset(column for column in self.columns if (column, NAMES) in found),
            left_out,
            {name[0]: round(v) for name, v in found.items() if name[1:] == ("missing",)},
            found[(MARKS,)],
        )
