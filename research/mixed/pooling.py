"""Why partial pooling: radon in 85 counties, some with two homes, some with a hundred.

Half of each county's homes are held out. Intervals of counties' means without pooling (a county's own homes),
with complete pooling (one mean for all) and with partial pooling (the mixed model) are judged by the means of
the homes that they did not see. Slope and noise are the mixed model's in all of them, so that they differ in
nothing but pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedpop.keys import Key
from fedpop.mixed.inference import normal_quantile
from fedpop.mixed.model import mixed_model

HOW = ("no pooling", "complete pooling", "partial pooling")
SMALL = 5
"""Homes up to which a county counts as small."""
Z = normal_quantile(0.9)


@dataclass(frozen=True)
class Judged:
    """One way to pool: its numbers, and its means and standard errors by county."""

    metrics: dict[str, float]
    counties: dict[str, list[float]]


def halves(frame: Any, split: int) -> tuple[Any, Any]:
    """Half of each county's homes to learn from, one more where they are odd, and the others."""
    ids = torch.arange(len(frame))
    chance = Key(split, purpose="halves").uniform(ids, (), torch.float64).numpy()
    order = frame.assign(chance=chance).sort_values("chance")
    place = order.groupby("county").cumcount()
    return order[place % 2 == 0], order[place % 2 == 1]


def judged(frame: Any, formula: str, split: int) -> dict[str, Judged]:
    """Coverage of the 90 % intervals, their widths and errors: in small counties, and in all."""
    train, test = halves(frame, split)
    fit = mixed_model(formula, train)
    slope, sigma = fit.coefficients["floor"], float(fit.sigma or 0.0)
    own, others = ((half.log_radon - slope * half.floor).groupby(half.county) for half in (train, test))
    mean, size = own.mean(), own.size().to_numpy()
    at = [mean.index.get_loc(county) for county in others.groups]
    means, count = others.mean().to_numpy(), others.size().to_numpy()
    effects = fit.random_effects(0.9).xs("(Intercept)", level=1).loc[[str(c) for c in mean.index]]
    whole, spread = len(train), float((train.log_radon - slope * train.floor).std())
    ways = {
        "no pooling": (mean.to_numpy(), sigma / np.sqrt(size), sigma),
        "complete pooling": (
            np.full(len(mean), float((train.log_radon - slope * train.floor).mean())),
            np.full(len(mean), spread / whole**0.5),
            spread,
        ),
        "partial pooling": (
            fit.coefficients["(Intercept)"] + effects["mean"].to_numpy(),
            effects["sd"].to_numpy(),
            sigma,
        ),
    }
    out = {}
    for how, (centre, sd, noise) in ways.items():
        # A held-out mean has noise of its own beside what is not known of the county.
        away = means - centre[at]
        hit = np.abs(away) < Z * np.sqrt(sd[at] ** 2 + noise**2 / count)
        metrics: dict[str, float] = {}
        for where, seen, there in (
            ("", size > 0, size[at] > 0),
            ("_small", size <= SMALL, size[at] <= SMALL),
        ):
            metrics |= {
                f"coverage{where}": float(hit[there].mean()),
                f"width{where}": float(2 * Z * sd[seen].mean()),
                f"error{where}": float(np.sqrt(np.square(away[there]).mean())),
            }
        out[how] = Judged(metrics, {"size": size.tolist(), "mean": centre.tolist(), "sd": sd.tolist()})
    return out
