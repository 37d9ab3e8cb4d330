"""Families of a mixed model's response, with their links: what a row says of its linear predictor.

A family is known by a text, as R has it: ``binomial``, ``binomial(probit)``, ``negative-binomial``. Rows have
a log-density, its slope and minus its curvature in eta, as observed: that is what exact second derivatives of
the likelihood are made of. Where there is a dispersion its logarithm psi is one more parameter, with

    negative binomial (size k):   y ~ Poisson(mu g), g ~ Gamma(k, k),    Var = mu + mu^2 / k
    gamma (shape k):              y ~ Gamma(k, rate k / mu),             Var = mu^2 / k
    beta-binomial (precision k):  p ~ Beta(mu k, (1 - mu) k),            Var = n mu (1 - mu) (k + n) / (k + 1)
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.models.likelihoods import Bernoulli, Likelihood, Normal, Params, Poisson

LOG_DISPERSION = "log_dispersion"
LARGEST_ETA = 300.0
"""A linear predictor beyond which a probability is zero or one, in double precision and in the sums here."""
UPPER_SDS, UPPER_SCALES = 12.0, 40.0
"""Where all quantiles of a count or a gamma lie: so many standard deviations and scales above the mean."""

Terms = tuple[Tensor, Tensor, Tensor]


class RowLikelihood(Likelihood, ABC):
    """A family of rows with weights: that of their log-density, or the trials of a share."""

    by_name: ClassVar[bool] = False
    concave: ClassVar[bool] = True
    """In eta, everywhere."""

    @abstractmethod
    def terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        """Log-density, slope and minus the curvature in eta, each ``[n, k]`` for eta ``[n, k]`` and y and
        weight ``[n, 1]``."""

    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        return self.terms(eta, y, torch.ones_like(y), params)[0].sum(-1)

    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        value, slope, _ = self.terms(eta, y, torch.ones_like(y), params)
        return value.sum(-1), slope

    def bound(self, params: Params) -> None:
        return None


class DispersedLikelihood(RowLikelihood):
    """A family with a dispersion k, whose logarithm is among ``params``."""

    @abstractmethod
    def dispersion_terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        """Of the log-density: its slope in psi, that of this in eta, and its second derivative in psi."""


# --- links of yes or no --------------------------------------------------------------------------------


class LinkedBernoulli(RowLikelihood):
    """Yes or no, or a share of trials, with a link that is not the logit."""

    discrete: ClassVar[bool] = True

    def probabilities(self, mean: Tensor) -> Tensor:
        return torch.cat((1 - mean, mean), dim=-1)

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        one, zero = (self.terms(eta, torch.full_like(eta, y), torch.ones_like(eta), params) for y in (1, 0))
        mean = self.mean(eta, params)
        return mean * one[2] + (1 - mean) * zero[2]

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        return (uniform <= self.mean(eta, params)).to(eta.dtype)


@dataclass(frozen=True)
class Probit(LinkedBernoulli):
    """P(y = 1) = Phi(eta).

    >>> round(float(Probit().mean(torch.tensor(1.96), {})), 3)
    0.975
    """

    name: ClassVar[str] = "probit"

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        out: Tensor = torch.special.ndtr(eta)
        return out

    def terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        log_one, log_zero = torch.special.log_ndtr(eta), torch.special.log_ndtr(-eta)
        log_density = -0.5 * (eta * eta + math.log(2 * math.pi))
        one, zero = (log_density - log_one).exp(), (log_density - log_zero).exp()
        value = y * log_one + (1 - y) * log_zero
        bend = y * one * (one + eta) + (1 - y) * zero * (zero - eta)
        return value * weight, (y * one - (1 - y) * zero) * weight, bend * weight


@dataclass(frozen=True)
class ComplementaryLogLog(LinkedBernoulli):
    """P(y = 1) = 1 - exp(-exp(eta)).

    >>> round(float(ComplementaryLogLog().mean(torch.tensor(0.0), {})), 3)
    0.632
    """

    name: ClassVar[str] = "cloglog"

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return -torch.expm1(-torch.exp(eta))

    def terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        hazard = eta.clamp(-LARGEST_ETA, LARGEST_ETA).exp()
        share = hazard / torch.expm1(hazard)  # d log P / d eta
        value = y * torch.log(-torch.expm1(-hazard)) - (1 - y) * hazard
        bend = y * share * (share + hazard - 1) + (1 - y) * hazard
        return value * weight, (y * share - (1 - y) * hazard) * weight, bend * weight


# --- families with a dispersion ------------------------------------------------------------------------


@dataclass(frozen=True)
class NegativeBinomial(DispersedLikelihood):
    """Counts with log-mean eta, whose variance is mu + mu^2 / k.

    >>> k = {LOG_DISPERSION: torch.zeros(())}
    >>> round(float(NegativeBinomial().log_prob(torch.zeros(1), torch.zeros(1), k)), 4)
    -0.6931
    """

    name: ClassVar[str] = "negative binomial"
    discrete: ClassVar[bool] = True
    ordered: ClassVar[bool] = True

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(eta)

    def terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        psi = params[LOG_DISPERSION]
        k, share = psi.exp(), torch.sigmoid(eta - psi)
        ways = torch.lgamma(y + k) - torch.lgamma(k) - torch.lgamma(y + 1)
        value = ways + k * psi + y * eta - (y + k) * torch.logaddexp(psi, eta)
        slope = y - (y + k) * share
        return value * weight, slope * weight, (y + k) * share * (1 - share) * weight

    def dispersion_terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        psi = params[LOG_DISPERSION]
        k, share = psi.exp(), torch.sigmoid(eta - psi)
        first = torch.digamma(y + k) - torch.digamma(k) + psi + 1 - torch.logaddexp(psi, eta)
        second = k * (torch.polygamma(1, y + k) - torch.polygamma(1, k)) + share
        slope = k * first - (y + k) * (1 - share)
        across = (y + k) * share * (1 - share) - k * share
        bend = k * first + k * second - k * (1 - share) - (y + k) * share * (1 - share)
        return slope * weight, across * weight, bend * weight

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(params[LOG_DISPERSION]) * torch.sigmoid(eta - params[LOG_DISPERSION])

    def variance_at(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(eta) + torch.exp(2 * eta - params[LOG_DISPERSION])

    def cdf(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        k, counts = params[LOG_DISPERSION].exp(), torch.floor(y)
        share = torch.sigmoid(params[LOG_DISPERSION] - eta)
        found = special.betainc(k.numpy(), counts.clamp(min=0).numpy() + 1, share.numpy())
        inside = torch.as_tensor(found, dtype=eta.dtype)
        return torch.where(counts < 0, torch.zeros_like(inside), inside)

    def bracket(self, eta: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        sd, scale = self.variance_at(eta, params).sqrt(), 1 + torch.exp(eta - params[LOG_DISPERSION])
        high = torch.ceil(torch.exp(eta) + UPPER_SDS * sd + UPPER_SCALES * scale).amax(0)
        return torch.full_like(high, -1.0), high

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        from scipy import stats  # takes a second

        k = params[LOG_DISPERSION].exp()
        return torch.as_tensor(stats.nbinom.ppf(uniform, k, k / (k + torch.exp(eta))), dtype=eta.dtype)


@dataclass(frozen=True)
class Gamma(DispersedLikelihood):
    """Positive numbers with log-mean eta, whose standard deviation is a share of the mean.

    >>> shape = {LOG_DISPERSION: torch.zeros(())}
    >>> float(Gamma().log_prob(torch.zeros(1), torch.ones(1), shape))
    -1.0
    """

    name: ClassVar[str] = "gamma"
    ordered: ClassVar[bool] = True

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(eta)

    def terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        psi = params[LOG_DISPERSION]
        k, log_y = psi.exp(), y.log()
        ratio = torch.exp(log_y - eta)
        value = k * (psi + log_y - eta - ratio) - torch.lgamma(k) - log_y
        return value * weight, k * (ratio - 1) * weight, k * ratio * weight

    def dispersion_terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        psi = params[LOG_DISPERSION]
        k, log_ratio = psi.exp(), y.log() - eta
        ratio = log_ratio.exp()
        slope = k * (psi + 1 - torch.digamma(k) + log_ratio - ratio)
        bend = slope + k * (1 - k * torch.polygamma(1, k))
        return slope * weight, k * (ratio - 1) * weight, bend * weight

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(params[LOG_DISPERSION]) * torch.ones_like(eta)

    def variance_at(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(2 * eta - params[LOG_DISPERSION])

    def cdf(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        k = params[LOG_DISPERSION].exp()
        at = k * y.clamp(min=0) * torch.exp(-eta)
        out: Tensor = torch.special.gammainc(k.expand_as(at), at)
        return out

    def bracket(self, eta: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        k = params[LOG_DISPERSION].exp()
        high = (torch.exp(eta) * (1 + UPPER_SDS / k.sqrt() + UPPER_SCALES / k)).amax(0)
        return torch.zeros_like(high), high

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        k = params[LOG_DISPERSION].exp()
        return torch.as_tensor(special.gammaincinv(k, uniform), dtype=eta.dtype) * torch.exp(eta) / k


@dataclass(frozen=True)
class BetaBinomial(DispersedLikelihood):
    """A share of trials (``weight``) with logit eta, whose probability differs from row to row.

    >>> k, share = {LOG_DISPERSION: torch.zeros(())}, torch.full((1, 1), 0.5)
    >>> value, _, _ = BetaBinomial().terms(torch.zeros(1, 1), share, torch.full((1, 1), 2.0), k)
    >>> round(float(value.exp()) * 2, 4)
    0.25
    """

    name: ClassVar[str] = "beta-binomial"
    discrete: ClassVar[bool] = True
    concave: ClassVar[bool] = False

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return torch.sigmoid(eta)

    def probabilities(self, mean: Tensor) -> Tensor:
        return torch.cat((1 - mean, mean), dim=-1)

    def _parts(self, eta: Tensor, params: Params) -> tuple[Tensor, Tensor, Tensor]:
        k, eta = params[LOG_DISPERSION].exp(), eta.clamp(-LARGEST_ETA, LARGEST_ETA)
        return k, k * torch.sigmoid(eta), k * torch.sigmoid(-eta)

    def terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        k, a, b = self._parts(eta, params)
        hits, misses = (y * weight).round(), ((1 - y) * weight).round()
        value = torch.lgamma(hits + a) - torch.lgamma(a) + torch.lgamma(misses + b) - torch.lgamma(b)
        value = value + torch.lgamma(k) - torch.lgamma(weight + k)
        width = a * b / k  # d a / d eta
        apart = torch.digamma(hits + a) - torch.digamma(a) - torch.digamma(misses + b) + torch.digamma(b)
        bent = torch.polygamma(1, hits + a) - torch.polygamma(1, a)
        bent = bent + torch.polygamma(1, misses + b) - torch.polygamma(1, b)
        return value, width * apart, -(width * (b - a) / k * apart + width * width * bent)

    def dispersion_terms(self, eta: Tensor, y: Tensor, weight: Tensor, params: Params) -> Terms:
        k, a, b = self._parts(eta, params)
        hits, misses = (y * weight).round(), ((1 - y) * weight).round()
        one, zero = torch.digamma(hits + a) - torch.digamma(a), torch.digamma(misses + b) - torch.digamma(b)
        bent_one = torch.polygamma(1, hits + a) - torch.polygamma(1, a)
        bent_zero = torch.polygamma(1, misses + b) - torch.polygamma(1, b)
        width, whole = a * b / k, torch.digamma(k) - torch.digamma(weight + k)
        slope = a * one + b * zero + k * whole
        across = width * (one - zero) + width * (a * bent_one - b * bent_zero)
        bend = slope + a * a * bent_one + b * b * bent_zero
        return slope, across, bend + k * k * (torch.polygamma(1, k) - torch.polygamma(1, weight + k))

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        mean = torch.sigmoid(eta)  # of one trial, which has no dispersion
        return mean * (1 - mean)

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        return (uniform <= torch.sigmoid(eta)).to(eta.dtype)


# --- families by their names ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A family with its link; of a binomial y is the share, and the trials are its weight."""

    name: str
    link: str
    likelihood: Likelihood
    dispersion: str = ""
    """What the dispersion is called, where there is one."""
    params: Params = field(default_factory=dict)
    """The dispersion at which rows are looked at."""

    @property
    def text(self) -> str:
        """What it is asked for by."""
        return self.name if self.link == LINKS[self.name][0] else f"{self.name}({self.link})"

    @property
    def gaussian(self) -> bool:
        return self.name == "gaussian"

    @property
    def binomial(self) -> bool:
        """The response is so many of so many."""
        return self.name in ("bernoulli", "binomial", "beta-binomial")

    @property
    def dispersed(self) -> bool:
        return bool(self.dispersion)

    @property
    def canonical(self) -> bool:
        """One of the families whose link makes sums of rows enough: what chains know."""
        return not isinstance(self.likelihood, RowLikelihood)

    @property
    def concave(self) -> bool:
        return not isinstance(self.likelihood, RowLikelihood) or self.likelihood.concave

    def at(self, dispersion: float | Tensor) -> Family:
        """With this dispersion, where there is one."""
        if not self.dispersed:
            return self
        return self.at_log(torch.as_tensor(dispersion, dtype=torch.float64).log())

    def at_log(self, psi: Tensor) -> Family:
        """The same by its logarithm."""
        return replace(self, params={LOG_DISPERSION: psi.reshape(())}) if self.dispersed else self

    def terms(self, eta: Tensor, y: Tensor, weight: Tensor) -> Terms:
        """Weighted log-density, its slope and minus its curvature in eta, ``[n, k]`` each."""
        one = self.likelihood
        if isinstance(one, RowLikelihood):
            return one.terms(eta, y, weight, self.params)
        at = eta.unsqueeze(2)
        value, slope = one.value_and_grad(at, y.unsqueeze(2), {})
        bend = one.curvature(at, {}).squeeze(2)
        return value * weight, slope.squeeze(2) * weight, bend * weight

    def dispersion_terms(self, eta: Tensor, y: Tensor, weight: Tensor) -> Terms:
        """The log-density's slope in psi, that of this in eta, and its second derivative in psi."""
        assert isinstance(self.likelihood, DispersedLikelihood)
        return self.likelihood.dispersion_terms(eta, y, weight, self.params)

    def mean(self, eta: Tensor) -> Tensor:
        """The mean response at a linear predictor."""
        return self.likelihood.mean(eta, self.params)

    def linked(self, mean: float) -> float:
        """The linear predictor of a mean."""
        return linked(self.link, mean)

    # --- of rows, as numbers -------------------------------------------------------------------------

    @property
    def _k(self) -> float:
        return float(self.params[LOG_DISPERSION].exp())

    def variance(self, mean: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Of a row, times its weight; of a gaussian or a gamma in units of the dispersion, as R has it."""
        if self.gaussian:
            return np.ones_like(mean)
        if self.name == "beta-binomial":
            return np.asarray(mean * (1 - mean) * (self._k + weight) / (self._k + 1))
        if self.binomial:
            return np.asarray(mean * (1 - mean))
        if self.name == "gamma":
            return np.asarray(mean**2)
        return np.asarray(mean + mean**2 / self._k if self.dispersed else mean)

    def deviance(self, y: np.ndarray, mean: np.ndarray) -> np.ndarray:
        """Of one observation of weight one."""
        if self.gaussian:
            return np.asarray((y - mean) ** 2)
        if self.name == "beta-binomial":
            raise SettingsError("a beta-binomial has no deviance of rows; take residuals('pearson')")
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.name == "gamma":
                return np.asarray(2 * ((y - mean) / mean - np.log(y / mean)))
            first = np.where(y > 0, y * np.log(y / mean), 0.0)
            if self.binomial:
                rest = np.where(y < 1, (1 - y) * np.log((1 - y) / (1 - mean)), 0.0)
                return np.asarray(2 * (first + rest))
            if self.dispersed:
                return np.asarray(2 * (first - (y + self._k) * np.log((y + self._k) / (mean + self._k))))
            return np.asarray(2 * (first - (y - mean)))

    def drawn(self, mean: np.ndarray, weight: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Responses by inversion: one uniform number gives one; of a gaussian none."""
        from scipy import stats  # takes a second

        if self.name == "beta-binomial":
            k = self._k
            return np.asarray(stats.betabinom.ppf(uniform, weight, mean * k, (1 - mean) * k) / weight)
        if self.binomial:
            return np.asarray(stats.binom.ppf(uniform, weight, mean) / weight)
        if self.name == "gamma":
            return np.asarray(stats.gamma.ppf(uniform, self._k, scale=mean / self._k))
        if self.dispersed:
            return np.asarray(stats.nbinom.ppf(uniform, self._k, self._k / (self._k + mean)))
        return np.asarray(stats.poisson.ppf(uniform, mean))


def linked(link: str, mean: float) -> float:
    """The linear predictor of a mean."""
    match link:
        case "identity":
            return mean
        case "log":
            return math.log(mean)
        case "logit":
            return math.log(mean / (1 - mean))
        case "probit":
            return float(special.ndtri(mean))
        case _:
            return math.log(-math.log1p(-mean))


YES_OR_NO: Mapping[str, Likelihood] = {
    "logit": Bernoulli(),
    "probit": Probit(),
    "cloglog": ComplementaryLogLog(),
}
OTHERS: Mapping[str, tuple[Likelihood, str]] = {
    "gaussian": (Normal(), ""),
    "poisson": (Poisson(), ""),
    "negative-binomial": (NegativeBinomial(), "size"),
    "gamma": (Gamma(), "shape"),
    "beta-binomial": (BetaBinomial(), "precision"),
}
LINKS: Mapping[str, tuple[str, ...]] = {
    "gaussian": ("identity",),
    "bernoulli": tuple(YES_OR_NO),
    "binomial": tuple(YES_OR_NO),
    "poisson": ("log",),
    "negative-binomial": ("log",),
    "gamma": ("log",),
    "beta-binomial": ("logit",),
}
"""Links of each family, the default first."""
IN_R = {"negbin": "negative-binomial", "nbinom2": "negative-binomial", "nb": "negative-binomial"}
"""What R's packages call them."""
WRITTEN = re.compile(r"([\w.\- ]+?)\s*(?:\(\s*(?:link\s*=)?\s*[\"']?(\w*)[\"']?\s*\))?")


def family_named(text: str) -> Family:
    """A family by its name, with the link in brackets where it is not the usual one.

    >>> family_named("poisson").link, family_named("binomial(probit)").link
    ('log', 'probit')
    >>> family_named('Gamma(link = "log")').text, family_named("nbinom2").text
    ('gamma', 'negative-binomial')
    """
    found = WRITTEN.fullmatch(text.strip())
    name, link = (found[1], found[2] or "") if found else (text, "")
    spelled = re.sub(r"[-_. ]", "", name.lower())
    name = IN_R.get(spelled, next((n for n in LINKS if n.replace("-", "") == spelled), name))
    if name not in LINKS:
        raise SettingsError(f"family is one of {', '.join(LINKS)}, not {text!r}")
    link = link or LINKS[name][0]
    if link not in LINKS[name]:
        links = ", ".join(LINKS[name])
        raise SettingsError(f"the link of a {name} model is one of {links}, not {link!r}")
    likelihood, dispersion = (YES_OR_NO[link], "") if name in ("bernoulli", "binomial") else OTHERS[name]
    return Family(name, link, likelihood, dispersion)
