"""The exact fit of a linear mixed model, and its groups' posteriors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import DataError, EstimateError
from fedpop.evaluation.information import rows_of_jacobian
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.factor import Factor
from fedpop.mixed.gaussian import Criterion, GroupMoments, Profile, Profiles, WholeProfile, shrunk
from fedpop.mixed.groups import Coordinates, Groups, everyone
from fedpop.mixed.point import Engine, ThetaPoint
from fedpop.mixed.search import SearchResult, minimised
from fedpop.questions import Question, Units

PERFECT = 1e-14
WIDER = 1.3
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
        p, q = len(self.units.x_names), len(self.units.z_names)
        ww = self.groups.ask(GroupMoments(self.units), {}, 24.0 * q * (p + q + 2), 0.0)["ww"]
        log_scale = float(self.units.x_scale.log().sum())
        return Criterion(self.factor, ww, self.groups.examples, self.constant, self.reml, log_scale)

    def sums(self, factor: Tensor, curved: bool = False) -> Tensors:
        """What everyone answers at a relative factor."""
        q, m = len(self.units.z_names), len(self.criterion.ww)
        held = 8.0 * (4 * q * (q + m) + (q * m) ** 2 * (2 if curved else 0))
        return self.groups.ask(Profile(), {"factor": factor, "curved": torch.tensor(curved)}, 0.0, held)

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
        if not left > PERFECT * float(self.criterion.ww[-1, -1]):
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
        q, m, p, curved = (
            len(self.units.z_names),
            len(self.criterion.ww),
            len(self.units.x_names),
            among is None,
        )
        known = {"factor": self.factor.matrix(x[p:-1]), "curved": torch.tensor(curved)}
        question = WholeProfile(self.units)
        sums = self.groups.ask(question, known, 24.0 * q * (m + q), 8.0 * (q * m) ** 2, among)
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
        q, m = len(self.units.z_names), len(self.criterion.ww)
        self.groups.ask(GroupEffects(), known, 0.0, 32.0 * q * (q + m))

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
        thetas = centre.x + WIDER * noise[:, :size] @ information_root(centre.hessian).mT
        factors = torch.stack([self.factor.matrix(t) for t in thetas])
        q, m = len(self.units.z_names), len(criterion.ww)
        sums = self.groups.ask(Profiles(), {"factors": factors}, 0.0, 32.0 * q * (q + m))
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


def information_root(hessian: Tensor) -> Tensor:
    """A root of the inverse information; directions without any (a variance at zero) do not move."""
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    good = values > 1e-8 * values.abs().max()
    out: Tensor = vectors * torch.where(good, values.clamp(min=1e-300).rsqrt(), 0.0)
    return out


def posterior(m: Tensor, r: Tensor, point: ThetaPoint) -> tuple[Tensor, Tensor]:
    """Mean ``[C, q]`` and covariance ``[C, q, q]`` of groups' effects, from their moments."""
    p, _ = shrunk(m, point.factor)
    left = r @ torch.cat((-point.b, point.b.new_ones(1)))
    return (p @ left.unsqueeze(2)).squeeze(2), p * point.sigma**2


@dataclass(frozen=True)
class GroupEffects(Question[Tensors]):
    """Posterior mean and covariance of each group's effects, which stay at its site."""

    name: ClassVar[str] = "posteriors of groups"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("b", "factor", "sigma")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        point = ThetaPoint(asked["b"], asked["factor"], float(asked["sigma"]))
        mean, cov = posterior(units.local["zz"], units.local["zw"], point)
        return Answer(everyone(units.cohort), local={"mean": mean, "cov": cov})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {}
