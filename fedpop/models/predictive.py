"""The predictive distribution of new examples: a mixture over draws of z, one component each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpop.checked import Level, checked
from fedpop.errors import DataError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, as_tensor, map_inputs
from fedpop.federation.labels import as_targets, numbered
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.likelihoods import Likelihood, Params


class Entropy(NamedTuple):
    """Predictive entropy in nats: total = aleatoric (noise given z) + epistemic (what z may be)."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


@dataclass(frozen=True)
class Predictive:
    """p(y | x) = 1/L sum_l p(y | eta_l) for n examples, with head outputs eta ``[L, n, o]``.

    ``plug_in`` marks methods without uncertainty about z: one component, intervals of noise only. The
    likelihood's own parameters are scalars, or ``[L, 1, 1]`` where theta was drawn too.
    """

    eta: Tensor
    likelihood: Likelihood
    params: Params
    key: Key
    plug_in: bool
    labels: tuple[str, ...] = ()
    """What the classes are called, in the order of ``probs``, where targets were words."""

    def __repr__(self) -> str:
        kind = "a point estimate of z (noise only)" if self.plug_in else f"{self.eta.shape[0]} draws of z"
        return f"Predictive({self.eta.shape[1]} examples, {self.likelihood.name}, from {kind})"

    @cached_property
    def means(self) -> Tensor:
        """E[y | z] for every draw of z, ``[L, n, o]``."""
        return self.likelihood.mean(self.eta, self.params)

    @property
    def mean(self) -> Tensor:
        """E[y]: ``[n]``, or ``[n, o]`` for several outputs or classes."""
        return _drop(self.means.mean(0))

    @property
    def probs(self) -> Tensor:
        """Class probabilities ``[n, K]`` (two columns for yes/no targets)."""
        return self.likelihood.probabilities(self.means.mean(0))

    @property
    def most_likely(self) -> list[str] | Tensor:
        """The likeliest class of each example: its name where targets were words, else its number."""
        best = self.probs.argmax(-1)
        return [self.labels[i] for i in best.tolist()] if self.labels else best

    @cached_property
    def samples(self) -> Tensor:
        """One y per draw of z, ``[L, n]`` (or ``[L, n, o]``); point methods give 1000 of them."""
        eta = self.eta.expand(1000, -1, -1) if self.plug_in else self.eta
        ids = torch.arange(eta.shape[0], device=eta.device)
        uniform = self.key.at(purpose="y.uniform").uniform(ids, eta.shape[1:], eta.dtype)
        normal = self.key.at(purpose="y.normal").normal(ids, eta.shape[1:], eta.dtype)
        y = self.likelihood.draw(eta, self.params, uniform, normal)
        return y if y.dim() < eta.dim() else _drop(y)  # labels have no axis of outputs

    def log_prob(self, y: Any) -> Tensor:
        """log p(y_j | x_j) per example.

        Args:
            y: One for each example, as they were given in training.
        """
        y = self._one_each(numbered(as_targets(y, "predictive, y"), self.labels, "predictive, y"))
        y = self.likelihood.check_targets(y, self.eta.shape[-1], "predictive")
        encoded = self.likelihood.encode(y.to(self.eta.device), self.eta.shape[-1], self.eta.dtype)
        each = self.likelihood.log_prob(self.eta, encoded, self.params)
        return torch.logsumexp(each, 0) - math.log(self.eta.shape[0])

    def _one_each(self, y: Tensor) -> Tensor:
        """Targets, as many as there are examples."""
        n, found = self.eta.shape[1], y.shape[0] if y.dim() else 1
        if not y.dim() or found != n:
            raise DataError(
                f"predictive: y has {found} row(s), but there are {n} examples; give one for each"
            )
        return y

    def cdf(self, y: Any) -> Tensor:
        """P(Y_j <= y_j) per example, for normal and poisson targets.

        Args:
            y: One for each example.
        """
        y = self._one_each(as_tensor(y, "predictive, y").to(self.eta))
        if self.likelihood.ordered and y.numel() != math.prod(self.eta.shape[1:]):
            raise DataError(f"predictive: y has shape {tuple(y.shape)}, not {tuple(self.eta.shape[1:])}")
        return _drop(self._cdf(y.reshape(self.eta.shape[1:]) if self.likelihood.ordered else y))

    @checked
    def covers(self, y: Any, level: Level = 0.9) -> Tensor:
        """Whether each y_j lies in its equal-tailed interval (without computing the interval).

        Args:
            y: One for each example.
            level: Of the intervals (default: 0.9).
        """
        tail = (1 - level) / 2
        at = self.cdf(y)
        return (at >= tail) & (at <= 1 - tail)

    @checked
    def interval(self, level: Level = 0.9, of: str | None = None) -> tuple[Tensor, Tensor]:
        """Equal-tailed credible interval (low, high).

        Args:
            level: Its probability (default: 0.9).
            of: ``"y"`` for that of a new observation, the default for normal and poisson targets; ``"mean"``
                for that of E[y | z], the default for classes (an interval of each probability).
        """
        ordered = self.likelihood.ordered
        of = of or ("y" if ordered else "mean")
        tail = (1 - level) / 2
        if not self.eta.shape[1]:  # of no examples
            return _drop(self.eta[0]), _drop(self.eta[0])
        if of == "mean":
            wanted = torch.tensor([tail, 1 - tail], dtype=self.eta.dtype, device=self.eta.device)
            low, high = torch.quantile(self.means, wanted, dim=0)
            return _drop(low), _drop(high)
        if of != "y" or not ordered:
            raise SettingsError(
                f"of={of!r}: an interval of y needs a normal or poisson likelihood; use of='mean'"
            )
        return _drop(self._quantile(tail)), _drop(self._quantile(1 - tail))

    def _cdf(self, y: Tensor) -> Tensor:
        return self.likelihood.cdf(self.eta, y, self.params).mean(0)

    def _quantile(self, level: float) -> Tensor:
        """The mixture's quantile by bisection on its cdf: exact, where draws of y would be noisy."""
        low, high = self.likelihood.bracket(self.eta, self.params)
        whole = self.likelihood.discrete
        steps = math.ceil(math.log2(max(float((high - low).max()), 2))) + 1 if whole else 40
        for _ in range(steps):
            middle = (low + high) / 2
            middle = torch.floor(middle) if whole else middle
            below = self._cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high if whole else (low + high) / 2

    @property
    def sd(self) -> Tensor:
        """Standard deviation of y, noise and uncertainty about z together."""
        spread = self.means.var(0, correction=0)
        noise = self.likelihood.variance_at(self.eta, self.params).mean(0)
        return _drop((spread + noise).sqrt())

    @cached_property
    def entropy(self) -> Entropy:
        """Entropy of y, split in its aleatoric and epistemic parts (by Monte Carlo where need be)."""
        if self.likelihood.discrete and not self.likelihood.ordered:
            p = self.likelihood.probabilities(self.means)
            aleatoric = _categorical_entropy(p).mean(0)
            return _parts(_categorical_entropy(p.mean(0)), aleatoric)
        every = max(1, len(self.samples) // 200)  # from all chains, not only the first
        draws = self.samples[::every]
        if draws.dim() == 2:
            draws = draws.unsqueeze(-1)
        own = self.eta.expand(len(self.samples), -1, -1)[::every]
        params = {n: v[::every] if v.dim() else v for n, v in self.params.items()}
        aleatoric = -self.likelihood.log_prob(own, draws, params).mean(0)
        mixture = torch.stack([self.log_prob(y) for y in draws])
        return _parts(-mixture.mean(0), aleatoric)


def _parts(total: Tensor, aleatoric: Tensor) -> Entropy:
    """The epistemic part is never negative, not even by rounding or noise; the parts add up."""
    epistemic = (total - aleatoric).clamp(min=0)
    return Entropy(aleatoric + epistemic, aleatoric, epistemic)


def _drop(v: Tensor) -> Tensor:
    return v.squeeze(-1) if v.dim() > 1 and v.shape[-1] == 1 else v


def _categorical_entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def unit_by_unit(draws: Tensor, features: Inputs, cohort: Cohort) -> Iterator[tuple[Tensor, Inputs, Tensor]]:
    """Each unit's draws of z ``[S, d]``, the features of its examples, and their targets."""
    start = 0
    for c, n in enumerate(cohort.sizes.tolist()):
        rows = slice(start, start + n)
        start += n
        yield draws[c], map_inputs(lambda v, r=rows: v[r], features), cohort.y[rows]


def mixture_score(
    model: Model, phi: Tensor, draws: Tensor, features: Inputs, cohort: Cohort
) -> tuple[Tensor, Tensor]:
    """Summed log of the mean over draws ``[C, S, d]`` of p(y_j | x_j, z), and examples, of each unit
    ``[C]``."""
    out = []
    for z, own, y in unit_by_unit(draws, features, cohort):
        each = model.log_prob(phi, z, own, y)
        out.append((torch.logsumexp(each, 0) - math.log(each.shape[0])).sum())
    return torch.stack(out).double(), cohort.sizes.double()
