"""Generalised linear mixed models: each group's likelihood by adaptive Gauss-Hermite quadrature.

With u ~ N(0, I) and eta = X b + offset + Z Lambda u, a group's likelihood is an integral over u, of as
many dimensions as there are random effects. Nodes are laid around the mode, in units of the curvature
there; with one node that is Laplace's approximation. At a node eta is linear in (b, Lambda), with rows d
= (x, z u'): gradient and curvature there are those of a generalised linear model, and Louis' identity
puts them together. All three are sums over groups.

A grid of more than four dimensions has too many nodes. There they are quasi-random points of the standard
normal law, a tenth further apart, and their weights make up for it: importance sampling, with the same points
for every group and every theta, so that the likelihood stays a smooth function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.design import Coordinates, coded, everyone
from fedpop.mixed.engine import (
    FIT_NATS,
    Engine,
    Factor,
    SearchResult,
    ThetaPoint,
    information_root,
    minimised,
    polished,
)
from fedpop.mixed.families import LOG_DISPERSION, Family
from fedpop.mixed.groups import Groups
from fedpop.mixed.nesting import Paths
from fedpop.questions import Question, Units

GRID_NODES = {1: 25, 2: 15, 3: 9, 4: 7}
"""Nodes in each direction, by the number of random effects."""
GRID = max(GRID_NODES)
"""Random effects up to which there is a grid."""
SCATTERED_NODES = 1024
"""Quasi-random points that a search begins with where there is none."""
NODE_SPREAD = 1.1
"""How much further apart these are than the normal law has them: its tails are thinner than posteriors'."""
GROUP_MODE_STEPS = 100
GROUP_MODE_TOLERANCE = 1e-9
SCATTER_WIDTH = 1.2


