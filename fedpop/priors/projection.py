"""The projection sets of a Normal prior: every standard deviation inside bounds, its mean inside a ball.

A run has those that were given, or some in units of where it starts (``Prior.first_sets``); a prior by itself
may have none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedpop.priors.base import into_ball

if TYPE_CHECKING:
    from fedpop.priors.normal import Normal


FARTHEST = 1e12
REMEDY = "set by the prior's bounds, or by the scale it was told to start at"


def scales(prior: Normal, beta: Tensor) -> tuple[float, float, float]:
    """The smallest and the largest standard deviation in any direction, and the norm of the mean."""
    sd = torch.linalg.svdvals(prior.factor(beta)) if prior.covariance == "full" else prior.sd(beta)
    return float(sd.min()), float(sd.max()), float(prior.mu(beta).norm())


def project(prior: Normal, beta: Tensor) -> Tensor:
    """The nearest beta inside the projection sets."""
    d = prior.dimension(beta)
    mu = into_ball(beta[:d], prior.ball)
    if prior.bounds is None:
        return torch.cat((mu, beta[d:]))
    low, high = prior.bounds
    if prior.covariance != "full":
        return torch.cat((mu, beta[d:].clamp(math.log(low), math.log(high))))
    # What is so far outside that it would overflow is as far inside afterwards as what is not.
    rows, cols = torch.tril_indices(d, d, device=beta.device)
    edge, free = high * FARTHEST, beta[d:].double()
    free = torch.where(rows == cols, free.clamp(max=math.log(edge)), free.clamp(-edge, edge))
    factor = prior.factor(torch.cat((mu.double(), free)))
    values = torch.linalg.svdvals(factor)
    if bool((values >= low).all() & (values <= high).all()):
        return torch.cat((mu, beta[d:]))
    left, values, _ = torch.linalg.svd(factor)
    # The triangular factor by QR: Sigma itself would lose what is a millionth of its largest entry.
    upper = torch.linalg.qr((left * values.clamp(low, high)).mT).R
    return prior.pack(mu.double(), upper.mT * upper.diagonal().sign()).to(beta.dtype)


def boxed(prior: Normal, beta: Tensor) -> Tensor:
    """Of a full covariance, bounds on the diagonal of its factor."""
    if prior.covariance != "full" or prior.bounds is None:
        return project(prior, beta)
    d, (low, high) = prior.dimension(beta), prior.bounds
    rows, cols = torch.tril_indices(d, d, device=beta.device)
    inside = beta[d:].clamp(math.log(low), math.log(high))
    return torch.cat((into_ball(beta[:d], prior.ball), torch.where(rows == cols, inside, beta[d:])))


def at_bound(prior: Normal, beta: Tensor) -> list[str]:
    """Which parameters sit on the edge of a projection set."""
    out = []
    least, most, norm = scales(prior, beta)
    if prior.bounds is not None and least <= prior.bounds[0] * 1.0001:
        out.append(f"the prior's scale is at its lower bound {prior.bounds[0]:g} ({REMEDY})")
    if prior.bounds is not None and most >= prior.bounds[1] * 0.9999:
        out.append(f"the prior's scale is at its upper bound {prior.bounds[1]:g} ({REMEDY})")
    if prior.ball is not None and norm >= prior.ball * 0.9999:
        out.append(f"the prior's mean is at the edge of its ball, {prior.ball:g}")
    return out
