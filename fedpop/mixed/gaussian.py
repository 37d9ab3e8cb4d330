"""Linear mixed models, exactly: the likelihood in the relative factor alone, all else in closed form.

With y = X b + Z u + e, u ~ N(0, s2 Lambda Lambda') in each group, b and s2 have a closed form for any
Lambda (Bates et al., 2015): of W = (X, y) the server needs S = sum W_i' V_i^-1 W_i and D = sum log det
V_i, with V_i = I + Z_i Lambda Lambda' Z_i'. Both are sums over groups, as are their derivatives:

    P = (Sigma^-1 + M)^-1,  M = Z'Z,  R = Z'W:   S_i = W'W - R'P R,      D_i = log det(I + Lambda' M Lambda)
    K = (I - M P) R,        N = M - M P M:       dS_i = -K' dSigma K,    dD_i = tr(N dSigma)
    dK = -N dSigma K,       dN = -N dSigma N

A site stores M and R of its groups; nothing here needs Sigma to be invertible. REML adds log det of the
part of S that belongs to X.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import DataError, EstimateError
from fedpop.evaluation.information import rows_of_jacobian
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.coordinates import Coordinates, coded, everyone
from fedpop.mixed.engine import Engine, Factor, SearchResult, ThetaPoint, information_root, minimised
from fedpop.mixed.groups import Groups
from fedpop.questions import Question, Units

PROFILE_NUMBERS_AT_ONCE = 2**20
"""Numbers of groups' moments that are worked on at once."""


@dataclass(frozen=True)
class GroupMoments(Question[Tensors]):
    """Each group's M and R in internal coordinates stay at its site; W'W leaves it as a sum."""

    units: Coordinates
    name: ClassVar[str] = "moments of groups"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        p, q = len(self.units.x_names), len(self.units.z_names)
        return 24.0 * q * (p + q + 2), 0.0

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        zz, zw, ww = moments(units.cohort, self.units)
        return Answer(everyone(units.cohort), local={"zz": zz, "zw": zw}, sums={"ww": ww.flatten()})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        size = len(self.units.x_names) + 1
        return {"ww": total.plain["ww"].reshape(size, size)}


def moments(cohort: Cohort, units: Coordinates) -> tuple[Tensor, Tensor, Tensor]:
    """M ``[C, q, q]`` and R ``[C, q, m]`` of groups, and the sum of their W'W ``[m, m]``."""
    x, z, y, offset, weight = coded(cohort, units)
    root = weight.sqrt().unsqueeze(1)
    z = z * root
    w = torch.cat((x, (y - offset - units.y_centre).unsqueeze(1)), dim=1) * root
    q, m = z.shape[1], w.shape[1]
    products = (z.unsqueeze(2) * torch.cat((z, w), dim=1).unsqueeze(1)).flatten(1)
    sums = products.new_zeros((len(cohort), q * (q + m))).index_add(0, cohort.owner, products)
    sums = sums.unflatten(1, (q, q + m))
    return sums[..., :q].contiguous(), sums[..., q:].contiguous(), w.mT @ w


def stored_moments(units: Units, coordinates: Coordinates) -> tuple[Tensor, Tensor]:
    """M and R of groups as they store them; made again where a site has lost them."""
    if "zz" in units.local:
        return units.local["zz"], units.local["zw"]
    return moments(units.cohort, coordinates)[:2]


