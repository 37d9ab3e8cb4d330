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
from fedpop.mixed.design import Coordinates
from fedpop.mixed.engine import ThetaPoint
from fedpop.mixed.families import LOG_DISPERSION, Family
from fedpop.mixed.gaussian import posteriors
from fedpop.mixed.laplace import effect_paths
from fedpop.mixed.nesting import Paths
from fedpop.mixed.quadrature import Local, Rule, integrated, resampled
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
    """Rows to predict at, in internal coordinates, and whose they are: the position of the innermost group
    with data that a row belongs to, among the groups of all levels (-1: there is none)."""

    x: Tensor
    z: Tensor
    offset: Tensor
    owner: Tensor
    cohort: Cohort | None
    """Units with data that rows may belong to; of gaussian models their cells."""

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
"""Of groups with data: mean and covariance of their effects, or draws of these ``[C, L, q]``."""


def path_states(found: Paths, point: ThetaPoint) -> tuple[Tensor, Tensor]:
    """Mean ``[S, q]`` and covariance ``[S, q, q]`` of all effects of a row, for the groups of each level, the
    innermost first: effects of levels further in than the group's are those of a new one."""
    prior = point.factor @ point.factor.mT * point.sigma**2
    means, covariances = [], []
    for mean, covariance in zip(found.mean, found.covariance, strict=True):
        new = len(prior) - mean.shape[1]
        wide = covariance.new_zeros((len(mean), *prior.shape))
        wide[:, :new, :new], wide[:, new:, new:] = prior[:new, :new], covariance
        means.append(torch.cat((mean.new_zeros((len(mean), new)), mean), dim=1))
        covariances.append(wide)
    return torch.cat(means), torch.cat(covariances)


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
        base, family = (asked.x @ point.b + asked.offset).unsqueeze(1), self.family.at(point.dispersion)
        if not self.random:
            return family.mean(base).squeeze(1)
        zl, known = asked.z @ point.factor, (asked.owner >= 0).nonzero().squeeze(1)
        line = Rule.grid(MEAN_NODES, 1)
        spread = zl.square().sum(1, keepdim=True).sqrt()
        out = family.mean(base + spread * line.nodes.squeeze(1)) @ line.log_weight.exp()
        if asked.cohort is None or not len(known):
            return out
        if len(self.units.widths) > 1:
            paths = effect_paths(asked.cohort, self.units, family, point.b, point.factor)
            means, covariances = path_states(paths, point)
            z, owner = asked.z[known], asked.owner[known]
            middle = base[known] + (z * means[owner]).sum(1, keepdim=True)
            wide = torch.einsum("ni,nij,nj->n", z, covariances[owner], z).clamp(min=0).sqrt().unsqueeze(1)
            out[known] = family.mean(middle + wide * line.nodes.squeeze(1)) @ line.log_weight.exp()
            return out
        local = Local.of(asked.cohort, self.units, family)
        found = integrated(local, point.b, point.factor, Rule.of(self.nodes, zl.shape[1]))
        for rows in known.split(max(1, PREDICTED_NUMBERS_AT_ONCE // found.nodes[0].numel())):
            owner = asked.owner[rows]
            eta = base[rows] + torch.einsum("nq,nkq->nk", zl[rows], found.nodes[owner])
            out[rows] = (family.mean(eta) * found.share[owner]).sum(1)
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
            return path_states(posteriors(cohort, self.units, point), point)
        here, q, family = self.key.at(round=i), len(self.units.z_names), self.family.at(point.dispersion)
        if len(self.units.widths) > 1:
            found = effect_paths(cohort, self.units, family, point.b, point.factor)
            mean, covariance = path_states(found, point)
            values, vectors = torch.linalg.eigh(covariance)
            root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
            normal = here.at(purpose="effects").normal(torch.arange(len(mean)), (self.each, q), torch.float64)
            effects: Tensor = mean.unsqueeze(1) + normal @ root.mT
            return effects
        normal = here.at(purpose="effects").normal(cohort.units, (PREDICTION_PROPOSALS, q), torch.float64)
        uniform = here.at(purpose="choice").uniform(cohort.units, (self.each,), torch.float64)
        local = Local.of(cohort, self.units, family)
        return resampled(local, point.b, point.factor, normal, uniform) @ point.factor.mT

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
                random = torch.einsum("nq,nlq->ln", rows.z, state[rows.owner.clamp(min=0)])
                eta = torch.where(rows.owner >= 0, base + random, eta)
            out.append(eta)
        params = {}
        if self.family.dispersed:
            logs = [math.log(point.dispersion) for point, eta in zip(points, out, strict=True) for _ in eta]
            params = {LOG_DISPERSION: torch.tensor(logs, dtype=torch.float64).reshape(-1, 1, 1)}
        return Predictive(torch.cat(out).unsqueeze(2), self.family.likelihood, params, self.key, False)
