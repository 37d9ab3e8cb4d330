"""The groups of a model, wherever they are: questions to them, and the first ones that everyone is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedpop.errors import DataError, SettingsError
from fedpop.federation.clients import Federation
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.bases import (
    KNOT_BINS,
    Basis,
    BinCounts,
    PowerSums,
    bins_of,
    grid_of,
    polynomial,
    powers_of,
    spline,
    without_sums,
)
from fedpop.mixed.common_key import compared_names
from fedpop.mixed.design import INTERCEPT, Coordinates, Design, Wanted, columns, everyone, scale_name
from fedpop.mixed.formula import Formula
from fedpop.mixed.nesting import Tree
from fedpop.mixed.response import require_two
from fedpop.mixed.study import ColumnKinds, FormulaStudy, Kinds
from fedpop.mixed.table import Rows
from fedpop.questions import Question, Units
from fedpop.questions.schema import Levels, Schema
from fedpop.run.members import Asking, LocalMembers, Members

R = TypeVar("R")

NEW_COLUMN_SHARE = 1e-12
"""The share of a column's variance that others must leave unexplained; rounding leaves 1e-15."""


@dataclass
class Groups:
    """Members that have a model's groups, the study that they received, and the cost of questions so far."""

    members: Members
    study: FormulaStudy
    kinds: Kinds = field(default_factory=Kinds)
    """What columns hold, and rows in which something was missing."""
    response_sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    """Sums of the weighted response, of weights, and of what the log-density has without parameters."""
    means: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Of the columns of fixed effects, those that were dropped too."""
    products: Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.float64))
    """X'X of these."""
    examples: int = 0
    """Rows of all groups, once they were counted."""
    counts: tuple[int, ...] = ()
    """Groups of each grouping factor, the innermost first; counted then, too."""
    compared: int | None = None
    """Groups whose names were compared between sites, under a key that these have in common; None where all
    are on one machine."""
    rounds: int = 0
    bytes_up: int = 0

    def __len__(self) -> int:
        return self.members.units

    def count(self, examples: int, counts: tuple[int, ...]) -> None:
        """So many rows, and groups of each factor, the innermost first."""
        self.examples, self.counts = examples, counts

    def update_study(self, study: FormulaStudy) -> None:
        """What is known now, to members too."""
        self.study = study
        self.members.update_study(study)

    def ask(self, question: Question[R], known: Tensors, among: Tensor | None = None) -> R:
        """What is made of everyone's answers, or of those of the groups at these positions."""
        found, total = self.members.ask(Asking(question, known, Key(0, purpose="mixed"), among=among))
        self.members.commit(entered=False)
        self.rounds += 1
        self.bytes_up += total.bytes_up
        return found

    # --- what only groups on this machine have --------------------------------------------------------

    @property
    def local_members(self) -> LocalMembers:
        """The members, where their rows are on this machine."""
        if not isinstance(self.members, LocalMembers):
            raise SettingsError(
                "this needs groups' rows, or their posteriors, which are at their sites: ask for it there"
            )
        return self.members

    @property
    def rows(self) -> Rows:
        assert isinstance(self.local_members.data, Rows)
        return self.local_members.data

    @property
    def federation(self) -> Federation:
        return self.local_members.federation

    @property
    def by_site(self) -> Mapping[str, Sequence[str]] | None:
        """Groups of each site, where sites have several."""
        return self.local_members.at


# --- columns and their levels ----------------------------------------------------------------------


def columns_in(formula: Formula) -> tuple[str, ...]:
    """Columns that stand by themselves in a formula, of which it has to be known what they hold."""
    return tuple(dict.fromkeys(part.column for part in formula.parts if part.column is not None))


def agreed(
    groups: Groups,
    levels: Mapping[str, Sequence[Any]],
    minimum: int,
    contrasts: Mapping[str, str] | None = None,
) -> Design:
    """The short rounds before: what of columns has to be known to all, and members receive it. Without sites
    the sum over groups is formed at once; it is the same."""
    formula, members, binomial = groups.study.formula, groups.members, groups.study.family.binomial
    kinds = members.asks(ColumnKinds(columns_in(formula)), {})
    groups.kinds = kinds
    if not binomial and groups.study.response in kinds.named:
        raise DataError(
            f"the response {groups.study.response!r} holds names, and a {groups.study.family.name} model is "
            "of numbers: family='binomial' is for a yes or no"
        )
    wanted = Wanted.of(formula, kinds.named)
    many = members.roster.sites is not None
    summary = wanted.schema(minimum, many).asked(members.asks)
    design = Design.agreed(formula, summary, levels, minimum, contrasts, members.federation is None)
    if wanted.bases:
        design = replace(design, bases=_bases(groups, wanted, design, minimum, many))
    response = groups.study.response
    if members.federation is None and binomial and response in kinds.named:
        # However few rows an outcome has: sums of the response tell as much.
        found = Schema((), (str(response),), 1).asked(members.asks)[str(response)]
        assert isinstance(found, Levels)
        require_two(str(response), found.names)
        design = replace(design, outcomes=tuple(found.names))
    groups.update_study(replace(groups.study, design=design))
    if members.federation is None:
        groups.compared = compared_names(members, formula.group)
    return design


