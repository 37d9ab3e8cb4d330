"""Predictions for groups that are known, new, or nobody's: means at the estimate of theta, by quadrature over
what a group may be; intervals of a mixture over theta."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.mixed.coordinates import Coordinates
from fedpop.mixed.engine import ThetaPoint
from fedpop.mixed.gaussian import moments, posterior
from fedpop.mixed.quadrature import Local, Rule, integrated, resampled
from fedpop.mixed.response import Family
from fedpop.models.likelihoods import Normal
from fedpop.models.predictive import Predictive

GROUPS = ("known", "new", "population")
PREDICTION_PROPOSALS = 400
MEAN_NODES = 61
"""Nodes of the mean of a new group, whose linear predictor is normal."""
PREDICTED_NUMBERS_AT_ONCE = 2**24
"""Numbers that are worked on at once."""


@dataclass(frozen=True)
class NewRows:
    """Rows to predict at, in internal coordinates, and whose they are (-1: a group without data)."""

    x: Tensor
    z: Tensor
    offset: Tensor
    owner: Tensor
    cohort: Cohort | None
    """Groups with data that rows may belong to."""

    def part(self, rows: slice) -> NewRows:
        return NewRows(self.x[rows], self.z[rows], self.offset[rows], self.owner[rows], self.cohort)


@dataclass(frozen=True)
class Predicted:
    """Mean and interval of each row, ``[n]``."""

    mean: Tensor
    low: Tensor
    high: Tensor
    error: Tensor | None = None
    """Of means that are averages over draws of theta: their standard error by the number of draws."""


State = tuple[Tensor, Tensor] | Tensor | None
"""Of groups with data: mean and covariance of their effects, or draws of u ``[C, L, q]``."""


@dataclass(frozen=True)
class Predictor:
    """What is to be predicted for rows: in which model, of what, and from how many draws."""

    units: Coordinates
    family: Family
    random: bool
    """False leaves random effects at zero."""
    of: str | None
    each: int
    """Draws of a group's effects for each point, where they are drawn."""
    key: Key
    nodes: int = 1
    """Of the quadrature over a known group's effects, as ``Rule.of`` counts them."""

    def __post_init__(self) -> None:
        if self.of not in (None, "y", "mean"):
            raise SettingsError(f"of is 'y' or 'mean', not {self.of!r}")
        if self.of == "y" and self.family.binomial:
            raise SettingsError("a yes or no has no interval; of='mean' is that of its probability")

    def predicted(
        self,
        asked: NewRows,
        best: ThetaPoint,
        points: Sequence[ThetaPoint],
        level: float,
        average: bool = False,
    ) -> Predicted:
        """Intervals of the mixture over these points; the mean is that at ``best``, or their average."""
        step = max(1, PREDICTED_NUMBERS_AT_ONCE // (len(points) * self.each * (len(self.units.z_names) + 4)))
        states = [self._state(asked.cohort, point, i) for i, point in enumerate(points)]
        lows, highs = [], []
        for start in range(0, len(asked.x), step):
            rows = asked.part(slice(start, start + step))
            law, what = self._law(rows, points, states)
            low, high = law.interval(level, what)
            lows.append(low)
            highs.append(high)
        low, high = torch.cat(lows), torch.cat(highs)
        if not average:
            return Predicted(self._mean(asked, best), low, high)
        means = torch.stack([self._mean(asked, point) for point in points])
        return Predicted(means.mean(0), low, high, means.std(0) / math.sqrt(len(points)))

    def _mean(self, asked: NewRows, point: ThetaPoint) -> Tensor:
        """The mean response of each row at a theta: of a group without effects, by quadrature over those of
        a new one, or by that over a known one's."""
        if self.family.gaussian:
            return self._gaussian(asked, [point], [self._state(asked.cohort, point, 0)]).mean
        base, likelihood = (asked.x @ point.b + asked.offset).unsqueeze(1), self.family.likelihood
        if not self.random:
            return likelihood.mean(base, {}).squeeze(1)
        zl, known = asked.z @ point.factor, (asked.owner >= 0).nonzero().squeeze(1)
        line = Rule.grid(MEAN_NODES, 1)
        spread = zl.square().sum(1, keepdim=True).sqrt()
        out = likelihood.mean(base + spread * line.nodes.squeeze(1), {}) @ line.log_weight.exp()
        if asked.cohort is None or not len(known):
            return out
        local = Local.of(asked.cohort, self.units, self.family)
        found = integrated(local, point.b, point.factor, Rule.of(self.nodes, zl.shape[1]))
        for rows in known.split(max(1, PREDICTED_NUMBERS_AT_ONCE // found.nodes[0].numel())):
            owner = asked.owner[rows]
            eta = base[rows] + torch.einsum("nq,nkq->nk", zl[rows], found.nodes[owner])
            out[rows] = (likelihood.mean(eta, {}) * found.share[owner]).sum(1)
        return out

    def _law(
        self, rows: NewRows, points: Sequence[ThetaPoint], states: Sequence[State]
    ) -> tuple[Predictive, str]:
        """The law of each row, and what of it is asked for."""
        if self.family.gaussian:  # whose variances are those of the mean where that is asked for
            return self._gaussian(rows, points, states), "y"
        what = self.of or ("y" if self.family.likelihood.ordered else "mean")
        return self._drawn(rows, points, states), what

    def _state(self, cohort: Cohort | None, point: ThetaPoint, i: int) -> State:
        if cohort is None:
            return None
        if self.family.gaussian:
            return posterior(*moments(cohort, self.units)[:2], point)
        here, q = self.key.at(round=i), len(self.units.z_names)
        normal = here.at(purpose="effects").normal(cohort.units, (PREDICTION_PROPOSALS, q), torch.float64)
        uniform = here.at(purpose="choice").uniform(cohort.units, (self.each,), torch.float64)
        local = Local.of(cohort, self.units, self.family)
        return resampled(local, point.b, point.factor, normal, uniform)

    def _gaussian(self, rows: NewRows, points: Sequence[ThetaPoint], states: Sequence[State]) -> Predictive:
        """One normal component for each point: nothing has to be drawn."""
        eta, variance = [], []
        for point, state in zip(points, states, strict=True):
            mean = rows.x @ point.b + rows.offset + self.units.y_centre
            spread = torch.zeros_like(mean)
            if self.random:
                prior = point.factor @ point.factor.mT * point.sigma**2
                spread = torch.einsum("ni,ij,nj->n", rows.z, prior, rows.z)
                if isinstance(state, tuple):
                    known, group = rows.owner >= 0, rows.owner.clamp(min=0)
                    mean = mean + torch.where(known, (rows.z * state[0][group]).sum(1), 0.0)
                    within = torch.einsum("ni,nij,nj->n", rows.z, state[1][group], rows.z)
                    spread = torch.where(known, within, spread)
            eta.append(mean)
            variance.append(spread + (0.0 if self.of == "mean" else point.sigma**2))
        log_variance = torch.stack(variance).clamp(min=1e-300).log().unsqueeze(2)
        params = {"log_variance": log_variance}
        return Predictive(torch.stack(eta).unsqueeze(2), Normal(), params, self.key, False)

    def _drawn(self, rows: NewRows, points: Sequence[ThetaPoint], states: Sequence[State]) -> Predictive:
        """Draws of the linear predictor: some of each point."""
        out, draws, q = [], torch.arange(self.each), len(self.units.z_names)
        for i, (point, state) in enumerate(zip(points, states, strict=True)):
            base = (rows.x @ point.b + rows.offset).unsqueeze(0)
            if not self.random:
                out.append(base)
                continue
            noise = self.key.at(round=i, purpose="new group").normal(draws, (q,), torch.float64)
            eta = base + (rows.z @ (point.factor @ noise.mT)).mT
            if isinstance(state, Tensor):
                random = torch.einsum("nq,nlq->ln", rows.z @ point.factor, state[rows.owner.clamp(min=0)])
                eta = torch.where(rows.owner >= 0, base + random, eta)
            out.append(eta)
        return Predictive(torch.cat(out).unsqueeze(2), self.family.likelihood, {}, self.key, False)
