"""Linear mixed models, exactly: the likelihood in the relative factor alone, all else in closed form.

With y = X b + Z u + e, u ~ N(0, s2 Sigma), Sigma = Lambda Lambda', b and s2 have a closed form for any Lambda
(Bates et al., 2015): of W = (X, y) the server needs S = sum W_i' V_i^-1 W_i and D = sum log det V_i, with
V_i = I + Z_i Sigma Z_i'. Both are sums over units, found from the innermost groups outward (``nesting``), and
so are their derivatives in the entries of Sigma, which are found on the way. With P, M, R as there, a level's
effects are taken out of products G of columns as J' G J,

    J = (-P R; I),  B = I - M P,  K = B R,  N = B M,
    Y_a = dG_a[Z] J,  X_a = (Y_a; dSigma_a K),  C = (P, B'; B, -N):
    dG_a  <- J' dG_a J - K' dSigma_a K,             dD_a = tr(P dM_a) + tr(N dSigma_a)
    dG_ab <- J' dG_ab J - X_a' C X_b - X_b' C X_a

Of W'W nothing is needed but its sum over all rows, from which the part that random effects explain is taken.
Nothing here needs Sigma to be invertible. REML adds log det of the part of S that belongs to X.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import DataError, EstimateError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.design import Coordinates, coded, everyone
from fedpop.mixed.engine import (
    SINGULAR_FACTOR,
    Engine,
    Factor,
    SearchResult,
    ThetaPoint,
    information_root,
    minimised,
)
from fedpop.mixed.groups import Groups
from fedpop.mixed.nesting import CELLS, Paths, Tree, paths, shrunk, spans
from fedpop.questions import Question, Units
from fedpop.server.quasi_newton import rows_of_jacobian

PROFILE_NUMBERS_AT_ONCE = 2**18
"""Numbers that are worked on at once."""
PROFILES_BESIDE, EFFECTS_BESIDE = 16, 4
"""How many times the products of a cell these are, of many factors and for posteriors."""
IN_PARTS = (0.0, 0.0)
"""Bytes of a row and of a unit where an answer takes care itself: products are cached, not rows."""


def parts_of(cells: Cohort, units: Coordinates, beside: int) -> Iterator[Cohort]:
    """Consecutive units whose cells are worked on together, where a cell takes so many times what it holds;
    a unit is never cut."""
    size = len(units.z_names) + len(units.x_names) + 1
    most = PROFILE_NUMBERS_AT_ONCE // (len(units.z_names) * size * beside)
    ends, start, row = cells.sizes.cumsum(0), 0, 0
    while start < len(cells):
        end = max(int(torch.searchsorted(ends, row + most, right=True)), start + 1)
        to = int(ends[end - 1])
        yield cells.take(slice(row, to), cells.units[start:end], cells.sizes[start:end])
        start, row = end, to


def group_products(cells: Cohort, units: Coordinates) -> Tensor:
    """Products ``[K, q, q + m]`` of Z with Z and W = (X, y) in internal coordinates, of each innermost
    group."""
    q, x = len(units.z_names), cells.x
    assert isinstance(x, dict)
    mean, products = x["mean"], x["products"]
    if units.kept is not None:
        kept = [*range(q), *(q + j for j in units.kept), mean.shape[1] - 1]
        mean, products = mean[:, kept], products[:, :, kept]
    one = mean.new_ones(1)
    scale = 1 / torch.cat((units.z_scale, units.x_scale, one))
    apart = (mean - torch.cat((units.z_centre, units.x_centre, units.y_centre * one))) * scale
    outer = (apart[:, :q] * cells.y.unsqueeze(1)).unsqueeze(2) * apart.unsqueeze(1)
    return torch.addcmul(outer, products, scale[:q].unsqueeze(1) * scale)


def whole_products(cohort: Cohort, units: Coordinates) -> Tensor:
    """W'W of all rows ``[m, m]``."""
    x, _, y, offset, weight = coded(cohort, units)
    w = torch.cat((x, (y - offset - units.y_centre).unsqueeze(1)), dim=1) * weight.sqrt().unsqueeze(1)
    return w.mT @ w


