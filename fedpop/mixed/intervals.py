"""Intervals of estimates: fixed effects, standard deviations, correlations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.mixed.factor import SINGULAR
from fedpop.mixed.table import pandas

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

EDGE = 1e-6
"""A correlation that is so close to one is there."""


def normal_quantile(level: float) -> float:
    """How many standard deviations an interval of this level reaches.

    >>> round(normal_quantile(0.95), 3)
    1.96
    """
    if not 0 < level < 1:
        raise SettingsError(f"a level lies between 0 and 1, not {level}")
    return float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))


def intervals(fit: MixedFit, z: float) -> Any:
    """Parameters of the random effects, the residual's, fixed effects; in lme4's order."""
    rows = _spreads(fit, z)
    for name, value in fit.coefficients.items():
        wide = z * fit.standard_errors[name]
        rows[name] = (value - wide, value + wide)
    return pandas().DataFrame.from_dict(rows, orient="index", columns=["lower", "upper"])


def _spreads(fit: MixedFit, z: float) -> dict[str, tuple[float, float]]:
    """By the delta method, from the covariance of the factor's entries and log sigma."""
    engine, point, names = fit.engine, fit.outcome.point, fit.design.random_names
    theta = engine.factor.entries(point.factor)
    own = [] if fit.sigma is None else [math.log(fit.sigma)]
    least = (SINGULAR * point.sigma / fit.units.z_scale).tolist()
    there = [sd > edge for sd, edge in zip(fit.sd.values(), least, strict=True)]
    spread, out = engine.spread(point), dict[str, tuple[float, float]]()
    for i, j in engine.factor.places:
        name = f"sd_{names[i]}" if i == j else f"cor_{names[i]}.{names[j]}"
        inside = there[i] and there[j] and (i == j or abs(float(fit.correlation[i, j])) < 1 - EDGE)
        ends = (math.nan, math.nan)
        if inside:
            with torch.enable_grad():
                at = torch.cat((theta, theta.new_tensor(own))).requires_grad_()
                root = fit.units.random_map @ engine.factor.matrix(at[: len(theta)])
                sigma = root @ root.mT * (at[-1] * 2).exp() if own else root @ root.mT
                sd = sigma.diagonal().sqrt()
                free = sd[i].log() if i == j else (sigma[i, j] / sd[i] / sd[j]).atanh()
                (slope,) = torch.autograd.grad(free, at)
            ends = _ends(free.detach(), slope @ spread @ slope, z, torch.exp if i == j else torch.tanh)
        out[f"{name}|{fit.group}"] = ends
    if own:
        out["sigma"] = _ends(theta.new_tensor(own[0]), spread[-1, -1], z, torch.exp)
    return out


def _ends(
    middle: Tensor, variance: Tensor, z: float, back: Callable[[Tensor], Tensor]
) -> tuple[float, float]:
    wide = z * variance.clamp(min=0).sqrt()
    return float(back(middle - wide)), float(back(middle + wide))
