"""What estimates say of the truth: intervals, and likelihood ratios of nested models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from scipy import special
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.mixed.engine import SINGULAR_FACTOR
from fedpop.mixed.profile import profile_intervals
from fedpop.mixed.table import pandas

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

DISPERSED_OF = (("poisson", "negative-binomial"), ("binomial", "beta-binomial"))
"""Families whose dispersion is at its edge, infinite, in the first."""
BOUNDARY_VARIANCE = 1e-6
"""A correlation that is so close to one is there."""


def normal_quantile(level: float) -> float:
    """How many standard deviations an interval of this level reaches.

    >>> round(normal_quantile(0.95), 3)
    1.96
    """
    if not 0 < level < 1:
        raise SettingsError(f"a level lies between 0 and 1, not {level}")
    return float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))


def t_quantile(level: float, degrees: float) -> float:
    """The same of a t.

    >>> round(t_quantile(0.95, 5), 3)
    2.571
    """
    if math.isinf(degrees):
        return normal_quantile(level)
    return float(special.stdtrit(degrees, (1 + level) / 2)) if degrees > 0 else math.nan


def two_sided(t: float, degrees: float) -> float:
    """P(|T| > |t|).

    >>> round(two_sided(2.571, 5), 3), round(two_sided(1.96, math.inf), 3)
    (0.05, 0.05)
    """
    tail = special.ndtr(-abs(t)) if math.isinf(degrees) else special.stdtr(degrees, -abs(t))
    return float(2 * tail)


def f_tail(statistic: float, numerator: int, denominator: float) -> float:
    """P(F > f), of a chi-square over its degrees where the denominator's are infinite."""
    if math.isinf(denominator):
        return chi_square_tail(statistic * numerator, numerator)
    return float(special.fdtrc(numerator, denominator, statistic))


METHODS = ("wald", "profile")


def intervals(fit: MixedFit, level: float, method: str = "wald") -> Any:
    """Parameters of the random effects, the residual's, fixed effects; in lme4's order."""
    if method not in METHODS:
        raise SettingsError(f"method is one of {', '.join(METHODS)}, not {method!r}")
    z, named = normal_quantile(level), {"orient": "index", "columns": ["lower", "upper"]}
    if method == "profile":
        return pandas().DataFrame.from_dict(profile_intervals(fit, z), **named)
    rows = _spreads(fit, z)
    for name, value in fit.coefficients.items():
        wide = t_quantile(level, fit.degrees[name]) * fit.standard_errors[name]
        rows[name] = (value - wide, value + wide)
    return pandas().DataFrame.from_dict(rows, **named)


def _spreads(fit: MixedFit, z: float) -> dict[str, tuple[float, float]]:
    """By the delta method, from the covariance of the factor's entries and log sigma."""
    engine, point, names = fit.engine, fit.outcome.point, fit.design.random_names
    theta = engine.factor.entries(point.factor)
    last = {"sigma": fit.sigma, "dispersion": fit.dispersion}
    logs = {n: math.log(v) for n, v in last.items() if v is not None}
    least = (SINGULAR_FACTOR * point.sigma / fit.units.z_scale).tolist()
    there = [sd > edge for sd, edge in zip(fit.sd.values(), least, strict=True)]
    spread, out = engine.spread(point), dict[str, tuple[float, float]]()
    for i, j in engine.factor.places:
        name = f"sd_{names[i]}" if i == j else f"cor_{names[i]}.{names[j]}"
        inside = (
            there[i] and there[j] and (i == j or abs(float(fit.correlation[i, j])) < 1 - BOUNDARY_VARIANCE)
        )
        ends = (math.nan, math.nan)
        if inside:
            with torch.enable_grad():
                at = torch.cat((theta, theta.new_tensor(list(logs.values())))).requires_grad_()
                root = fit.units.random_map @ engine.factor.matrix(at[: len(theta)])
                sigma = root @ root.mT * (at[-1] * 2).exp() if fit.sigma else root @ root.mT
                sd = sigma.diagonal().sqrt()
                free = sd[i].log() if i == j else (sigma[i, j] / sd[i] / sd[j]).atanh()
                (slope,) = torch.autograd.grad(free, at)
            ends = _ends(free.detach(), slope @ spread @ slope, z, torch.exp if i == j else torch.tanh)
        out[f"{name}|{fit.factors[fit.design.factor_of[i]]}"] = ends
    for name, value in logs.items():
        out[name] = _ends(theta.new_tensor(value), spread[-1, -1], z, torch.exp)
    return out