def _bases(groups: Groups, wanted: Wanted, design: Design, minimum: int, many: bool) -> Mapping[str, Basis]:
    """Polynomials and splines of the formula, by at most two further questions."""
    members, moments, found = groups.members, design.moments, dict[str, Basis]()
    for call in wanted.bases:
        if not call.needs:
            here = call.exact and members.federation is not None
            found[call.text] = without_sums(call, design.numbers(call.inner, groups.rows) if here else None)
    polys = [call for call in wanted.bases if call.needs and call.kind == "poly"]
    splines = [call for call in wanted.bases if call.needs and call.kind == "ns"]
    if polys:
        degrees = dict[str, int]()
        for call in polys:
            degrees[call.inner.text] = max(call.count, degrees.get(call.inner.text, 0))
        known = {
            name: torch.tensor([getattr(moments[c], name) for c in degrees], dtype=torch.float64)
            for name in ("mean", "sd")
        }
        columns = tuple(map(scale_name, degrees))
        sums = members.asks(PowerSums(columns, tuple(degrees.values()), minimum, many), known)
        for call in polys:
            of = sums[powers_of(scale_name(call.inner.text))]
            found[call.text] = polynomial(call, moments[call.inner.text], of)
    if splines:
        ends = {call.text: grid_of(call, moments) for call in splines}
        grids = dict.fromkeys((call.inner.text, ends[call.text]) for call in splines)
        if len({column for column, _ in grids}) < len(grids):
            raise SettingsError("ns() of one column is wanted on two grids: give both the same range")
        low, high = (torch.tensor([e[i] for _, e in grids], dtype=torch.float64) for i in (0, 1))
        columns = tuple(scale_name(column) for column, _ in grids)
        counts = members.asks(BinCounts(columns, KNOT_BINS, minimum, many), {"low": low, "high": high})
        for call in splines:
            of = counts[bins_of(scale_name(call.inner.text))]
            found[call.text] = spline(call, ends[call.text], of, minimum)
    return found


@dataclass(frozen=True)
class ColumnSums(Question[Tensors]):
    """How many rows, sums of all columns, whose means are where products are centred, and how many groups at
    each level within units."""

    columns: int
    name: ClassVar[str] = "means of columns"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        return 24.0 * (self.columns + 3), 0.0

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        x, z, y, offset, weight, constant = columns(units.cohort)
        rest = torch.stack((torch.ones_like(y), y * weight, weight, offset * weight, constant), dim=1)
        inner = y.new_tensor(Tree.of(units.cohort).sizes[:-1])
        sums = torch.cat((x.sum(0), z.sum(0), rest.sum(0), inner))
        return Answer(everyone(units.cohort), sums={"sums": sums})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {"sums": total.plain["sums"]}


