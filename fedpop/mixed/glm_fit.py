"""The fit of a generalised linear mixed model by quadrature, and its groups' posteriors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.factor import Factor
from fedpop.mixed.gaussian_fit import information_root
from fedpop.mixed.groups import Coordinates, Groups, everyone
from fedpop.mixed.point import Engine, ThetaPoint
from fedpop.mixed.quadrature import GRID, NODES, POINTS, Local, Marginal, Rule, effects
from fedpop.mixed.response import Family
from fedpop.mixed.search import SearchResult, minimised
from fedpop.questions import Question, Units

WIDE = 30.0
"""A standard error of a coefficient in internal units above which the data say nothing about it."""
APART = 15.0
"""A standard deviation of random effects, on the scale of the link, at which groups are all yes or all no:
flat there, or still on its way up at twice as much, it has no bound."""
SEPARATED = (
    "the groups are separated: within (almost) every group all responses are the same, or there is one row "
    "of each, so that the spread of groups grows without bound and no estimate exists; use a model without "
    "random effects, or collect more rows of each group"
)
AGREED = {True: 1e-3, False: 0.05}
"""Nats by which more nodes may change the likelihood, of a grid and of scattered ones; the second is how far
below a maximum a fit counts as converged."""
ENOUGH, FEW = 0.01, 100
"""Nats that a Newton step may promise where a search by scattered nodes is over, and evaluations after which
it is: their gradient is that of their likelihood only as far as they are enough."""
MOST = {True: 1500, False: 8192}
"""Nodes at most."""


def nodes_for(q: int) -> int:
    """Nodes that a search begins with: in each direction of a grid, or scattered ones in all."""
    return NODES.get(q, POINTS)


@dataclass(frozen=True)
class QuadratureEngine(Engine):
    """Value, gradient and posteriors by adaptive Gauss-Hermite quadrature, in internal coordinates."""

    groups: Groups
    units: Coordinates
    family: Family
    constant: float
    start: float
    """The linear predictor of the mean response."""
    nodes: int

    method: ClassVar[str] = "adaptive Gauss-Hermite quadrature"

    @property
    def level(self) -> float:
        return self.start

    @property
    def grid(self) -> bool:
        return len(self.units.z_names) <= GRID

    @property
    def words(self) -> str:
        if not self.grid:
            return f"importance sampling, {self.nodes} quasi-random nodes"
        return f"{self.method}, {self.nodes} nodes for each random effect"

    @cached_property
    def factor(self) -> Factor:
        return Factor(self.units.blocks)

    @cached_property
    def marginal(self) -> Marginal:
        return Marginal(self.units, self.family, self.factor, Rule.of(self.nodes, len(self.units.z_names)))

    def at(self, point: ThetaPoint, curved: bool, among: Tensor | None = None) -> Tensors:
        known = {"b": point.b, "factor": point.factor, "curved": torch.tensor(curved)}
        return self.groups.ask(self.marginal, known, self.marginal.per_row, 0.0, among)

    def refined(self) -> QuadratureEngine | None:
        """The same with half as many nodes again, or twice as many scattered ones; None where that would be
        too many."""
        more = self.nodes * 3 // 2 + 1 if self.grid else 2 * self.nodes
        count = more ** len(self.units.z_names) if self.grid else more
        return replace(self, nodes=more) if count <= MOST[self.grid] else None

    def _evaluate(self, x: Tensor, curved: bool) -> tuple[float, Tensor, Tensor | None]:
        found = self.at(self.point(x), curved)
        hessian = -found["hessian"].reshape(len(x), len(x)) if curved else None
        return -float(found["value"]), -found["slope"], hessian

    def search(self, start: Tensor | None = None) -> tuple[SearchResult, ThetaPoint]:
        p = len(self.units.x_names)
        if start is None:
            b = torch.zeros(p, dtype=torch.float64)
            b[: 1 if self.units.intercept else 0] = self.start
            start = torch.cat((b, self.factor.start(0.5)))
        if self.grid:
            found = minimised(self._evaluate, start, watch=self._require_bound)
        else:
            found = minimised(self._evaluate, start, ENOUGH / 10, FEW, self._require_bound)
            if not found.converged and found.promised < ENOUGH:
                words = f"converged as far as {self.nodes} nodes can tell: a Newton step promises"
                found = replace(found, converged=True, words=f"{words} {found.promised:.1g} nats")
        self._require_information(found)
        return found, self.point(found.x)

    def _require_bound(self, x: Tensor, slope: Tensor) -> None:
        """Raise where estimates run to infinity: the search would follow them for long."""
        p = len(self.units.x_names)
        b, first = x[:p], int(self.units.intercept)
        if float(x[p:].abs().max()) > 2 * APART and float(x[p:] @ slope[p:]) < 0:
            raise EstimateError(SEPARATED)
        if bool((b[first:].abs() > 2 * APART).any()) and float(b[first:] @ slope[first:p]) < 0:
            raise self._separated(b / b.norm())

    def _require_information(self, found: SearchResult) -> None:
        """Raise where a coefficient runs to infinity: the likelihood has no maximum there."""
        p = len(self.units.x_names)
        values, vectors = torch.linalg.eigh(found.hessian[:p, :p])
        flat = values.abs() < WIDE**-2
        if not bool(flat.any()):
            return
        factor = self.factor.matrix(found.x[p:])
        if float(factor.abs().max()) > APART:
            raise EstimateError(SEPARATED)
        raise self._separated(vectors[:, int(values.argmin())])

    def _separated(self, worst: Tensor) -> EstimateError:
        """Along this direction of the fixed effects there is no maximum."""
        names = [n for n, v in zip(self.units.x_names, worst.tolist(), strict=True) if abs(v) > 0.3]
        told = ", ".join(map(repr, names))
        if self.family.binomial:
            return EstimateError(
                f"the data are separated: some combination of {told} tells yes from no without "
                "error, so that "
                "its coefficient grows without bound and no estimate exists. Leave it out, merge categories, "
                "or collect more data"
            )
        return EstimateError(
            f"the data do not determine {told}: where all counts of a category are zero its "
            "coefficient grows "
            "without bound. Leave it out or merge categories"
        )

    def log_likelihood(self, point: ThetaPoint) -> float:
        return float(self.at(point, False)["value"]) + self.constant

    def score(self, x: Tensor, among: Tensor) -> Tensor:
        return self.at(self.point(x), False, among)["slope"]

    def score_and_information(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The information is by Louis' identity."""
        found = self.at(self.point(x), True)
        return found["slope"], -found["hessian"].reshape(len(x), len(x))

    def covariance(self, point: ThetaPoint) -> Tensor:
        p = len(point.b)
        return self._inverse(point)[:p, :p]

    def spread(self, point: ThetaPoint) -> Tensor:
        p = len(point.b)
        return self._inverse(point)[p:, p:]

    def _inverse(self, point: ThetaPoint) -> Tensor:
        root = information_root(self.score_and_information(self.vector(point))[1])
        return root @ root.mT

    def vector(self, point: ThetaPoint) -> Tensor:
        return torch.cat((point.b, self.factor.entries(point.factor)))

    def point(self, x: Tensor) -> ThetaPoint:
        p = len(self.units.x_names)
        return ThetaPoint(x[:p], self.factor.matrix(x[p:]))

    def effects(self, point: ThetaPoint) -> None:
        known = {"b": point.b, "factor": point.factor}
        question = QuadratureEffects(self.units, self.family, self.marginal.rule)
        self.groups.ask(question, known, self.marginal.per_row, 0.0)

    def theta_draws(self, point: ThetaPoint, noise: Tensor, wide: Tensor, count: int) -> list[ThetaPoint]:
        """From the asymptotic law about the estimate."""
        x = self.vector(point)
        root = information_root(self.score_and_information(x)[1])
        return [self.point(x + step) for step in noise[:count] @ root.mT]