@dataclass(frozen=True)
class Profile(Question[Tensors]):
    """What S and D take from Lambda, with the sums that their derivatives are made of."""

    units: Coordinates
    name: ClassVar[str] = "profile"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        q, m = len(self.units.z_names), len(self.units.x_names) + 1
        return 0.0, 8.0 * (4 * q * (q + m) + (q * m) ** 2 * (2 if bool(asked["curved"]) else 0))

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("factor", "curved")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        (m, r), factor = stored_moments(units, self.units), asked["factor"]
        p, log_det = shrunk(m, factor)
        pr = p @ r
        k = r - m @ pr
        n = m - m @ p @ m
        flat = k.flatten(1)
        sums = {
            "explained": torch.einsum("cqi,cqj->ij", r, pr),
            "log_det": log_det.sum().reshape(1),
            "k": flat.mT @ flat,
            "n": n.sum(0),
        }
        if bool(asked["curved"]):
            outer = (flat.unsqueeze(2) * flat.unsqueeze(1)).flatten(1)
            sums["nk"] = n.flatten(1).mT @ outer
            sums["nn"] = n.flatten(1).mT @ n.flatten(1)
        return Answer(everyone(units.cohort), sums={name: v.flatten() for name, v in sums.items()})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


@dataclass(frozen=True)
class WholeProfile(Profile):
    """The profile of some groups with their W'W and number of rows, made from their rows."""

    name: ClassVar[str] = "profile of some"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        q, m = len(self.units.z_names), len(self.units.x_names) + 1
        return 24.0 * q * (m + q), 8.0 * (q * m) ** 2

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        zz, zw, ww = moments(units.cohort, self.units)
        local = {"zz": zz, "zw": zw}
        inner = super().answer(asked, Units(units.cohort, local, units.personal, units.split), key)
        rows = ww.new_tensor([float(units.cohort.examples)])
        return Answer(inner.good, sums=dict(inner.sums) | {"ww": ww.flatten(), "rows": rows})


