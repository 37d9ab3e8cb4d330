"""Groups as units of a federation: their columns packed, and the first questions that everyone is
asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedpop.channel import Answer, Tensors, Total
from fedpop.client.plan import Plan
from fedpop.errors import DataError
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.mixed.design import INTERCEPT, Design
from fedpop.mixed.response import Family, Response
from fedpop.mixed.table import Rows
from fedpop.population.sites import Sites
from fedpop.questions import Question, Units
from fedpop.questions.schema import sorted_levels

R = TypeVar("R")

BUDGET = 2**27
"""Bytes that work on a cohort may take, about; data and what sites keep aside."""
FLAT = 1e-10
"""The share of a column's variance that others must leave unexplained."""


@dataclass
class Groups:
    """The federation of a model's groups, who may be asked questions, and what that has cost so far."""

    federation: Federation
    sites: Sites
    many: bool
    """Sites hold many groups."""
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
        return cls(federation, Sites(federation, torch.device("cpu"), sites=sites), sites is not None)

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
        found, outcome = self.sites.ask(question, known, Key(0, purpose="mixed"), plan, among=among)
        self.sites.keep(outcome.updates, entered=False)
        self.rounds += 1
        self.bytes_up += outcome.bytes_up
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
        w = weight.unsqueeze(1)
        rest = torch.stack((torch.ones_like(y), y * weight, weight, offset * weight, constant), dim=1)
        sums = torch.cat((x.sum(0), z.sum(0), rest.sum(0), (x * w).sum(0)))
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


def coordinates(groups: Groups, design: Design, family: Family) -> tuple[Coordinates, Tensors]:
    """Means first, then products about them: which columns are constant or combinations of others is
    found here, and in which units the rest is counted."""
    p, q = len(design.fixed_names), len(design.random_names)
    per_row = 24.0 * (p + q + 3)
    sums = groups.ask(ColumnSums(), {}, per_row, 0.0)["sums"]
    n, y, weight, offset, _ = sums[p + q : p + q + 5].tolist()
    intercept = INTERCEPT in design.fixed_names
    x_mean, z_mean = sums[:p] / n, sums[p : p + q] / n
    with_intercept = {
        b for b, name in zip(design.blocks, design.random_names, strict=True) if name == INTERCEPT
    }
    x_free = torch.tensor([intercept and name != INTERCEPT for name in design.fixed_names])
    z_free = torch.tensor(
        [
            name != INTERCEPT and block in with_intercept
            for name, block in zip(design.random_names, design.blocks, strict=True)
        ]
    )
    x_centre = torch.where(x_free, x_mean, 0.0)
    z_centre = torch.where(z_free, z_mean, 0.0)
    y_centre = (y - offset) / weight if family.gaussian and intercept else 0.0
    centre = torch.cat((x_centre, z_centre, x_centre.new_tensor([y_centre])))
    gram = groups.ask(Gram(), {"centre": centre}, per_row, 0.0)["gram"]
    size = (gram.diagonal() / n).sqrt()
    _require_columns(design, gram, sums, n, size)
    if family.gaussian and not float(size[-1]) > 1e-12 * abs(y_centre):
        raise DataError(
            f"the response {design.formula.response.text} is constant; there is nothing to explain"
        )
    found = Coordinates(
        x_centre,
        torch.where(size[:p] > 0, size[:p], 1.0),
        z_centre,
        torch.where(size[p : p + q] > 0, size[p : p + q], 1.0),
        y_centre,
        float(size[-1]) if family.gaussian else 1.0,
        tuple(design.fixed_names),
        tuple(design.random_names),
        tuple(design.blocks),
    )
    return found, {"sums": sums, "gram": gram}


def _require_columns(design: Design, gram: Tensor, sums: Tensor, n: float, size: Tensor) -> None:
    """Each column of the fixed part, and of the random part, must say something that those before do
    not."""
    p = len(design.fixed_names)
    for names, first, what in ((design.fixed_names, 0, "fixed"), (design.random_names, p, "random")):
        span = slice(first, first + len(names))
        own, scale = gram[span, span], size[span]
        mean = sums[span] / n
        kept: list[int] = []
        for j, name in enumerate(names):
            if name != INTERCEPT and float(scale[j]) <= 1e-9 * max(abs(float(mean[j])), 1e-300):
                raise DataError(f"the predictor {name!r} is constant: it cannot be told from the intercept")
            unit = scale[[*kept, j]]
            part = own[[*kept, j]][:, [*kept, j]] / unit / unit.unsqueeze(1) / n
            left = 1.0
            if kept:
                inner = torch.linalg.lstsq(part[:-1, :-1], part[:-1, -1:]).solution
                left = float(part[-1, -1] - part[-1, :-1] @ inner[:, 0])
            if left < FLAT:
                others = ", ".join(repr(names[k]) for k in kept)
                raise DataError(
                    f"the {what} effect {name!r} is a combination of others ({others}), so that "
                    "neither can be "
                    "told from the other; leave it out"
                )
            kept.append(j)