@dataclass(frozen=True)
class QuadratureEffects(Question[Tensors]):
    """Posterior mean and covariance of each group's effects, which stay at its site."""

    units: Coordinates
    family: Family
    rule: Rule
    name: ClassVar[str] = "posteriors of groups"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("b", "factor")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        local = Local.of(units.cohort, self.units, self.family)
        found = effects(local, asked["b"], asked["factor"], self.rule)
        factor = asked["factor"]
        kept = {"mean": found.mean @ factor.mT, "cov": factor @ found.covariance @ factor.mT}
        return Answer(everyone(units.cohort), local=kept)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {}


def quadrature(
    groups: Groups, units: Coordinates, family: Family, constant: float, start: float
) -> tuple[QuadratureEngine, SearchResult, ThetaPoint]:
    """The maximum, with as many nodes as it takes for more of them not to matter."""
    q = len(units.z_names)
    engine = QuadratureEngine(groups, units, family, constant, start, nodes_for(q))
    found, point = engine.search()
    off = 0.0
    while (finer := engine.refined()) is not None:
        off = abs(finer.log_likelihood(point) - (constant - found.value))
        if off < AGREED[engine.grid] or not math.isfinite(off):
            return engine, found, point
        engine = finer
        found, point = engine.search(found.x)
    if off > AGREED[False]:
        words = f"not converged: half of the {engine.nodes} nodes gave a likelihood {off:.2g} nats away"
        found = replace(found, converged=False, words=words)
    return engine, found, point