def _ends(
    middle: Tensor, variance: Tensor, z: float, back: Callable[[Tensor], Tensor]
) -> tuple[float, float]:
    wide = z * variance.clamp(min=0).sqrt()
    return float(back(middle - wide)), float(back(middle + wide))


# --- likelihood ratios -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LikelihoodRatio:
    """Twice the difference of log-likelihoods, its degrees of freedom, and the p-value.

    Where random effects differ the smaller model has a variance at zero, on the edge of what it may be:
    the chi-square law is then too wide, and its p-value too large. For one further random effect,
    correlated with the k of the smaller model, the law is that of half chi-square(k) and half
    chi-square(k + 1) beside the fixed effects tested (Stram and Lee, 1994): ``p_value`` is by that,
    ``p_chi_square`` by the plain one.
    """

    statistic: float
    degrees: int
    p_chi_square: float
    p_value: float
    boundary: bool

    def __str__(self) -> str:
        text = f"Chisq {self.statistic:.4f} on {self.degrees} degrees of freedom, p = {self.p_value:.4g}"
        if not self.boundary:
            return text
        return (
            f"{text} (a variance is tested at its edge, zero; p = {self.p_chi_square:.4g} by "
            "plain chi-square)"
        )


def chi_square_tail(x: float, degrees: int) -> float:
    """P(chi-square > x); with no degrees of freedom all of it is at zero.

    >>> round(chi_square_tail(3.841459, 1), 4), chi_square_tail(1.0, 0)
    (0.05, 0.0)
    """
    if degrees == 0:
        return 0.0 if x > 0 else 1.0
    half = torch.tensor([degrees / 2, max(x, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def compared(one: MixedFit, other: MixedFit) -> LikelihoodRatio:
    """The likelihood-ratio test of two fits to the same rows."""
    small, large = sorted((one, other), key=lambda f: f.df)
    names = (small.family.text, large.family.text)
    if names[0] != names[1] and names not in DISPERSED_OF:
        raise SettingsError("a likelihood ratio compares models of one family")
    if one.response != other.response:
        raise SettingsError(f"the responses differ: {one.response} and {other.response}")
    if one.n_obs != other.n_obs or one.groups.kinds.marks != other.groups.kinds.marks:
        apart = f"{one.n_obs} and {other.n_obs} rows" if one.n_obs != other.n_obs else "different rows"
        raise SettingsError(
            f"a likelihood ratio compares models fitted to the same rows, and these were to {apart}: where "
            "a column misses values leave those rows out of the table for both"
        )
    rounding = 1e-9 * one.n_obs * max(one.units.y_scale, abs(one.units.y_centre))
    if not torch.allclose(one.groups.response_sums, other.groups.response_sums, rtol=1e-9, atol=rounding):
        raise SettingsError("a likelihood ratio compares models of one response with the same weights")
    if small.df == large.df:
        raise SettingsError("both models have as many parameters; a likelihood ratio compares nested ones")
    fixed = set(large.coefficients) - set(small.coefficients)
    if set(small.coefficients) - set(large.coefficients):
        raise SettingsError(
            "the models are not nested: the smaller one has fixed effects that the larger has not"
        )
    if (one.method == "REML") != (other.method == "REML"):
        raise SettingsError("one fit is by REML, the other by maximum likelihood")
    if one.method == "REML" and fixed:
        raise SettingsError("by REML fixed effects cannot be compared; fit both with method='ML'")
    statistic = max(2 * (large.log_likelihood - small.log_likelihood), 0.0)
    degrees = large.df - small.df
    plain = chi_square_tail(statistic, degrees)
    edges = len(large.sd) - len(small.sd) + (names[0] != names[1])
    if edges != 1:
        return LikelihoodRatio(statistic, degrees, plain, plain, edges > 0)
    mixed = 0.5 * (plain + chi_square_tail(statistic, degrees - 1))
    return LikelihoodRatio(statistic, degrees, plain, mixed, True)
