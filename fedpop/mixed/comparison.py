"""Two nested models, compared by their likelihoods; a variance at zero is on the edge, and is told
so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedpop.errors import SettingsError

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit


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
        told = f"Chisq {self.statistic:.4f} on {self.degrees} degrees of freedom, p = {self.p_value:.4g}"
        if not self.boundary:
            return told
        return (
            f"{told} (a variance is tested at its edge, zero; p = {self.p_chi_square:.4g} by "
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
    if one.n_obs != other.n_obs or one.family.name != other.family.name:
        raise SettingsError("a likelihood ratio compares models of one family fitted to the same rows")
    if one.response != other.response:
        raise SettingsError(f"the responses differ: {one.response} and {other.response}")
    small, large = sorted((one, other), key=lambda f: f.df)
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
    effects = len(large.sd) - len(small.sd)
    if effects != 1:
        return LikelihoodRatio(statistic, degrees, plain, plain, effects > 0)
    mixed = 0.5 * (plain + chi_square_tail(statistic, degrees - 1))
    return LikelihoodRatio(statistic, degrees, plain, mixed, True)
