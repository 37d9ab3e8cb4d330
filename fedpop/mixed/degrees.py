"""Degrees of freedom of fixed effects in gaussian models by REML, from sums that everyone is asked for once.

With S(Sigma) and D(Sigma) as in ``gaussian``, the covariance of the estimates of b is V = s2 S_xx^-1, a
function of the parameters of the covariance, and first and second derivatives of S and D in the entries of
Sigma are sums over units. Nothing else is needed:

    Satterthwaite: for a row l of a hypothesis, df = 2 (l' V l)^2 / (g' A g), g the gradient of l' V l and A
    the covariance of the estimates of (Lambda, log sigma), from the restricted likelihood's Hessian
    (lmerTest); several rows by those of their principal directions (Fai and Cornelius, 1996).

    Kenward and Roger (1997): the covariance of y is linear in gamma = (s2, entries of s2 Sigma); with P_i =
    d X'V^-1 X / d gamma_i, Q_ij half of its second derivative and tr(G_i V^-1 G_j V^-1) minus that of
    log det V, the covariance is corrected for what it is too small, and F is scaled (pbkrtest).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.mixed.gaussian import GaussianEngine

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

DEGREES = ("satterthwaite", "kenward-roger", "none")
EQUAL_DEGREES = 1e-8
"""Degrees of freedom of principal directions that are one number, as in lmerTest."""
LEAST_VARIANCE = 1e-12
"""The share of the largest variance below which rows of a hypothesis are combinations of others."""


@dataclass(frozen=True)
class Tested:
    """F on ``numerator`` and ``denominator`` degrees of freedom; infinite ones are those of a chi-square."""

    statistic: float
    numerator: int
    denominator: float


class Laws:
    """The law of linear combinations of the fixed effects' estimates: normal, with nothing known of the
    degrees of freedom of variances."""

    name = "none"

    def __init__(self, fit: MixedFit) -> None:
        self.fit = fit
        self.b = torch.tensor(list(fit.coefficients.values()), dtype=torch.float64)

    @property
    def covariance(self) -> Tensor:
        """Of the estimates, ``[p, p]``."""
        return self.fit.vcov

    def degrees(self, row: Tensor) -> float:
        """Of the t that a combination ``[p]`` has."""
        return math.inf

    def tested(self, rows: Tensor, values: Tensor) -> Tested:
        """The hypothesis that combinations ``[k, p]`` have these values."""
        spread, vectors = torch.linalg.eigh(rows @ self.covariance @ rows.mT)
        used = spread > LEAST_VARIANCE * spread[-1]
        turned = vectors.mT[used]
        squares = (turned @ (rows @ self.b - values)).square() / spread[used]
        each = [self.degrees(row) for row in turned @ rows]
        return Tested(float(squares.mean()), len(each), _joint(each))


def _joint(degrees: list[float]) -> float:
    """Of an F that is the mean of squares of independent t's: it has the mean that theirs have."""
    if max(degrees) - min(degrees) < EQUAL_DEGREES or math.isinf(max(degrees)):
        return sum(degrees) / len(degrees)
    if min(degrees) <= 2:
        return 2.0
    mean = sum(v / (v - 2) for v in degrees)
    return 2 * mean / (mean - len(degrees))


class Satterthwaite(Laws):
    """t and F by Satterthwaite's degrees of freedom."""

    name = "satterthwaite"

    @cached_property
    def slopes(self) -> Tensor:
        """d V / d (theta, log sigma) on the user's scale, ``[K, p, p]``."""
        engine, point, to = engine_of(self.fit), self.fit.outcome.point, self.fit.units.fixed_map
        near, factor = self.fit.near, engine.factor
        v = point.sigma**2 * torch.linalg.inv(near.s[:-1, :-1])
        eye = torch.eye(factor.size, dtype=v.dtype)
        turns = [factor.matrix(one) @ point.factor.mT for one in eye]  # half of d Sigma / d theta
        moved = torch.stack([torch.einsum("a,aij->ij", factor.entries(t + t.mT), near.s1) for t in turns])
        moved = moved[:, :-1, :-1]
        slopes = torch.cat((-v @ moved @ v / point.sigma**2, 2 * v.unsqueeze(0)))
        return to @ slopes @ to.mT

    @cached_property
    def spread(self) -> Tensor:
        return engine_of(self.fit).spread(self.fit.outcome.point, self.fit.near)

    def degrees(self, row: Tensor) -> float:
        slope = torch.einsum("i,kij,j->k", row, self.slopes, row)
        below = float(slope @ self.spread @ slope)
        return 2 * float(row @ self.covariance @ row) ** 2 / below if below > 0 else math.inf