@dataclass(frozen=True)
class Gram(Question[Tensors]):
    """Products W'W of centred columns W = (X, Z, y - offset): which columns there are, and in which
    units."""

    name: ClassVar[str] = "products of columns"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        return 24.0 * (len(asked["centre"]) + 2), 0.0

    def ask(self, known: Tensors) -> Tensors:
        return {"centre": known["centre"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        x, z, y, offset, _, _ = columns(units.cohort)
        rows = torch.cat((x, z, (y - offset).unsqueeze(1)), dim=1) - asked["centre"]
        return Answer(everyone(units.cohort), sums={"gram": (rows.mT @ rows).flatten()})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        size = len(known["centre"])
        return {"gram": total.plain["gram"].reshape(size, size)}


def coordinates(groups: Groups, design: Design) -> tuple[Coordinates, Tensor, Design]:
    """Means first, then products about them: which columns are constant or combinations of others is
    found here, and in which units the rest is counted; members receive it. Beside them the sums of the
    response's columns (rows, y, weight, offset, constant), and the design without fixed effects that say
    nothing new."""
    p, q, family = len(design.fixed_names), len(design.random_names), groups.study.family
    sums = groups.ask(ColumnSums(p + q), {})["sums"]
    n, y, weight, offset, _, *inner = sums[p + q :].tolist()
    groups.count(round(n), (*map(round, inner), len(groups)))
    groups.response_sums = sums[[p + q + 1, p + q + 2, p + q + 4]]
    _require_groups(groups, design)
    mean = sums[: p + q] / n
    intercept = INTERCEPT in design.fixed_names
    with_intercept = {
        b for b, name in zip(design.blocks, design.random_names, strict=True) if name == INTERCEPT
    }
    free = [intercept and name != INTERCEPT for name in design.fixed_names]
    free += [
        name != INTERCEPT and block in with_intercept
        for name, block in zip(design.random_names, design.blocks, strict=True)
    ]
    y_centre = (y - offset) / weight if family.gaussian and intercept else 0.0
    centre = torch.cat((torch.where(torch.tensor(free), mean, 0.0), mean.new_tensor([y_centre])))
    gram = groups.ask(Gram(), {"centre": centre})["gram"] / n
    size = gram.diagonal().sqrt()
    groups.means, middle, at = mean[:p], centre[:p], torch.outer(centre[:p], mean[:p])
    groups.products = n * (gram[:p, :p] + at + at.mT - torch.outer(middle, middle))
    if family.gaussian and not float(size[-1]) > 1e-12 * abs(y_centre):
        raise DataError(
            f"the response {design.formula.response.text} is constant; there is nothing to explain"
        )
    idle = _idle(design, gram, mean, size)
    used = [j for j in range(p) if j not in idle]
    if idle:
        design = replace(design, dropped=tuple(design.fixed_names[j] for j in idle))
    scale = torch.where(size > 0, size, 1.0)
    found = Coordinates(
        centre[used],
        scale[used],
        centre[p:-1],
        scale[p:-1],
        y_centre,
        float(size[-1]) if family.gaussian else 1.0,
        tuple(design.fixed_names),
        tuple(design.random_names),
        tuple(design.blocks),
        design.widths,
        tuple(used) if idle else None,
    )
    groups.update_study(replace(groups.study, coordinates=found))
    return found, sums[p + q : p + q + 5], design


def _require_groups(groups: Groups, design: Design) -> None:
    n = groups.examples
    for factor, count, q in zip(design.formula.factors, groups.counts, design.widths, strict=True):
        if count < 2:
            raise DataError(f"{factor.name!r} has one group only; a population needs two or more")
        if groups.study.family.gaussian and n <= count * q:
            raise DataError(
                f"there are {n} rows and {count * q} random effects ({count} groups of {q}): their "
                "variances cannot be distinguished from the residual's; use fewer random effects"
            )
    effects = list(zip(design.random_names, design.factor_of, strict=True))
    for name, at in effects:
        same = [
            i for other, i in effects if other == name and i > at and groups.counts[i] == groups.counts[at]
        ]
        if same:
            inner, outer = (design.formula.factors[i].name for i in (at, same[0]))
            raise DataError(
                f"each level of {outer!r} has one of {inner!r} only, so that the variances of {name} in the "
                "two cannot be distinguished; leave one of them out"
            )
    if not design.fixed_names:
        raise SettingsError(f"{design.formula.text!r} has no fixed effect, not even an intercept")


def _idle(design: Design, gram: Tensor, mean: Tensor, size: Tensor) -> list[int]:
    """Positions of fixed effects that are combinations of those before them, which R leaves out too. A
    predictor that is constant is an error, and so is a random effect that its block has already."""
    p, idle = len(design.fixed_names), list[int]()
    names, blocks = [*design.fixed_names, *design.random_names], [-1] * p + design.blocks
    used: list[int] = []
    for j, (name, block) in enumerate(zip(names, blocks, strict=True)):
        used = [k for k in used if blocks[k] == block]
        constant = name != INTERCEPT and float(size[j]) <= 1e-9 * max(abs(float(mean[j])), 1e-300)
        if constant and ":" not in name:
            raise DataError(
                f"the predictor {name!r} is constant: it cannot be distinguished from the intercept"
            )
        if not constant and _new(gram, size, used, j):
            used.append(j)
        elif j < p:
            idle.append(j)
        else:
            others = ", ".join(repr(names[k]) for k in used)
            raise DataError(
                f"the random effect {name!r} is a combination of others ({others}), so that neither can be "
                "distinguished from the other; leave it out"
            )
    return idle


def _new(gram: Tensor, size: Tensor, used: Sequence[int], j: int) -> bool:
    """Whether a column says something that these do not."""
    if not used:
        return True
    at = [*used, j]
    part = gram[at][:, at] / size[at] / size[at].unsqueeze(1)
    inner = torch.linalg.lstsq(part[:-1, :-1], part[:-1, -1:]).solution
    return float(part[-1, -1] - part[-1, :-1] @ inner[:, 0]) >= NEW_COLUMN_SHARE