@dataclass(frozen=True)
class Profiles(Question[Tensors]):
    """The same at many factors at once ``[T, q, q]``, without derivatives: what theta's law is made of."""

    units: Coordinates
    name: ClassVar[str] = "profiles"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        q, m = len(self.units.z_names), len(self.units.x_names) + 1
        return 0.0, 32.0 * q * (q + m)

    def ask(self, known: Tensors) -> Tensors:
        return {"factors": known["factors"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        (m, r), explained, log_det = stored_moments(units, self.units), list[Tensor](), list[Tensor]()
        for some in asked["factors"].split(max(1, PROFILE_NUMBERS_AT_ONCE // max(r.numel(), 1))):
            p, log_dets = shrunk(m, some.unsqueeze(1))
            explained.append(torch.einsum("cqi,tcqj->tij", r, p @ r))
            log_det.append(log_dets.sum(1))
        sums = {"explained": torch.cat(explained).flatten(), "log_det": torch.cat(log_det)}
        return Answer(everyone(units.cohort), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


def shrunk(m: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """P ``[..., C, q, q]`` and log det(I + Lambda' M Lambda) ``[..., C]``."""
    inner = factor.mT @ m @ factor + torch.eye(m.shape[-1], dtype=m.dtype)
    root, info = torch.linalg.cholesky_ex(inner)
    if bool((info != 0).any()):
        raise EstimateError("a group's covariance is not positive definite: its numbers are too far apart")
    half = torch.linalg.solve_triangular(root, factor.mT.expand(inner.shape), upper=False)
    return half.mT @ half, 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@dataclass(frozen=True)
class Taylor:
    """S and D about a theta, to second order."""

    s: Tensor
    s1: Tensor
    s2: Tensor
    d: Tensor
    d1: Tensor
    d2: Tensor

    def at(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Both at a small step."""
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

    def taylor(self, theta: Tensor, sums: Tensors, ww: Tensor | None = None) -> Taylor:
        """S and D with their derivatives in theta, of those whose sums these are."""
        factor, units = self.factor.matrix(theta), self.factor.units()
        q, m = len(factor), len(self.ww)
        k, n = sums["k"].reshape(q, m, q, m), sums["n"].reshape(q, q)
        s = (self.ww if ww is None else ww) - sums["explained"].reshape(m, m)
        moves = [e @ factor.mT + factor @ e.mT for e in units]
        s1 = torch.stack([-torch.einsum("aibj,ab->ij", k, v) for v in moves])
        d1 = torch.stack([(n * v).sum() for v in moves])
        count = len(moves)
        s2, d2 = s.new_zeros((count, count, m, m)), s.new_zeros((count, count))
        if "nk" in sums:
            nk, nn = sums["nk"].reshape(q, q, q, m, q, m), sums["nn"].reshape(q, q, q, q)
            for a in range(count):
                for b in range(a + 1):
                    bend = units[a] @ units[b].mT + units[b] @ units[a].mT
                    turn = torch.einsum("abcidj,ca,bd->ij", nk, moves[a], moves[b])
                    s2[a, b] = s2[b, a] = turn + turn.mT - torch.einsum("aibj,ab->ij", k, bend)
                    twice = torch.einsum("abcd,da,bc->", nn, moves[a], moves[b])
                    d2[a, b] = d2[b, a] = (n * bend).sum() - twice
        return Taylor(0.5 * (s + s.mT), s1, s2, sums["log_det"][0], d1, d2)

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
            hessian = rows_of_jacobian(slope, step) if "nk" in sums else None
        return float(value.detach()), slope.detach(), hessian, near.s


# --- the engine ------------------------------------------------------------------------------------


PERFECT_FIT = 1e-14
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
        ww = self.groups.ask(GroupMoments(self.units), {})["ww"]
        log_scale = float(self.units.x_scale.log().sum())
        return Criterion(self.factor, ww, self.groups.examples, self.constant, self.reml, log_scale)

    def sums(self, factor: Tensor, curved: bool = False) -> Tensors:
        """What everyone answers at a relative factor."""
        return self.groups.ask(Profile(self.units), {"factor": factor, "curved": torch.tensor(curved)})

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
        m, p, curved = len(self.criterion.ww), len(self.units.x_names), among is None
        known = {"factor": self.factor.matrix(x[p:-1]), "curved": torch.tensor(curved)}
        sums = self.groups.ask(WholeProfile(self.units), known, among)
        near = self.criterion.taylor(x[p:-1], sums, sums["ww"].reshape(m, m))
        with torch.enable_grad():
            at = x.clone().requires_grad_()
            s, d = near.at(at[p:-1] - x[p:-1])
            v = torch.cat((-at[:p], at.new_ones(1)))
            value = -0.5 * (2 * sums["rows"][0] * at[-1] + d + v @ s @ v * torch.exp(-2 * at[-1]))
            (score,) = torch.autograd.grad(value, at, create_graph=curved)
            information = -rows_of_jacobian(score, at) if curved else None
        return score.detach(), information

    def spread(self, point: ThetaPoint) -> Tensor:
        theta = self.factor.entries(point.factor)
        near = self.criterion.taylor(theta, self.sums(point.factor, curved=True))
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

        centre = minimised(at, self.factor.start(0.5))
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


def posterior(m: Tensor, r: Tensor, point: ThetaPoint) -> tuple[Tensor, Tensor]:
    """Mean ``[C, q]`` and covariance ``[C, q, q]`` of groups' effects, from their moments."""
    p, _ = shrunk(m, point.factor)
    left = r @ torch.cat((-point.b, point.b.new_ones(1)))
    return (p @ left.unsqueeze(2)).squeeze(2), p * point.sigma**2


@dataclass(frozen=True)
class GroupEffects(Question[Tensors]):
    """Posterior mean and covariance of each group's effects, which stay at its site."""

    units: Coordinates
    name: ClassVar[str] = "posteriors of groups"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        q, m = len(self.units.z_names), len(self.units.x_names) + 1
        return 0.0, 32.0 * q * (q + m)

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("b", "factor", "sigma")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        point = ThetaPoint(asked["b"], asked["factor"], float(asked["sigma"]))
        mean, cov = posterior(*stored_moments(units, self.units), point)
        return Answer(everyone(units.cohort), local={"mean": mean, "cov": cov})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {}