@dataclass(frozen=True)
class Rule:
    """Nodes ``[k, q]`` for the standard normal weight, and the logarithms of their weights ``[k]``."""

    nodes: Tensor
    log_weight: Tensor

    @classmethod
    def of(cls, count: int, q: int) -> Rule:
        """With so many nodes in each direction; of more than four, with so many in all."""
        return cls.scattered(count, q) if q > GRID else cls.grid(count, q)

    @classmethod
    def scattered(cls, count: int, q: int) -> Rule:
        """Sobol's points and their mirror images, with the moments of the normal law up to the third."""
        # Scrambled, by another seed: else the first of them lies in a corner of all dimensions.
        drawn = torch.quasirandom.SobolEngine(q, scramble=True, seed=0).draw(count // 2, dtype=torch.float64)
        half = torch.special.ndtri(drawn.clamp(min=1e-12))
        points = torch.cat((half, -half))
        root = torch.linalg.cholesky(points.mT @ points / count)
        points = torch.linalg.solve_triangular(root, points.mT, upper=False).mT
        log_weight = (
            q * math.log(NODE_SPREAD) + 0.5 * (1 - NODE_SPREAD**2) * points.square().sum(1) - math.log(count)
        )
        return cls(NODE_SPREAD * points, log_weight)

    @classmethod
    def grid(cls, each: int, q: int) -> Rule:
        points, weights = np.polynomial.hermite_e.hermegauss(each)
        t, w = torch.from_numpy(points), torch.from_numpy(weights / math.sqrt(2 * math.pi)).log()
        nodes = torch.cartesian_prod(*[t] * q).reshape(-1, q)
        return cls(nodes, torch.cartesian_prod(*[w] * q).reshape(-1, q).sum(1))


@dataclass(frozen=True)
class Local:
    """A cohort's rows in internal coordinates, and sums over rows of each group."""

    x: Tensor
    z: Tensor
    y: Tensor
    offset: Tensor
    weight: Tensor
    cohort: Cohort
    family: Family

    @classmethod
    def of(cls, cohort: Cohort, units: Coordinates, family: Family) -> Local:
        x, z, y, offset, weight = coded(cohort, units)
        return cls(x, z, y.unsqueeze(1), offset.unsqueeze(1), weight.unsqueeze(1), cohort, family)

    def by_group(self, values: Tensor) -> Tensor:
        """``[n, ...]`` rows to ``[C, ...]`` sums."""
        return values.new_zeros((len(self.cohort), *values.shape[1:])).index_add(0, self.cohort.owner, values)

    def terms(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted log-density, its slope and minus its curvature in eta, ``[n, k]`` each."""
        return self.family.terms(eta, self.y, self.weight)

    def modes(self, base: Tensor, zl: Tensor) -> tuple[Tensor, Tensor]:
        """Modes ``[C, q]`` of u and a root of the curvature there ``[C, q, q]``, by Newton's method with
        halved steps. Where rows bend the wrong way, which those of few families do and only far from a
        mode, they count as straight: nodes are laid by this curvature, and no integral is made of it."""
        owner, q = self.cohort.owner, zl.shape[1]
        u = base.new_zeros((len(self.cohort), q))
        eye = torch.eye(q, dtype=base.dtype)

        def at(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            eta = base + (zl * u[owner]).sum(1, keepdim=True)
            value, slope, bend = self.terms(eta)
            bend = bend if self.family.concave else bend.clamp(min=0)
            total = self.by_group(value)[:, 0] - 0.5 * u.square().sum(1)
            inner = self.by_group((zl.unsqueeze(2) * zl.unsqueeze(1) * bend.unsqueeze(2)).flatten(1))
            return total, self.by_group(zl * slope) - u, inner.unflatten(1, (q, q)) + eye

        value, slope, bend = at(u)
        for _ in range(GROUP_MODE_STEPS):
            step = torch.cholesky_solve(slope.unsqueeze(2), torch.linalg.cholesky(bend)).squeeze(2)
            gain = (slope * step).sum(1)
            if bool(
                (gain <= GROUP_MODE_TOLERANCE**2 + 1e-15 * value.abs()).all()
            ):  # rounding, where values are large
                u = u + step  # which values can no longer tell from none, and curvatures can
                break
            share = torch.ones_like(value)
            for _ in range(40):
                moved = u + share.unsqueeze(1) * step
                new = at(moved)
                good = new[0] >= value + 1e-4 * share * gain - 1e-12 * value.abs()
                if bool(good.all()):
                    break
                share = torch.where(good, share, 0.5 * share)
            u = torch.where(good.unsqueeze(1), moved, u)
            if not bool(good.any()):
                break
            value, slope, bend = at(u)
        return u, torch.linalg.cholesky(bend)


@dataclass(frozen=True)
class Integrated:
    """Of each group: log-likelihood ``[C]``, nodes ``[C, k, q]``, their posterior weights ``[C, k]``,
    and the linear predictors of its rows there with slopes and curvatures, ``[n, k]``."""

    value: Tensor
    nodes: Tensor
    share: Tensor
    eta: Tensor
    slope: Tensor
    bend: Tensor


def integrated(local: Local, b: Tensor, factor: Tensor, rule: Rule) -> Integrated:
    """The integrals of a cohort's groups at (b, Lambda)."""
    base, zl = (local.x @ b).unsqueeze(1) + local.offset, local.z @ factor
    mode, root = local.modes(base, zl)
    away = torch.linalg.solve_triangular(root.mT, rule.nodes.mT.expand(len(root), -1, -1), upper=True).mT
    nodes = mode.unsqueeze(1) + away
    eta = base + torch.einsum("nq,nkq->nk", zl, nodes[local.cohort.owner])
    value, slope, bend = local.terms(eta)
    joint = local.by_group(value) - 0.5 * nodes.square().sum(2)
    log_share = joint + rule.log_weight + 0.5 * rule.nodes.square().sum(1)
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(1)
    total = log_share.logsumexp(1)
    return Integrated(total - log_det, nodes, (log_share - total.unsqueeze(1)).exp(), eta, slope, bend)


@dataclass(frozen=True)
class Marginal(Question[Tensors]):
    """The log-likelihood, its gradient in (b, theta, psi) and, where asked for, its Hessian; psi is there
    where the family has a dispersion."""

    units: Coordinates
    family: Family
    nodes: int
    """As ``Rule.of`` counts them."""
    name: ClassVar[str] = "marginal likelihood by quadrature"

    @cached_property
    def rule(self) -> Rule:
        return Rule.of(self.nodes, len(self.units.z_names))

    @cached_property
    def factor(self) -> Factor:
        return Factor(self.units.blocks)

    def memory(self, asked: Tensors) -> tuple[float, float]:
        width = len(self.units.x_names) + self.factor.size + 8 + 2 * len(self.units.z_names)
        return 8.0 * len(self.rule.nodes) * width, 0.0

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("b", "factor", "curved", *self.beside)}

    @property
    def beside(self) -> tuple[str, ...]:
        return (LOG_DISPERSION,) if self.family.dispersed else ()

    def family_at(self, asked: Tensors) -> Family:
        return self.family.at_log(asked[LOG_DISPERSION]) if self.family.dispersed else self.family

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        family = self.family_at(asked)
        local = Local.of(units.cohort, self.units, family)
        found = integrated(local, asked["b"], asked["factor"], self.rule)
        owner = units.cohort.owner
        rows, cols = (torch.tensor(v) for v in zip(*self.factor.places, strict=True))
        here, share = found.nodes[owner], found.share[owner]
        weighted = share * found.slope
        slope_b = local.x.mT @ weighted.sum(1)
        psi: tuple[Tensor, ...] = ()
        if family.dispersed:
            psi = family.dispersion_terms(found.eta, local.y, local.weight)
        if not bool(asked["curved"]):
            turned = torch.einsum("nk,nq,nkr->qr", weighted, local.z, here)
            slopes = [slope_b, turned[rows, cols], *[(share * one).sum().reshape(1) for one in psi[:1]]]
            sums = {"value": found.value.sum().reshape(1), "slope": torch.cat(slopes)}
            return Answer(torch.isfinite(found.value), sums=sums)
        # d eta / d (b, theta) of each row at each node.
        wide = local.x.unsqueeze(1).expand(-1, here.shape[1], -1)
        d = torch.cat((wide, local.z[:, None, rows] * here[:, :, cols]), dim=2)
        each = d * found.slope.unsqueeze(2)
        if psi:
            each = torch.cat((each, psi[0].unsqueeze(2)), dim=2)
        scores = local.by_group(each)
        mean = (scores * found.share.unsqueeze(2)).sum(1)
        apart = (scores - mean.unsqueeze(1)) * found.share.sqrt().unsqueeze(2)
        spread = apart.flatten(0, 1)
        hessian = spread.mT @ spread
        size, bend = d.shape[2], share * found.bend
        if family.concave:
            flat = (d * bend.clamp(min=0).sqrt().unsqueeze(2)).flatten(0, 1)
            hessian[:size, :size] -= flat.mT @ flat
        else:
            hessian[:size, :size] -= d.flatten(0, 1).mT @ (d * bend.unsqueeze(2)).flatten(0, 1)
        if psi:
            across = torch.einsum("nk,nki->i", share * psi[1], d)
            hessian[size, :size] += across
            hessian[:size, size] += across
            hessian[size, size] += (share * psi[2]).sum()
        sums = {"value": found.value.sum().reshape(1), "slope": mean.sum(0), "hessian": hessian.flatten()}
        return Answer(torch.isfinite(found.value), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


@dataclass(frozen=True)
class Effects:
    """Posterior mean ``[C, q]`` and covariance ``[C, q, q]`` of u."""

    mean: Tensor
    covariance: Tensor


def effects(local: Local, b: Tensor, factor: Tensor, rule: Rule) -> Effects:
    """By the same nodes."""
    found = integrated(local, b, factor, rule)
    mean = (found.nodes * found.share.unsqueeze(2)).sum(1)
    apart = found.nodes - mean.unsqueeze(1)
    return Effects(mean, torch.einsum("ck,cki,ckj->cij", found.share, apart, apart))


def resampled(local: Local, point_b: Tensor, factor: Tensor, normal: Tensor, uniform: Tensor) -> Tensor:
    """Draws ``[C, L, q]`` of u: importance resampling out of normal proposals ``[C, K, q]``, a fifth
    wider than the curvature at the mode says, by uniform numbers ``[C, L]``."""
    base, zl = (local.x @ point_b).unsqueeze(1) + local.offset, local.z @ factor
    mode, root = local.modes(base, zl)
    proposals = (
        mode.unsqueeze(1) + SCATTER_WIDTH * torch.linalg.solve_triangular(root.mT, normal.mT, upper=True).mT
    )
    eta = base + torch.einsum("nq,nkq->nk", zl, proposals[local.cohort.owner])
    joint = local.by_group(local.terms(eta)[0]) - 0.5 * proposals.square().sum(2)
    share = (joint + 0.5 * normal.square().sum(2)).softmax(1)
    picked = torch.searchsorted(share.cumsum(1), uniform).clamp(max=share.shape[1] - 1)
    out: Tensor = proposals.gather(1, picked.unsqueeze(2).expand(-1, -1, proposals.shape[2]))
    return out


# --- the engine ------------------------------------------------------------------------------------


UNDETERMINED_ERROR = 30.0
"""A standard error of a coefficient in internal units above which the data say nothing about it."""
SEPARATED_SD = 15.0
"""A standard deviation of random effects, on the scale of the link, at which groups are all yes or all no:
flat there, or still on its way up at twice as much, it has no bound."""
LARGEST_LOG_DISPERSION = {"negative-binomial": 12.0, "beta-binomial": 12.0, "gamma": 20.0}
"""The logarithm of a dispersion beyond which it is none, by family: what it says of rows is lost in rounding
soon after. That of counts is beside the logarithm of their mean."""
SEPARATED = (
    "the groups are separated: within (almost) every group all responses are the same, or there is one row "
    "of each, so that the spread of groups grows without bound and no estimate exists; use a model without "
    "random effects, or collect more rows of each group"
)
NODE_AGREEMENT_NATS = {True: 1e-3, False: 0.05}
"""Nats by which more nodes may change the likelihood, of a grid and of scattered ones; the second is how far
below a maximum a fit counts as converged."""
SCATTERED_SEARCH_NATS, SCATTERED_EVALUATIONS = 0.01, 100
"""Nats that a Newton step may promise where a search by scattered nodes is over, and evaluations after which
it is: their gradient is that of their likelihood only as far as they are enough."""
MAX_NODES = {True: 1500, False: 8192}
"""Nodes at most."""
ROUGH_FROM, ROUGH_NODES = 3, 3
"""Random effects from which a search on a grid begins where one by so few nodes has come to: each of its
evaluations costs a tenth or less, and fits whose variances are zero take many."""
WIDE_SEARCH_NATS = 1e-5
"""Nats that a Newton step may promise where a search on such a grid is over, whose likelihood is known to a
hundred times as many."""
ROUGH_NATS, ROUGH_EVALUATIONS = 0.01, 60
"""What a Newton step may promise where that one is over, and its evaluations at most."""
REFINED_EVALUATIONS = 25
"""Of a search by scattered nodes that begins where one by half as many was over."""


def nodes_for(q: int) -> int:
    """Nodes that a search begins with: in each direction of a grid, or scattered ones in all."""
    return GRID_NODES.get(q, SCATTERED_NODES)


@dataclass(frozen=True)
class QuadratureEngine(Engine):
    """Value, gradient and posteriors by adaptive Gauss-Hermite quadrature, in internal coordinates."""

    groups: Groups
    units: Coordinates
    constant: float
    start: float
    """The linear predictor of the mean response."""
    nodes: int

    method: ClassVar[str] = "adaptive Gauss-Hermite quadrature"

    @property
    def family(self) -> Family:
        return self.groups.study.family

    @property
    def level(self) -> float:
        return self.start

    @property
    def grid(self) -> bool:
        return len(self.units.z_names) <= GRID

    @property
    def wide(self) -> bool:
        """The grid is one of so many directions that each evaluation counts."""
        return self.grid and len(self.units.z_names) >= ROUGH_FROM

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
        return Marginal(self.units, self.family, self.nodes)

    def at(self, point: ThetaPoint, curved: bool, among: Tensor | None = None) -> Tensors:
        place = self.vector(point).numpy().tobytes()
        if among is None and place in self.answered and ("hessian" in self.answered[place] or not curved):
            return self.answered[place]
        known = self.known(point) | {"curved": torch.tensor(curved)}
        answer = self.groups.ask(self.marginal, known, among)
        if among is None:
            self.answered[place] = answer
        return answer

    @cached_property
    def answered(self) -> dict[bytes, Tensors]:
        """Everyone's answers by the point that they are about."""
        return {}

    def known(self, point: ThetaPoint) -> Tensors:
        """What everyone is told of a point."""
        known = {"b": point.b, "factor": point.factor}
        return known | ({LOG_DISPERSION: self._log_dispersion(point)} if self.family.dispersed else {})

    def _log_dispersion(self, point: ThetaPoint) -> Tensor:
        return torch.tensor([point.dispersion], dtype=torch.float64).log()[: int(self.family.dispersed)]

    def refined(self) -> QuadratureEngine | None:
        """The same with half as many nodes again, or twice as many scattered ones; None where that would be
        too many."""
        more = self.nodes * 3 // 2 + 1 if self.grid else 2 * self.nodes
        count = more ** len(self.units.z_names) if self.grid else more
        return replace(self, nodes=more) if count <= MAX_NODES[self.grid] else None

    def _evaluate(self, x: Tensor, curved: bool) -> tuple[float, Tensor, Tensor | None]:
        found = self.at(self.point(x), curved)
        hessian = -found["hessian"].reshape(len(x), len(x)) if curved else None
        return -float(found["value"]), -found["slope"], hessian

    def search(self, start: Tensor | None = None, polish: bool = True) -> tuple[SearchResult, ThetaPoint]:
        most = SCATTERED_EVALUATIONS if start is None else REFINED_EVALUATIONS
        if start is None:
            start = self._begin()
        if self.grid:
            nats = WIDE_SEARCH_NATS if self.wide else FIT_NATS
            found = minimised(self._evaluate, start, nats, watch=self._require_bound, polish=polish)
            enough = NODE_AGREEMENT_NATS[True] / 10
        else:
            nats, enough = SCATTERED_SEARCH_NATS / 10, SCATTERED_SEARCH_NATS
            found = minimised(self._evaluate, start, nats, most, self._require_bound, polish)
        if not found.converged and 0 <= found.promised < enough:
            words = f"converged as far as {self.nodes} nodes can tell: a Newton step promises"
            found = replace(found, converged=True, words=f"{words} {found.promised:.1g} nats")
        self._require_information(found)
        return found, self.point(found.x)

    def polished(self, found: SearchResult) -> SearchResult:
        """After Newton's last steps."""
        return polished(self._evaluate, found)

    def _begin(self) -> Tensor:
        """Everybody's mean and spreads of a half, or where a search by few nodes comes from there."""
        b = torch.zeros(len(self.units.x_names), dtype=torch.float64)
        b[: 1 if self.units.intercept else 0] = self.start
        start = torch.cat((b, self.factor.start(0.5), b.new_zeros(int(self.family.dispersed))))
        if not self.wide:
            return start
        few = replace(self, nodes=ROUGH_NODES)
        rough = minimised(few._evaluate, start, ROUGH_NATS, ROUGH_EVALUATIONS).x
        far = float(rough.abs().max()) > SEPARATED_SD  # by few nodes a likelihood may have no maximum
        return start if far or not bool(rough.isfinite().all()) else rough

    def _require_bound(self, x: Tensor, slope: Tensor) -> None:
        """Raise where estimates run to infinity: the search would follow them for long."""
        p, end = len(self.units.x_names), len(self.units.x_names) + self.factor.size
        b, first = x[:p], int(self.units.intercept)
        if float(x[p:end].abs().max()) > 2 * SEPARATED_SD and float(x[p:end] @ slope[p:end]) < 0:
            raise EstimateError(SEPARATED)
        if self.family.dispersed:
            largest = LARGEST_LOG_DISPERSION[self.family.name] + max(self.start, 0.0)
            if abs(float(x[-1])) > largest:
                raise self._no_dispersion(float(x[-1]))
        if bool((b[first:].abs() > 2 * SEPARATED_SD).any()) and float(b[first:] @ slope[first:p]) < 0:
            raise self._separated(b / b.norm())

    def _require_information(self, found: SearchResult) -> None:
        """Raise where a coefficient runs to infinity: the likelihood has no maximum there."""
        p = len(self.units.x_names)
        if self.family.dispersed and float(found.hessian[-1, -1]) < UNDETERMINED_ERROR**-2:
            raise self._no_dispersion(float(found.x[-1]))
        values, vectors = torch.linalg.eigh(found.hessian[:p, :p])
        flat = values.abs() < UNDETERMINED_ERROR**-2
        if not bool(flat.any()):
            return
        factor = self.factor.matrix(found.x[p : p + self.factor.size])
        if float(factor.abs().max()) > SEPARATED_SD:
            raise EstimateError(SEPARATED)
        raise self._separated(vectors[:, int(values.argmin())])

    def _no_dispersion(self, psi: float) -> EstimateError:
        """The dispersion has no estimate."""
        simpler = {"negative-binomial": "poisson", "beta-binomial": "binomial"}.get(self.family.name)
        if simpler is None or psi <= 0:
            one_trial = " (rows of one trial say nothing about it)" if self.family.binomial else ""
            return EstimateError(
                f"the data do not determine the {self.family.dispersion} of this {self.family.name} model"
                f"{one_trial}"
            )
        return EstimateError(
            f"responses vary no more than those of a {simpler} model, so that the {self.family.dispersion} "
            f"of this {self.family.name} model grows without bound; fit it with family={simpler!r}"
        )

    def _separated(self, worst: Tensor) -> EstimateError:
        """Along this direction of the fixed effects there is no maximum."""
        names = [n for n, v in zip(self.units.x_names, worst.tolist(), strict=True) if abs(v) > 0.3]
        involved = ", ".join(map(repr, names))
        if self.family.binomial:
            return EstimateError(
                f"the data are separated: some combination of {involved} tells yes from no without "
                "error, so that "
                "its coefficient grows without bound and no estimate exists. Leave it out, merge categories, "
                "or collect more data"
            )
        return EstimateError(
            f"the data do not determine {involved}: where all counts of a category are zero its "
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
        return torch.cat((point.b, self.factor.entries(point.factor), self._log_dispersion(point)))

    def point(self, x: Tensor) -> ThetaPoint:
        p, end = len(self.units.x_names), len(self.units.x_names) + self.factor.size
        dispersion = math.exp(float(x[-1])) if self.family.dispersed else 1.0
        return ThetaPoint(x[:p], self.factor.matrix(x[p:end]), 1.0, dispersion)

    def effects(self, point: ThetaPoint) -> None:
        self.groups.ask(QuadratureEffects(self.units, self.family, self.nodes), self.known(point))

    def paths(self, cohort: Cohort, point: ThetaPoint) -> Paths:
        rule = Rule.of(self.nodes, len(self.units.z_names))
        local = Local.of(cohort, self.units, self.family.at(point.dispersion))
        found = effects(local, point.b, point.factor, rule)
        turned = point.factor @ found.covariance @ point.factor.mT
        return Paths((found.mean @ point.factor.mT,), (turned,), found.mean.new_zeros(len(cohort)))

    def theta_draws(self, point: ThetaPoint, noise: Tensor, wide: Tensor, count: int) -> list[ThetaPoint]:
        """From the asymptotic law about the estimate."""
        x = self.vector(point)
        root = information_root(self.score_and_information(x)[1])
        return [self.point(x + step) for step in noise[:count] @ root.mT]


@dataclass(frozen=True)
class QuadratureEffects(Marginal):
    """Posterior mean and covariance of each group's effects, which stay at its site."""

    name: ClassVar[str] = "posteriors of groups"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("b", "factor", *self.beside)}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        local = Local.of(units.cohort, self.units, self.family_at(asked))
        found = effects(local, asked["b"], asked["factor"], self.rule)
        factor = asked["factor"]
        states = {"mean": found.mean @ factor.mT, "cov": factor @ found.covariance @ factor.mT}
        return Answer(everyone(units.cohort), local=states)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {}


def quadrature(
    groups: Groups, units: Coordinates, constant: float, start: float
) -> tuple[QuadratureEngine, SearchResult, ThetaPoint]:
    """The maximum, with as many nodes as it takes for more of them not to matter."""
    q = len(units.z_names)
    engine = QuadratureEngine(groups, units, constant, start, nodes_for(q))
    found, point = engine.search(polish=False)
    off = 0.0
    while (finer := engine.refined()) is not None:
        off = abs(finer.log_likelihood(point) - (constant - found.value))
        if off < NODE_AGREEMENT_NATS[engine.grid] or not math.isfinite(off):
            break
        engine = finer
        found, point = engine.search(found.x, polish=False)
    else:
        if off > NODE_AGREEMENT_NATS[False]:
            words = f"not converged: half of the {engine.nodes} nodes gave a likelihood {off:.2g} nats away"
            found = replace(found, converged=False, words=words)
    found = engine.polished(found)
    return engine, found, engine.point(found.x)