@dataclass(frozen=True)
class Profile(Question[Tensors]):
    """What of W'W random effects explain at a relative factor, and D, with derivatives of S and D in the
    entries of Sigma: the first, and the second where they are asked for. W'W itself, which is the same at any
    factor, and the number of rows where they are asked for, too."""

    units: Coordinates
    name: ClassVar[str] = "profile"

    @cached_property
    def factor(self) -> Factor:
        return Factor(self.units.blocks)

    def memory(self, asked: Tensors) -> tuple[float, float]:
        return IN_PARTS

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("factor", "curved", "whole")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        factor, curved, sums = asked["factor"], bool(asked["curved"]), Tensors()
        if bool(asked["whole"]):
            sums["ww"] = whole_products(units.cohort, self.units).flatten()
            sums["rows"] = factor.new_tensor([float(units.cohort.examples)])
        k = self.factor.size
        beside = 4 + (2 * k + 4 * k * k * curved) * (len(self.units.widths) > 1)
        for some in parts_of(units.split(CELLS), self.units, beside):
            for name, value in profiled(some, self.units, factor, curved).items():
                sums[name] = sums[name] + value.flatten() if name in sums else value.flatten()
        return Answer(everyone(units.cohort), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


def profiled(cells: Cohort, units: Coordinates, factor: Tensor, curved: bool) -> Tensors:
    """``explained``, ``log_det`` and, by the entries of Sigma, ``s1``, ``d1`` and, where ``curved``, ``s2``,
    ``d2``."""
    tree, g, entries = Tree.of(cells), group_products(cells, units), Factor(units.blocks)
    q, m = g.shape[1], g.shape[2] - g.shape[1]
    g1, g2 = g.new_zeros((len(g), 0, *g.shape[1:])), g.new_zeros((len(g), 0, 0, *g.shape[1:]))
    explained, s1, s2 = g.new_zeros((m, m)), g.new_zeros((0, m, m)), g.new_zeros((0, 0, m, m))
    d, d1, d2 = g.new_zeros(1), g.new_zeros(0), g.new_zeros((0, 0))
    for level, (width, span) in enumerate(zip(units.widths, spans(units.widths), strict=True)):
        outer, lower = q - span.stop, g1.shape[1] > 0  # effects further out; parameters further in
        mine = [i for i, (row, _) in enumerate(entries.places) if span.start <= row < span.stop]
        e = entries.basis[mine][:, span, span]
        zz, r = g[:, :width, :width].contiguous(), g[:, :width, width:]
        p, log_det = shrunk(zz, factor[span, span])
        h = p @ r
        k = r - zz @ h
        b = torch.eye(width, dtype=g.dtype) - zz @ p
        n = b @ zz
        ek = torch.einsum("aij,kjr->kair", e, k)
        explained += torch.einsum("kir,kis->rs", r[..., outer:], h[..., outer:])
        d = d + log_det.sum()
        slope1 = -torch.einsum("kir,kais->ars", k[..., outer:], ek[..., outer:])
        slope_d = torch.einsum("kij,aij->a", n, e)
        x, cx = ek, -torch.einsum("kij,kajr->kair", n, ek) if curved else ek
        bend2, bend_d = s2, -torch.einsum("aij,kjl,blm,kmi->ab", e, n, e, n) if curved else d2
        if lower:
            turned, y = _turned(g1, h.unsqueeze(1), width)
            slope1 = torch.cat((s1 - _explained(g1, y, h.unsqueeze(1), width, outer).sum(0), slope1))
            dm = g1[:, :, :width, :width]
            slope_d = torch.cat((d1 + torch.einsum("kij,kaij->a", p, dm), slope_d))
        if lower and curved:
            twice, y2 = _turned(g2, h[:, None, None], width)
            bend2 = s2 - _explained(g2, y2, h[:, None, None], width, outer).sum(0)
            below, beside = y.new_zeros((len(y), y.shape[1], width, y.shape[3])), torch.zeros_like(ek)
            x = torch.cat((torch.cat((y, below), dim=2), torch.cat((beside, ek), dim=2)), dim=1)
            first = torch.cat((p.unsqueeze(1) @ y, b.mT.unsqueeze(1) @ ek), dim=1)
            second = torch.cat((b.unsqueeze(1) @ y, cx), dim=1)
            cx = torch.cat((first, second), dim=2)
            pm, bm = p.unsqueeze(1) @ dm, b.unsqueeze(1) @ dm @ b.mT.unsqueeze(1)
            inside = torch.einsum("kij,kabij->ab", p, g2[..., :width, :width])
            inside = d2 + inside - torch.einsum("kaij,kbji->ab", pm, pm)
            across = torch.einsum("kaij,bij->ab", bm, e)
            bend_d = torch.cat((torch.cat((inside, across), dim=1), torch.cat((across.mT, bend_d), dim=1)))
        if curved:
            pairs = torch.einsum("kair,kbis->abrs", x[..., outer:], cx[..., outer:])
            s2, d2 = _grown(bend2, len(pairs)) - pairs - pairs.mT, bend_d
        s1, d1 = slope1, slope_d
        if level + 1 < len(units.widths):
            down = -torch.einsum("kir,kais->kars", k[..., :outer], ek)
            g1 = tree.parents_sum(level, torch.cat((turned, down), dim=1) if lower else down)
            if curved:
                pairs = torch.einsum("kair,kbis->kabrs", x[..., :outer], cx)
                pairs = pairs + torch.einsum("kbir,kais->kabrs", cx[..., :outer], x)
                g2 = tree.parents_sum(level, (_grown(twice, pairs.shape[1], 1) if lower else 0) - pairs)
            g = tree.parents_sum(level, g[:, width:, width:] - r[..., :outer].mT @ h)
    out = {"explained": explained, "log_det": d, "s1": s1, "d1": d1}
    return out | ({"s2": s2, "d2": d2} if curved else {})


def _turned(g: Tensor, h: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """J' G J of derivatives ``[K, ..., z, c]``, rows of effects further out, and Y."""
    y = g[..., :width, width:] - g[..., :width, :width] @ h
    outer = g.shape[-2] - width
    return g[..., width:, width:] - g[..., width:, :width] @ h - h[..., :outer].mT @ y, y


def _explained(g: Tensor, y: Tensor, h: Tensor, width: int, outer: int) -> Tensor:
    """What J' G J takes from the rows and columns of W."""
    w = h[..., outer:]
    return g[..., :width, width + outer :].mT @ w + w.mT @ y[..., outer:]


def _grown(v: Tensor, size: int, dim: int = 0) -> Tensor:
    """With zeros for further parameters after these two dimensions' own."""
    shape = list(v.shape)
    shape[dim] = shape[dim + 1] = size
    out, count = v.new_zeros(shape), v.shape[dim]
    out.narrow(dim, 0, count).narrow(dim + 1, 0, count).copy_(v)
    return out


@dataclass(frozen=True)
class Profiles(Question[Tensors]):
    """S and D at many factors at once ``[T, q, q]``: what theta's law is made of."""

    units: Coordinates
    name: ClassVar[str] = "profiles"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        return IN_PARTS

    def ask(self, known: Tensors) -> Tensors:
        return {"factors": known["factors"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        factors = asked["factors"]
        m, count = len(self.units.x_names) + 1, len(factors)
        sums = {"explained": factors.new_zeros((count, m, m)), "log_det": factors.new_zeros(count)}
        for cells in parts_of(units.split(CELLS), self.units, PROFILES_BESIDE):
            tree, products = Tree.of(cells), group_products(cells, self.units)
            each = max(1, PROFILE_NUMBERS_AT_ONCE // products.numel())
            for start in range(0, count, each):
                some = slice(start, start + each)
                explained, log_det = self.without_derivatives(tree, products, factors[some])
                sums["explained"][some] += explained
                sums["log_det"][some] += log_det
        return Answer(everyone(units.cohort), sums={n: v.flatten() for n, v in sums.items()})

    def without_derivatives(self, tree: Tree, g: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """What is explained ``[T, m, m]``, and D ``[T]``."""
        widths, q, m = self.units.widths, g.shape[1], g.shape[2] - g.shape[1]
        g, d = g.expand(len(factors), *g.shape), factors.new_zeros(len(factors))
        explained = factors.new_zeros((len(factors), m, m))
        for level, (width, span) in enumerate(zip(widths, spans(widths), strict=True)):
            p, log_dets = shrunk(g[..., :width, :width], factors[:, None, span, span])
            r, d, outer = g[..., :width, width:], d + log_dets.sum(1), q - span.stop
            h = p @ r
            explained += torch.einsum("tkir,tkis->trs", r[..., outer:], h[..., outer:])
            if outer:
                g = tree.parents_sum(level, g[..., width:, width:] - r[..., :outer].mT @ h, 1)
        return explained, d

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


@dataclass(frozen=True)
class Taylor:
    """S and D about a theta, to second order in the entries of Sigma; these are quadratic in theta."""

    factor: Factor
    theta: Tensor
    s: Tensor
    s1: Tensor
    s2: Tensor
    d: Tensor
    d1: Tensor
    d2: Tensor

    def sigma(self, theta: Tensor) -> Tensor:
        """Entries of the relative covariance, as they are numbered."""
        root = self.factor.matrix(theta)
        return self.factor.entries(root @ root.mT)

    def at(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Both at a small step of theta."""
        return self.moved(self.sigma(self.theta + step) - self.sigma(self.theta))

    def moved(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Both at a small step of the entries of Sigma."""
        bend = 0.5 * torch.einsum("a,b,abij->ij", step, step, self.s2)
        s = self.s + torch.einsum("a,aij->ij", step, self.s1) + bend
        return s, self.d + step @ self.d1 + 0.5 * step @ self.d2 @ step


@dataclass(frozen=True)
class Criterion:
    """Minus the profiled log-likelihood, or its restricted form, as the server finds it from sums."""

    factor: Factor
    ww: Tensor
    examples: int
    constant: float
    """Of the log-density, beside normal terms: half the sum of log-weights."""
    reml: bool
    log_scale: float
    """Sum of logarithms of the scales of X: log det of X' V^-1 X is that of the user's columns."""

    @property
    def degrees(self) -> int:
        return self.examples - (len(self.ww) - 1) * self.reml

    def value(self, s: Tensor, d: Tensor) -> Tensor:
        """From S ``[m, m]`` and D."""
        p, n = len(s) - 1, self.degrees
        root, info = torch.linalg.cholesky_ex(s)
        if int(info):
            return s.new_tensor(math.inf)
        left = 2 * root[p, p].log()
        out: Tensor = 0.5 * (n * (left - math.log(n) + 1 + math.log(2 * math.pi)) + d) - self.constant
        if self.reml:
            out = out + root.diagonal()[:p].log().sum() + self.log_scale
        return out

    def taylor(self, theta: Tensor, sums: Tensors) -> Taylor:
        """S and D with their derivatives, of those whose sums these are."""
        m, k = len(self.ww), self.factor.size
        whole = sums["ww"].reshape(m, m) if "ww" in sums else self.ww
        s, s1 = whole - sums["explained"].reshape(m, m), sums["s1"].reshape(k, m, m)
        s2, d2 = s.new_zeros((k, k, m, m)), s.new_zeros((k, k))
        if "s2" in sums:
            s2, d2 = sums["s2"].reshape(k, k, m, m), sums["d2"].reshape(k, k)
        return Taylor(self.factor, theta, 0.5 * (s + s.mT), s1, s2, sums["log_det"][0], sums["d1"], d2)

    def restricted(self, s: Tensor, d: Tensor, log_sigma: Tensor) -> Tensor:
        """The log-likelihood of the factor and sigma, b at its best (by REML integrated out), but for a
        constant."""
        root = torch.linalg.cholesky(s)
        left = root[-1, -1].square() * torch.exp(-2 * log_sigma)
        out: Tensor = -0.5 * (2 * self.degrees * log_sigma + d + left)
        return out - root.diagonal()[:-1].log().sum() if self.reml else out

    def at(self, theta: Tensor, sums: Tensors) -> tuple[float, Tensor, Tensor | None, Tensor]:
        """Value, gradient and, where sums for it are there, Hessian in theta; and S."""
        near = self.taylor(theta, sums)
        with torch.enable_grad():
            step = torch.zeros_like(theta).requires_grad_()
            value = self.value(*near.at(step))
            if not bool(torch.isfinite(value)):
                return math.inf, torch.zeros_like(theta), None, near.s
            (slope,) = torch.autograd.grad(value, step, create_graph=True)
            hessian = rows_of_jacobian(slope, step) if "s2" in sums else None
        return float(value.detach()), slope.detach(), hessian, near.s


# --- the engine ------------------------------------------------------------------------------------


PERFECT_FIT = 1e-14
PROPOSAL_NATS = 1e-3
"""How near the maximum proposals for theta are centred: which of them count is weighed exactly."""
THETA_PROPOSAL_WIDTH = 1.3
"""Proposals for theta, in units of its information."""


@dataclass(frozen=True)
class GaussianEngine(Engine):
    """Value, gradient and posteriors of a linear mixed model, in internal coordinates."""

    groups: Groups
    units: Coordinates
    constant: float
    reml: bool = False

    method: ClassVar[str] = "closed form"

    @cached_property
    def factor(self) -> Factor:
        return Factor(self.units.blocks)

    @cached_property
    def criterion(self) -> Criterion:
        m, q = len(self.units.x_names) + 1, len(self.units.z_names)
        ww = self.sums(torch.zeros((q, q), dtype=torch.float64), whole=True)["ww"].reshape(m, m)
        log_scale = float(self.units.x_scale.log().sum())
        return Criterion(self.factor, ww, self.groups.examples, self.constant, self.reml, log_scale)

    def sums(
        self, factor: Tensor, curved: bool = False, among: Tensor | None = None, whole: bool = False
    ) -> Tensors:
        """What everyone answers at a relative factor, or those at these positions; nobody is asked again for
        what was answered."""
        place = factor.numpy().tobytes()
        if among is None and not whole and place in self.answered:
            answer = self.answered[place]
            if not curved or "s2" in answer:
                return answer
        known = {"factor": factor, "curved": torch.tensor(curved), "whole": torch.tensor(whole)}
        answer = self.groups.ask(Profile(self.units), known, among)
        if among is None and not whole:
            self.answered[place] = answer
        return answer

    @cached_property
    def answered(self) -> dict[bytes, Tensors]:
        """Everyone's answers by the factor that they are about."""
        return {}

    def search(self) -> tuple[SearchResult, ThetaPoint]:
        criterion = self.criterion

        def at(theta: Tensor, curved: bool) -> tuple[float, Tensor, Tensor | None]:
            return criterion.at(theta, self.sums(self.factor.matrix(theta), curved))[:3]

        found = minimised(at, self.factor.start(0.5))
        if not found.value < math.inf:
            raise EstimateError(
                "the likelihood is not finite where the search starts: fixed effects explain the response "
                "without any residual, or columns are too far apart in size"
            )
        return found, self.profiled(found.x)

    def profiled(self, theta: Tensor) -> ThetaPoint:
        """b and s2 that belong to a relative factor."""
        factor = self.factor.matrix(theta)
        s = self.criterion.at(theta, self.sums(factor))[3]
        b = torch.linalg.solve(s[:-1, :-1], s[:-1, -1])
        left = float(s[-1, -1] - s[-1, :-1] @ b)
        if not left > PERFECT_FIT * float(self.criterion.ww[-1, -1]):
            raise DataError(
                "the model explains the response without any residual; there is no noise to estimate"
            )
        return ThetaPoint(b, factor, math.sqrt(left / self.criterion.degrees))

    def _s(self, point: ThetaPoint) -> tuple[Tensor, float]:
        sums = self.sums(point.factor)
        s = self.criterion.ww - sums["explained"].reshape(self.criterion.ww.shape)
        return 0.5 * (s + s.mT), float(sums["log_det"])

    def log_likelihood(self, point: ThetaPoint) -> float:
        """At any point, the maximum or not; by REML the restricted one."""
        s, log_det = self._s(point)
        v = torch.cat((-point.b, point.b.new_ones(1)))
        n, variance = self.groups.examples, point.sigma**2
        out = -0.5 * (n * math.log(2 * math.pi * variance) + log_det + float(v @ s @ v) / variance)
        if self.reml:
            p = len(point.b)
            inner = torch.linalg.slogdet(s[:-1, :-1])[1]
            out -= 0.5 * (float(inner) - p * math.log(2 * math.pi * variance)) + self.criterion.log_scale
        return out + self.constant

    def covariance(self, point: ThetaPoint) -> Tensor:
        out: Tensor = point.sigma**2 * torch.linalg.inv(self._s(point)[0][:-1, :-1])
        return out

    def vector(self, point: ThetaPoint) -> Tensor:
        sigma = point.b.new_tensor([math.log(point.sigma)])
        return torch.cat((point.b, self.factor.entries(point.factor), sigma))

    def point(self, x: Tensor) -> ThetaPoint:
        p = len(self.units.x_names)
        return ThetaPoint(x[:p], self.factor.matrix(x[p:-1]), math.exp(float(x[-1])))

    def score(self, x: Tensor, among: Tensor) -> Tensor:
        return self._slopes(x, among)[0]

    def score_and_information(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score, information = self._slopes(x, None)
        assert information is not None
        return score, information

    def _slopes(self, x: Tensor, among: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of some the score, of everyone the information too."""
        p, curved = len(self.units.x_names), among is None
        return self.slopes(x, self.sums(self.factor.matrix(x[p:-1]), curved, among, whole=True), curved)

    def slopes(self, x: Tensor, sums: Tensors, curved: bool) -> tuple[Tensor, Tensor | None]:
        """Score and, where asked for, information at a point, of those whose sums these are."""
        p = len(self.units.x_names)
        near = self.criterion.taylor(x[p:-1], sums)
        with torch.enable_grad():
            at = x.clone().requires_grad_()
            s, d = near.at(at[p:-1] - x[p:-1])
            v = torch.cat((-at[:p], at.new_ones(1)))
            value = -0.5 * (2 * sums["rows"][0] * at[-1] + d + v @ s @ v * torch.exp(-2 * at[-1]))
            (score,) = torch.autograd.grad(value, at, create_graph=curved)
            information = -rows_of_jacobian(score, at) if curved else None
        return score.detach(), information

    def near(self, point: ThetaPoint) -> Taylor:
        """S and D about a point, to second order: everyone is asked once."""
        theta = self.factor.entries(point.factor)
        return self.criterion.taylor(theta, self.sums(point.factor, curved=True))

    def spread(self, point: ThetaPoint, near: Taylor | None = None) -> Tensor:
        theta = self.factor.entries(point.factor)
        near = self.near(point) if near is None else near
        with torch.enable_grad():
            at = torch.cat((torch.zeros_like(theta), theta.new_tensor([math.log(point.sigma)])))
            at = at.requires_grad_()
            value = self.criterion.restricted(*near.at(at[:-1]), at[-1])
            (score,) = torch.autograd.grad(value, at, create_graph=True)
            root = information_root(-rows_of_jacobian(score, at))
        return root @ root.mT

    def effects(self, point: ThetaPoint) -> None:
        known = {"b": point.b, "factor": point.factor, "sigma": point.b.new_tensor(point.sigma)}
        self.groups.ask(GroupEffects(self.units), known)

    def paths(self, cohort: Cohort, point: ThetaPoint) -> Paths:
        return posteriors(cohort, self.units, point)

    def theta_draws(self, point: ThetaPoint, noise: Tensor, wide: Tensor, count: int) -> list[ThetaPoint]:
        """So many points from the law of theta given the data, with b and s2 integrated out (the restricted
        likelihood): importance resampling of normal proposals about its maximum; then s2 and b by their laws
        given the factor. About the maximum of the likelihood itself intervals would be too narrow: it takes
        variances for too small.

        ``noise`` is ``[K, k + p]`` and ``wide`` ``[K]``, standard normal.
        """
        criterion, size = replace(self.criterion, reml=True), self.factor.size

        def at(theta: Tensor, curved: bool) -> tuple[float, Tensor, Tensor | None]:
            return criterion.at(theta, self.sums(self.factor.matrix(theta), curved))[:3]

        near = self.factor.entries(point.factor)
        inside = float(point.factor.diagonal().abs().min()) > SINGULAR_FACTOR  # at zero the slope is zero
        centre = minimised(at, near if inside else self.factor.start(0.5), PROPOSAL_NATS)
        thetas = centre.x + THETA_PROPOSAL_WIDTH * noise[:, :size] @ information_root(centre.hessian).mT
        factors = torch.stack([self.factor.matrix(t) for t in thetas])
        m = len(criterion.ww)
        sums = self.groups.ask(Profiles(self.units), {"factors": factors})
        s = criterion.ww - sums["explained"].reshape(-1, m, m)
        values = [float(criterion.value(one, d)) for one, d in zip(s, sums["log_det"], strict=True)]
        weight = (0.5 * noise[:, :size].square().sum(1) - noise.new_tensor(values)).softmax(0)
        grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        picked = torch.searchsorted(weight.cumsum(0), grid).clamp(max=len(weight) - 1)
        return [
            self._drawn(s[i], factors[i], noise[j, size:], float(wide[j]))
            for j, i in enumerate(picked.tolist())
        ]

    def _drawn(self, s: Tensor, factor: Tensor, noise: Tensor, wide: float) -> ThetaPoint:
        """s2 and b given the factor."""
        b = torch.linalg.solve(s[:-1, :-1], s[:-1, -1])
        left, n = float(s[-1, -1] - s[-1, :-1] @ b), self.groups.examples - len(b)
        # A chi-square over its degrees, by Wilson and Hilferty.
        chi = n * max(1 - 2 / (9 * n) + wide * math.sqrt(2 / (9 * n)), 0.05) ** 3
        sigma = math.sqrt(left / chi)
        spread = torch.linalg.cholesky(torch.linalg.inv(s[:-1, :-1]))
        return ThetaPoint(b + sigma * spread @ noise, factor, sigma)


def posteriors(cells: Cohort, units: Coordinates, point: ThetaPoint) -> Paths:
    """Means and covariances of groups' effects at each level."""
    q, v = len(units.z_names), torch.cat((-point.b, point.b.new_ones(1)))
    products = group_products(cells, units)
    left = (products[:, :, q:] @ v).unsqueeze(2)
    found = paths(Tree.of(cells), units.widths, torch.cat((products[:, :, :q], left), dim=2), point.factor)
    return replace(found, covariance=tuple(c * point.sigma**2 for c in found.covariance))


@dataclass(frozen=True)
class GroupEffects(Question[Tensors]):
    """Posterior mean and covariance of each unit's effects, which stay at its site; those of groups within
    units follow from rows and theta where they are asked for."""

    units: Coordinates
    name: ClassVar[str] = "posteriors of groups"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        return IN_PARTS

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("b", "factor", "sigma")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        point = ThetaPoint(asked["b"], asked["factor"], float(asked["sigma"]))
        cells = parts_of(units.split(CELLS), self.units, EFFECTS_BESIDE)
        found = [posteriors(some, self.units, point) for some in cells]
        mean = torch.cat([part.mean[-1] for part in found])
        cov = torch.cat([part.covariance[-1] for part in found])
        return Answer(everyone(units.cohort), local={"mean": mean, "cov": cov})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {}