class KenwardRoger(Laws):
    """t and F by Kenward's and Roger's, with their covariance."""

    name = "kenward-roger"

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """The corrected covariance, P ``[K, p, p]`` and W ``[K, K]``, on the user's scale."""
        fit, near = self.fit, self.fit.near
        relative, s2 = near.sigma(near.theta), fit.outcome.point.sigma**2
        p, q = _by_variances(near.s, near.s1, near.s2, relative, s2, 1)
        _, bend = _by_variances(near.d, near.d1, near.d2, relative, s2, 0)
        bend[-1, -1] -= fit.n_obs / s2**2
        back = torch.linalg.inv(fit.units.fixed_map)
        phi, traces = fit.vcov, -bend
        p, q = (back.mT @ v[..., :-1, :-1] @ back for v in (p, 0.5 * q))
        turned = phi @ p
        information = traces - 2 * torch.einsum("ij,abji->ab", phi, q)
        information = information + torch.einsum("aij,bji->ab", turned, turned)
        w = 2 * torch.linalg.pinv(information, hermitian=True)
        u = torch.einsum("ab,abij->ij", w, q - torch.einsum("aij,jk,bkl->abil", p, phi, p))
        corrected = phi + 2 * phi @ (0.5 * (u + u.mT)) @ phi
        return corrected, p, w

    @property
    def covariance(self) -> Tensor:
        return self._pieces[0]

    def degrees(self, row: Tensor) -> float:
        return self._scaled(row.unsqueeze(0))[0]

    def tested(self, rows: Tensor, values: Tensor) -> Tested:
        spread, vectors = torch.linalg.eigh(rows @ self.covariance @ rows.mT)
        used = spread > LEAST_VARIANCE * spread[-1]
        turned = vectors.mT[used]
        denominator, scale = self._scaled(turned @ rows)
        squares = (turned @ (rows @ self.b - values)).square() / spread[used]
        return Tested(scale * float(squares.mean()), len(squares), denominator)

    def _scaled(self, rows: Tensor) -> tuple[float, float]:
        """The denominator's degrees of freedom, and what F is multiplied by."""
        (_, p, w), phi, q = self._pieces, self.fit.vcov, len(rows)
        projected = rows.mT @ torch.linalg.solve(rows @ phi @ rows.mT, rows) @ phi
        u = projected @ p @ phi
        trace = u.diagonal(dim1=1, dim2=2).sum(1)
        a1 = float(trace @ w @ trace)
        a2 = float(torch.einsum("ab,aij,bji->", w, u, u))
        if not a2 > 0:
            return math.inf, 1.0
        b = (a1 + 6 * a2) / (2 * q)
        g = ((q + 1) * a1 - (q + 4) * a2) / ((q + 2) * a2)
        below = 3 * q + 2 * (1 - g)
        c1, c2, c3 = g / below, (q - g) / below, (q + 2 - g) / below
        top = 1 + c1 * b
        rho = ((1 - a2 / q) / (1 - c2 * b)) ** 2 * (top if abs(top) > 1e-10 else 0.0) / (1 - c3 * b) / q
        degrees = 4 + (q + 2) / (q * rho - 1)
        scale = 1.0 if abs(degrees - 2) < 1e-2 else degrees * (1 - a2 / q) / (degrees - 2)
        return degrees, scale


def _by_variances(
    f: Tensor, f1: Tensor, f2: Tensor, relative: Tensor, s2: float, power: int
) -> tuple[Tensor, Tensor]:
    """First and second derivatives of f(T / s2) / s2^power in the entries T of s2 Sigma and in s2, from those
    of f in the entries of Sigma: ``[K, ...]`` and ``[K, K, ...]``, s2 last."""
    along = torch.tensordot(relative, f1, dims=1)
    across = torch.tensordot(relative, f2, dims=1)
    twice = torch.tensordot(relative, across, dims=1)
    first = torch.cat((f1, -(power * f + along).unsqueeze(0)))
    mixed = -((power + 1) * f1 + across)
    last = power * (power + 1) * f + 2 * (power + 1) * along + twice
    top = torch.cat((f2, mixed.unsqueeze(1)), dim=1)
    second = torch.cat((top, torch.cat((mixed, last.unsqueeze(0))).unsqueeze(0)))
    return first / s2 ** (power + 1), second / s2 ** (power + 2)


def engine_of(fit: MixedFit) -> GaussianEngine:
    assert isinstance(fit.engine, GaussianEngine)
    return fit.engine


def laws_of(fit: MixedFit, degrees: str | None = None) -> Laws:
    """By their name; None: Satterthwaite's where a gaussian model was fitted by REML, else none."""
    if degrees is not None and degrees not in DEGREES:
        raise SettingsError(f"degrees is one of {', '.join(DEGREES)}, not {degrees!r}")
    small = fit.family.gaussian and fit.method == "REML"
    if degrees in ("satterthwaite", "kenward-roger") and not small:
        raise SettingsError(
            f"degrees of freedom are those of gaussian models by REML, and this is a {fit.family.name} model "
            f"by {fit.method}: fit it with method='REML', or take degrees='none'"
        )
    if degrees == "kenward-roger":
        return KenwardRoger(fit)
    return Satterthwaite(fit) if small and degrees != "none" else Laws(fit)
