"""Groups as units of a federation: their columns packed, and the first questions that everyone is
asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.design import INTERCEPT, Design
from fedpop.mixed.response import Family, Response
from fedpop.mixed.table import Rows
from fedpop.questions import Question, Units
from fedpop.questions.schema import sorted_levels
from fedpop.site.plan import Plan
from fedpop.site.sites import Sites

R = TypeVar("R")

BUDGET = 2**27
"""Bytes that work on a cohort may take, about; data and what sites keep aside."""
FLAT = 1e-12
"""The share of a column's variance that others must leave unexplained; rounding leaves 1e-15."""


@dataclass
class Groups:
    """The federation of a model's groups, who may be asked questions, and what that has cost so far."""

    federation: Federation
    sites: Sites
    holding: Mapping[str, Sequence[str]] | None
    """Which groups a site holds, where sites hold many."""
    rounds: int = 0
    bytes_up: int = 0

    @classmethod
    def of(
        cls,
        design: Design,
        response: Response,
        rows: Rows,
        sites: Mapping[str, Sequence[str]] | None,
    ) -> Groups:
        assert rows.groups is not None
        federation = packed(design, response, rows)
        return cls(federation, Sites(federation, torch.device("cpu"), sites=sites), sites)

    def only(self, kept: Sequence[int]) -> None:
        """X has these of its columns left."""
        train = self.federation.train
        assert isinstance(train.x, dict)
        x = train.x | {"fixed": train.x["fixed"][:, list(kept)]}
        packed = Packed(x, train.y, train.starts, train.sizes)
        self.federation = Federation(self.federation.names, {"train": packed})
        self.sites = Sites(self.federation, torch.device("cpu"), sites=self.holding)

    def ask(
        self,
        question: Question[R],
        known: Tensors,
        per_row: float,
        per_unit: float,
        among: Tensor | None = None,
    ) -> R:
        """What is made of everyone's answers, or of those at these positions; such a question takes so many
        bytes for each row, and unit."""
        plan = Plan(per_row, per_unit, BUDGET)
        found, total = self.sites.ask(question, known, Key(0, purpose="mixed"), plan, among=among)
        self.sites.commit(entered=False)
        self.rounds += 1
        self.bytes_up += total.bytes_up
        return found

    @property
    def examples(self) -> int:
        return int(self.federation.train.sizes.sum())


def packed(design: Design, response: Response, rows: Rows) -> Federation:
    """Rows of each group next to each other, groups in the order of their names."""
    assert rows.groups is not None
    names, owner = np.unique(rows.groups.astype(str), return_inverse=True)
    order = sorted_levels(names.tolist())
    place = {name: i for i, name in enumerate(order)}
    rank = np.array([place[name] for name in names.tolist()], dtype=np.int64)
    owner = rank[owner.reshape(-1)]
    by_group = np.argsort(owner, kind="stable")
    sizes = torch.from_numpy(np.bincount(owner, minlength=len(order)))

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[by_group], dtype=np.float64))

    beside = np.stack((design.offset(rows), response.weight, response.constant), axis=1)
    x = {"fixed": tensor(design.fixed(rows)), "random": tensor(design.random(rows)), "beside": tensor(beside)}
    packed = Packed(x, tensor(response.y), torch.cumsum(sizes, 0) - sizes, sizes)
    return Federation(order, {"train": packed})


