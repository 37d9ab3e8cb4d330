"""Integrals over z of at most two dimensions by the trapezoidal rule, for priors whose constant is not known.

On smooth densities that vanish at the edges the rule converges faster than any power of the spacing, so
leaving out every second point tells how far off it is: where that is too far the integral is refused. The
grid starts wide and closes in on where each client's integrand is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedpop.blocks import ENTRIES_AT_ONCE
from fedpop.errors import EstimateError
from fedpop.kernels.target import Target
from fedpop.priors.base import Prior

GRID_POINTS = {1: 1025, 2: 129}
"""Per dimension; odd, so that every second one makes a grid too."""
GRID_REACH = 8.0
"""In units of the prior's base: a Gaussian has a share of 1e-15 outside."""
GRID_PASSES = 3
"""Grids, each about what of the one before is not negligible. Of two dimensions the first has a step of an
eighth of the prior's width; the second covers four of these at least, with one of a 256th; so the third
resolves what is a thousand times narrower than the prior."""
NEGLIGIBLE_BELOW = 40.0
"""A point this far below the highest, in logarithms, adds nothing: exp(-40) is 4e-18."""
QUADRATURE_TOLERANCE = 1e-3
"""Nats by which half of the points may differ from all; the error of all is far smaller, since on smooth
densities it falls faster than any power of their spacing."""

LogDensity = Callable[[Tensor], Tensor]
"""``[C, G]`` at points ``[C, G, d]``."""


def log_normaliser(prior: Prior, beta: Tensor) -> Tensor:
    """log of the integral of exp(log p(z | beta)), where that is known up to a constant."""
    wide = beta.double()
    return integral(lambda z: prior.log_prob(wide, z), prior, wide, 1, "the prior's constant")[0]


def evidence(target: Target, clients: int) -> Tensor:
    """log p(D_i | theta), ``[C]``, in double precision."""
    prior, beta = target.prior, target.beta

    def joint(points: Tensor) -> Tensor:
        step = max(1, ENTRIES_AT_ONCE // max(target.likelihood.examples + clients, 1))
        chunks = points.to(beta.dtype).split(step, dim=1)
        return torch.cat([target.likelihood.value(z) + prior.log_prob(beta, z) for z in chunks], 1).double()

    return integral(joint, prior, beta, clients, "a client's likelihood") - log_normaliser(prior, beta)


def integral(log_density: LogDensity, prior: Prior, beta: Tensor, clients: int, what: str) -> Tensor:
    """log of the integral over z, for each client ``[C]``."""
    mu, sd = prior.mu(beta).detach().double(), prior.sd(beta).detach().double()
    d = len(mu)
    if d not in GRID_POINTS:
        raise EstimateError(
            f"the marginal likelihood under {prior.name} priors needs their normalising constant, which is "
            f"computed for z of at most {max(GRID_POINTS)} dimensions, not {d}"
        )
    low, high = (mu - GRID_REACH * sd).expand(clients, -1), (mu + GRID_REACH * sd).expand(clients, -1)
    line = torch.linspace(0, 1, GRID_POINTS[d], dtype=torch.float64, device=beta.device)
    unit = torch.cartesian_prod(*[line] * d).reshape(-1, d)
    even = torch.arange(GRID_POINTS[d], device=beta.device) % 2 == 0
    coarse = torch.cartesian_prod(*[even] * d).reshape(-1, d).all(1)
    for _ in range(GRID_PASSES):
        points = low.unsqueeze(1) + unit * (high - low).unsqueeze(1)
        values = log_density(points)
        cell = (high - low) / (GRID_POINTS[d] - 1)
        low, high = _closer(points, values.detach(), cell)
    log_cell = cell.log().sum(1)
    fine = values.logsumexp(1) + log_cell
    error = (fine - values[:, coarse].logsumexp(1) - log_cell - d * math.log(2)).abs()
    if not bool((error < QUADRATURE_TOLERANCE).all()):
        raise EstimateError(
            f"quadrature over z fails for {what}: with half its points it differs by "
            f"{float(error.max()):.2g} (the density is narrower than the grid)"
        )
    return fine


def _closer(points: Tensor, values: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The box, two cells wider, of the points that are not negligible."""
    mask = (values > values.amax(1, keepdim=True) - NEGLIGIBLE_BELOW).unsqueeze(-1)
    low = torch.where(mask, points, math.inf).amin(1)
    high = torch.where(mask, points, -math.inf).amax(1)
    return low - 2 * cell, high + 2 * cell
