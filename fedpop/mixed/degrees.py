"""Degrees of freedom of fixed effects in gaussian models by REML, from sums that everyone is asked for once.

With S(Sigma) and D(Sigma) as in ``gaussian``, the covariance of the estimates of b is V = s2 S_xx^-1, a function
of the parameters of the covariance, and first and second derivatives of S and D in the entries of Sigma are sums
over units. Nothing else is needed:

    Satterthwaite: for a row l of a hypothesis, df = 2 (l' V l)^2 / (g' A g), g the gradient of l' V l and A the
    covariance of the estimates of (Lambda, log sigma), from the restricted likelihood's Hessian (lmerTest);
    several rows by those of their principal directions (Fai and Cornelius, 1996).

    Kenward and Roger (1997): the covariance of y is linear in gamma = (s2, entries of s2 Sigma); with
    P_i = d X'V^-1 X / d gamma_i, Q_ij half of its second derivative and tr(G_i V^-1 G_j V^-1) minus that of log det
    V, V is corrected for what it is too small, and F is scaled (pbkrtest).
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
        engine, point, to = _engine(self.fit), self.fit.outcome.point, self.fit.units.fixed_map
        theta = engine.factor.entries(point.factor)
        near = engine.criterion.taylor(theta, engine.sums(point.factor))
        entries = torch.autograd.functional.jacobian(near.sigma, theta)  # type: ignore[no-untyped-call]
        v = point.sigma**2 * torch.linalg.inv(near.s[:-1, :-1])
        moved = torch.einsum("ak,aij->kij", entries, near.s1[:, :-1, :-1])
        slopes = torch.cat((-v @ moved @ v / point.sigma**2, 2 * v.unsqueeze(0)))
        return to @ slopes @ to.mT

    @cached_property
    def spread(self) -> Tensor:
        return self.fit.engine.spread(self.fit.outcome.point)

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
        fit = self.fit
        engine, point, back = _engine(fit), fit.outcome.point, torch.linalg.inv(fit.units.fixed_map)
        theta = engine.factor.entries(point.factor)
        near = engine.criterion.taylor(theta, engine.sums(point.factor, True))
        relative, s2, n = near.sigma(theta), point.sigma**2, float(fit.n_obs)

        def parts(gamma: Tensor) -> tuple[Tensor, Tensor]:
            """X' V^-1 X and log det V, to second order about the estimate."""
            s, d = near.moved(gamma[:-1] / gamma[-1] - relative)
            return back.mT @ s[:-1, :-1] @ back / gamma[-1], n * gamma[-1].log() + d

        gamma = torch.cat((relative * s2, relative.new_tensor([s2])))
        first = torch.func.jacfwd(lambda g: parts(g)[0])(gamma)
        second = torch.func.jacfwd(torch.func.jacfwd(lambda g: parts(g)[0]))(gamma)
        traces = -torch.func.hessian(lambda g: parts(g)[1])(gamma)
        phi, p, q = fit.vcov, first.permute(2, 0, 1), 0.5 * second.permute(2, 3, 0, 1)
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


def _engine(fit: MixedFit) -> GaussianEngine:
    assert isinstance(fit.engine, GaussianEngine)
    return fit.engine


def laws_of(fit: MixedFit, degrees: str | None = None) -> Laws:
    """By their name; None: Satterthwaite's where a gaussian model was fitted by REML, else none."""
    if degrees is not None and degrees not in DEGREES:
        raise SettingsError(f"degrees is one of {', '.join(DEGREES)}, not {degrees!r}")
    small = fit.family.gaussian and fit.method == "REML"
    if degrees in ("satterthwaite", "kenward-roger") and not small:
        raise SettingsError(
            f"degrees of freedom are those of gaussian models by REML, and this is a {fit.family.name} model by "
            f"{fit.method}: fit it with method='REML', or take degrees='none'"
        )
    if degrees == "kenward-roger":
        return KenwardRoger(fit)
    return Satterthwaite(fit) if small and degrees != "none" else Laws(fit)
