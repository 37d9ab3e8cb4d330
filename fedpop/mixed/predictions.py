"""Predictions for groups that are known, new, or nobody's: a mixture over theta, and over what a group
may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.mixed.gaussian import moments
from fedpop.mixed.gaussian_fit import posterior
from fedpop.mixed.groups import Coordinates
from fedpop.mixed.point import Point
from fedpop.mixed.quadrature import Local, resampled
from fedpop.mixed.response import Family
from fedpop.models.likelihoods import Normal
from fedpop.models.predictive import Predictive

GROUPS = ("known", "new", "population")
PROPOSALS = 400
TOGETHER = 2**24
"""Numbers that are worked on at once."""


@dataclass(frozen=True)
class Asked:
    """Rows to predict at, in internal coordinates, and whose they are (-1: a group without data)."""

    x: Tensor
    z: Tensor
    offset: Tensor
    owner: Tensor
    cohort: Cohort | None
    """Groups with data that rows may belong to."""

    def part(self, rows: slice) -> Asked:
        return Asked(self.x[rows], self.z[rows], self.offset[rows], self.owner[rows], self.cohort)


@dataclass(frozen=True)
class Predicted:
    """Mean and interval of each row, ``[n]``."""

    mean: Tensor
    low: Tensor
    high: Tensor


def predicted(
    asked: Asked,
    best: Point,
    points: Sequence[Point],
    units: Coordinates,
    family: Family,
    random: bool,
    level: float,
    of: str | None,
    each: int,
    key: Key,
) -> Predicted:
    """The mixture over these points; ``random`` False leaves random effects at zero. ``each`` are draws
    of a group's effects for each point, where they are drawn. Of normal responses the mean is that at
    ``best``."""
    if of not in (None, "y", "mean"):
        raise SettingsError(f"of is 'y' or 'mean', not {of!r}")
    if of == "y" and family.binomial:
        raise SettingsError("a yes or no has no interval; of='mean' is that of its probability")
    step = max(1, TOGETHER // (len(points) * each * (len(units.z_names) + 4)))
    make = _gaussian if family.gaussian else _drawn
    parts = []
    states = [_state(asked.cohort, point, units, family, each, key, i) for i, point in enumerate(points)]
    for start in range(0, len(asked.x), step):
        rows = asked.part(slice(start, start + step))
        parts.append(make(rows, points, states, units, family, random, of, each, key))
    means = [p.means.mean(0).squeeze(1) for p, _ in parts]
    if family.gaussian:
        state = [_state(asked.cohort, best, units, family, each, key, 0)]
        means = [_gaussian(asked, [best], state, units, family, random, of, each, key)[0].mean]
    intervals = [p.interval(level, o) for p, o in parts]
    return Predicted(
        torch.cat(means),
        torch.cat([low for low, _ in intervals]),
        torch.cat([high for _, high in intervals]),
    )


State = tuple[Tensor, Tensor] | Tensor | None
"""Of groups with data: mean and covariance of their effects, or draws of u ``[C, L, q]``."""


def _state(
    cohort: Cohort | None, point: Point, units: Coordinates, family: Family, each: int, key: Key, i: int
) -> State:
    if cohort is None:
        return None
    if family.gaussian:
        return posterior(*moments(cohort, units)[:2], point)
    here, q = key.at(round=i), len(units.z_names)
    normal = here.at(purpose="effects").normal(cohort.units, (PROPOSALS, q), torch.float64)
    uniform = here.at(purpose="choice").uniform(cohort.units, (each,), torch.float64)
    return resampled(Local.of(cohort, units, family), point.b, point.factor, normal, uniform)


def _gaussian(
    rows: Asked,
    points: Sequence[Point],
    states: Sequence[State],
    units: Coordinates,
    family: Family,
    random: bool,
    of: str | None,
    each: int,
    key: Key,
) -> tuple[Predictive, str]:
    """One normal component for each point: nothing has to be drawn."""
    eta, variance = [], []
    for point, state in zip(points, states, strict=True):
        mean = rows.x @ point.b + rows.offset + units.y_centre
        spread = torch.zeros_like(mean)
        if random:
            prior = point.factor @ point.factor.mT * point.sigma**2
            spread = torch.einsum("ni,ij,nj->n", rows.z, prior, rows.z)
            if isinstance(state, tuple):
                known, own = rows.owner >= 0, rows.owner.clamp(min=0)
                mean = mean + torch.where(known, (rows.z * state[0][own]).sum(1), 0.0)
                within = torch.einsum("ni,nij,nj->n", rows.z, state[1][own], rows.z)
                spread = torch.where(known, within, spread)
        eta.append(mean)
        variance.append(spread + (0.0 if of == "mean" else point.sigma**2))
    log_variance = torch.stack(variance).clamp(min=1e-300).log().unsqueeze(2)
    return Predictive(
        torch.stack(eta).unsqueeze(2), Normal(), {"log_variance": log_variance}, key, False
    ), "y"


def _drawn(
    rows: Asked,
    points: Sequence[Point],
    states: Sequence[State],
    units: Coordinates,
    family: Family,
    random: bool,
    of: str | None,
    each: int,
    key: Key,
) -> tuple[Predictive, str]:
    """Draws of the linear predictor: some of each point."""
    out = []
    draws = torch.arange(each)
    for i, (point, state) in enumerate(zip(points, states, strict=True)):
        base = (rows.x @ point.b + rows.offset).unsqueeze(0)
        if not random:
            out.append(base)
            continue
        noise = key.at(round=i, purpose="new group").normal(draws, (len(units.z_names),), torch.float64)
        eta = base + (rows.z @ (point.factor @ noise.mT)).mT
        if isinstance(state, Tensor):
            own = torch.einsum("nq,nlq->ln", rows.z @ point.factor, state[rows.owner.clamp(min=0)])
            eta = torch.where(rows.owner >= 0, base + own, eta)
        out.append(eta)
    found = Predictive(torch.cat(out).unsqueeze(2), family.likelihood, {}, key, False)
    return found, of or ("y" if family.likelihood.ordered else "mean")
