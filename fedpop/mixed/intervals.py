"""Intervals of estimates: fixed effects, standard deviations, correlations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.evaluation.information import rows_of_jacobian
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
    places, gaussian = engine.factor.places, fit.sigma is not None
    theta = engine.factor.entries(point.factor)
    here = torch.cat((theta, theta.new_tensor([math.log(point.sigma)] if gaussian else [])))

    def free(x: Tensor) -> Tensor:
        """Parameters on scales without bounds."""
        root = fit.units.random_map @ engine.factor.matrix(x[: len(theta)])
        if gaussian:
            root = root * x[-1].exp()
        sigma = root @ root.mT
        sd = sigma.diagonal().sqrt()
        each = [sd[i].log() if i == j else (sigma[i, j] / sd[i] / sd[j]).atanh() for i, j in places]
        return torch.stack([*each, *([x[-1]] if gaussian else [])])

    with torch.enable_grad():
        at = here.clone().requires_grad_()
        value = free(at)
        slope = rows_of_jacobian(value, at)
    spread = (slope @ engine.spread(point) @ slope.mT).diagonal().clamp(min=0).sqrt()
    least = (SINGULAR * point.sigma / fit.units.z_scale).tolist()
    sds, out = list(fit.sd.values()), dict[str, tuple[float, float]]()
    for (i, j), middle, wide in zip(places, value.detach(), z * spread, strict=False):
        inside = sds[i] > least[i] and sds[j] > least[j]
        if i == j:
            name, back = f"sd_{names[i]}|{fit.group}", torch.exp
        else:
            name, back = f"cor_{names[i]}.{names[j]}|{fit.group}", torch.tanh
            inside = inside and abs(float(fit.correlation[i, j])) < 1 - EDGE
        ends = [float(back(middle + side * wide)) if inside else math.nan for side in (-1, 1)]
        out[name] = (ends[0], ends[1])
    if gaussian:
        low, high = (here[-1] + torch.tensor([-z, z]) * spread[-1]).exp().tolist()
        out["sigma"] = (low, high)
    return out
