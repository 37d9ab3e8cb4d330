"""Integrals over z of at most two dimensions by the trapezoidal rule, for priors whose constant is not known.

On smooth densities that vanish at the edges the rule converges faster than any power of the spacing, so
leaving out every second point tells how far off it is: where that is too far the integral is refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.kernels.target import Target
from fedpop.priors.base import Prior

MOST = 2
POINTS = {1: 2001, 2: 257}
REACH = 8.0
"""In units of the prior's base: a Gaussian has a share of 1e-15 outside."""
TOLERANCE = 1e-3
CHUNK = 2**22


def grid(prior: Prior, beta: Tensor) -> tuple[Tensor, Tensor, float]:
    """Points ``[G, d]`` in double precision, which are on the coarser grid too, and a cell's log-volume."""
    mu, sd = prior.mu(beta).double(), prior.sd(beta).double()
    d = len(mu)
    if d > MOST:
        raise EstimateError(
            f"the marginal likelihood under {prior.name} priors needs their normalising constant, which is "
            f"computed for z of at most {MOST} dimensions, not {d}"
        )
    line = torch.linspace(-REACH, REACH, POINTS[d], dtype=torch.float64, device=beta.device)
    index = torch.arange(len(line), device=beta.device)
    points = torch.cartesian_prod(*[line] * d).reshape(-1, d)
    even = torch.cartesian_prod(*[index % 2 == 0] * d).reshape(-1, d).all(1)
    return mu + sd * points, even, float(d * (line[1] - line[0]).log() + sd.log().sum())


class _Sum:
    """log of a sum that arrives in pieces, on the whole grid and on every second point."""

    def __init__(self, log_cell: float, d: int) -> None:
        self.log_cell, self.log_coarse = log_cell, log_cell + d * math.log(2)
        self.fine: list[Tensor] = []
        self.coarse: list[Tensor] = []

    def add(self, values: Tensor, even: Tensor) -> None:
        self.fine.append(values.logsumexp(-1))
        some = torch.where(even, values, values.new_full((), -math.inf))
        self.coarse.append(some.logsumexp(-1))

    def value(self, what: str) -> Tensor:
        fine = torch.stack(self.fine, -1).logsumexp(-1) + self.log_cell
        coarse = torch.stack(self.coarse, -1).logsumexp(-1) + self.log_coarse
        error = (fine - coarse).abs()
        if not bool((error < TOLERANCE).all()):
            raise EstimateError(
                f"quadrature over z fails for {what}: with half its points it differs by "
                f"{float(error.max()):.2g} (the density is narrower than the grid)"
            )
        return fine


def log_normaliser(prior: Prior, beta: Tensor) -> Tensor:
    """log of the integral of exp(log p(z | beta)), where that is known up to a constant."""
    points, even, log_cell = grid(prior, beta)
    total = _Sum(log_cell, points.shape[1])
    total.add(prior.log_prob(beta.double(), points), even)
    return total.value("the prior's constant")


def evidence(target: Target, clients: int) -> Tensor:
    """log p(D_i | theta), ``[C]``, in double precision."""
    prior, beta = target.prior, target.beta
    points, even, log_cell = grid(prior, beta)
    total = _Sum(log_cell, points.shape[1])
    step = max(1, CHUNK // max(target.likelihood.examples + clients, 1))
    for rows, mask in zip(points.split(step), even.split(step), strict=True):
        z = rows.to(beta.dtype)
        log_prior = prior.log_prob(beta, z).double()
        total.add(target.likelihood.value(z.expand(clients, -1, -1)).double() + log_prior, mask)
    return total.value("a client's likelihood") - log_normaliser(prior, beta)