def columns(cohort: Cohort) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X ``[n, p]``, Z ``[n, q]``, y, offset, weight and constant ``[n]``."""
    x = cohort.x
    assert isinstance(x, dict)
    offset, weight, constant = x["beside"].unbind(1)
    return x["fixed"], x["random"], cohort.y, offset, weight, constant


def everyone(cohort: Cohort) -> Tensor:
    return torch.ones(len(cohort), dtype=torch.bool)


@dataclass(frozen=True)
class ColumnSums(Question[Tensors]):
    """How many rows, and sums of all columns: their means are where products are centred."""

    name: ClassVar[str] = "means of columns"

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        x, z, y, offset, weight, constant = columns(units.cohort)
        rest = torch.stack((torch.ones_like(y), y * weight, weight, offset * weight, constant), dim=1)
        sums = torch.cat((x.sum(0), z.sum(0), rest.sum(0)))
        return Answer(everyone(units.cohort), sums={"sums": sums})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {"sums": total.plain["sums"]}


@dataclass(frozen=True)
class Gram(Question[Tensors]):
    """Products W'W of centred columns W = (X, Z, y - offset): which columns there are, and in which
    units."""

    name: ClassVar[str] = "products of columns"

    def ask(self, known: Tensors) -> Tensors:
        return {"centre": known["centre"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        x, z, y, offset, _, _ = columns(units.cohort)
        rows = torch.cat((x, z, (y - offset).unsqueeze(1)), dim=1) - asked["centre"]
        return Answer(everyone(units.cohort), sums={"gram": (rows.mT @ rows).flatten()})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        size = len(known["centre"])
        return {"gram": total.plain["gram"].reshape(size, size)}


@dataclass(frozen=True)
class Coordinates:
    """Internal coordinates: columns are centred where that is the same model, and scaled."""

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

    @property
    def intercept(self) -> bool:
        """There is a fixed intercept; it comes first."""
        return INTERCEPT in self.x_names

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


def coordinates(groups: Groups, design: Design, family: Family) -> tuple[Coordinates, Tensor, Design]:
    """Means first, then products about them: which columns are constant or combinations of others is
    found here, and in which units the rest is counted. Beside them the sums of the response's columns
    (rows, y, weight, offset, constant), and the design without fixed effects that say nothing new."""
    p, q = len(design.fixed_names), len(design.random_names)
    per_row = 24.0 * (p + q + 3)
    sums = groups.ask(ColumnSums(), {}, per_row, 0.0)["sums"]
    n, y, weight, offset, _ = sums[p + q :].tolist()
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
    gram = groups.ask(Gram(), {"centre": centre}, per_row, 0.0)["gram"] / n
    size = gram.diagonal().sqrt()
    if family.gaussian and not float(size[-1]) > 1e-12 * abs(y_centre):
        raise DataError(
            f"the response {design.formula.response.text} is constant; there is nothing to explain"
        )
    idle = _idle(design, gram, mean, size)
    kept = [j for j in range(p) if j not in idle]
    if idle:
        groups.only(kept)
        design = replace(design, dropped=tuple(design.fixed_names[j] for j in idle))
    scale = torch.where(size > 0, size, 1.0)
    found = Coordinates(
        centre[kept],
        scale[kept],
        centre[p:-1],
        scale[p:-1],
        y_centre,
        float(size[-1]) if family.gaussian else 1.0,
        tuple(design.fixed_names),
        tuple(design.random_names),
        tuple(design.blocks),
    )
    return found, sums[p + q :], design


def _idle(design: Design, gram: Tensor, mean: Tensor, size: Tensor) -> list[int]:
    """Positions of fixed effects that are combinations of those before them, which R leaves out too. A
    predictor that is constant is an error, and so is a random effect that its own block has already."""
    p, idle = len(design.fixed_names), list[int]()
    names, blocks = [*design.fixed_names, *design.random_names], [-1] * p + design.blocks
    kept: list[int] = []
    for j, (name, block) in enumerate(zip(names, blocks, strict=True)):
        kept = [k for k in kept if blocks[k] == block]
        constant = name != INTERCEPT and float(size[j]) <= 1e-9 * max(abs(float(mean[j])), 1e-300)
        if constant and ":" not in name:
            raise DataError(f"the predictor {name!r} is constant: it cannot be told from the intercept")
        if not constant and _new(gram, size, kept, j):
            kept.append(j)
        elif j < p:
            idle.append(j)
        else:
            others = ", ".join(repr(names[k]) for k in kept)
            raise DataError(
                f"the random effect {name!r} is a combination of others ({others}), so that neither can be "
                "told from the other; leave it out"
            )
    return idle


def _new(gram: Tensor, size: Tensor, kept: Sequence[int], j: int) -> bool:
    """Whether a column says something that these do not."""
    if not kept:
        return True
    at = [*kept, j]
    part = gram[at][:, at] / size[at] / size[at].unsqueeze(1)
    inner = torch.linalg.lstsq(part[:-1, :-1], part[:-1, -1:]).solution
    return float(part[-1, -1] - part[-1, :-1] @ inner[:, 0]) >= FLAT
