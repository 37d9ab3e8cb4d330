"""Groups that are out of all proportion to the others: they are named, and stay in the fit.

One group whose response is in another unit moves everyone's estimates, and a fit to it converges like any
other. So the squared length of each group's effects, in units of what they vary by over groups, is held
against the median group's: rather the ratio than the length, since the estimates are made with the culprit.
Whether such a group is an error only its owner knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedpop.message.guard import MESSAGES_FOR_A_MEDIAN
from fedpop.mixed.nesting import spans

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

UNUSUAL_TIMES = 300.0
"""Times the median at which a group is named. Of a million groups with one normal effect the largest is
about 60."""
LEAST_SHARE_LEFT = 1e-9
"""Of the largest, below which a direction of the effects says nothing."""


def unusual_groups(fit: MixedFit) -> list[str]:
    """Names of the groups whose effects are out of all proportion, by factor, the innermost first."""
    found = []
    pairs = zip(fit.factors, spans(fit.units.widths), fit._level_effects, fit._level_names, strict=True)
    for factor, span, (mean, cov), names in pairs:
        length = standardised(mean, cov, fit.covariance[span, span])
        some = length[length > 0]
        if len(some) >= MESSAGES_FOR_A_MEDIAN:
            out = (length > UNUSUAL_TIMES * some.median()).nonzero().squeeze(1).tolist()
            found += [f"{factor} {names[i]!r}" for i in out]
    return found


def standardised(mean: Tensor, cov: Tensor, total: Tensor) -> Tensor:
    """u' (Sigma - V)^+ u, ``[K]``, of posterior means u ``[K, q]`` and covariances V: the variance of a mean
    over groups is what is left of Sigma."""
    values, vectors = torch.linalg.eigh(total - cov)
    most = float(total.diagonal().max())
    turned = (vectors.mT @ mean.unsqueeze(-1)).squeeze(-1)
    return torch.where(values > LEAST_SHARE_LEFT * most, turned.square() / values.clamp(min=1e-300), 0.0).sum(
        1
    )
