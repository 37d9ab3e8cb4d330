"""A mass matrix per client, for heads that have no curvature bound to precondition with.

The scale of coordinate j is (var z_j / var g_j)^1/4, from running variances of a client's own draws and of
the log-posterior's gradients g there, which a chain has anyway. Of all diagonal matrices this one brings the
whitened posterior nearest to N(0, I) in Fisher divergence (nutpie's choice). Where the posterior is Gaussian
with independent coordinates it is exact from two draws on, however little of it they have seen; the variance
of the draws alone would have to wait until the chain has been everywhere.

A z of up to 20 dimensions gets a dense matrix, since its coordinates may be all but collinear (an intercept
and a slope whose covariate is far from zero): the geometric mean of the draws' covariance and the inverse of
the gradients', Sigma with Sigma Cov(g) Sigma = Cov(z), which is the same choice among all matrices and exact
for any Gaussian. Both covariances are drawn towards their diagonals while draws are few.

theta moves while it is learned, so old passes fade: pass k counts k times as much as the first, until passes
from more than about fifty ago are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.decisions import Decision

LONGEST_MEMORY = 0.98
"""The largest share of the past that survives a pass."""
PRIOR_DRAWS = 5.0
"""The prior's scale counts as so many draws, on the scale of logarithms."""
LARGEST_DENSE_MASS = 20
"""Dimensions of z up to which the matrix is dense."""


def decision(linear: bool, d: int) -> Decision:
    """Which mass matrix chains step by, on a ``linear`` head or another one, with so many dimensions of z."""
    if linear:
        return Decision("mass matrix", "curvature", "the head is linear, so that its curvature is known")
    if 2 <= d <= LARGEST_DENSE_MASS:
        return Decision("mass matrix", "dense", f"z has {d} dimensions, {LARGEST_DENSE_MASS} at most")
    size = "one dimension" if d == 1 else f"{d} dimensions, more than {LARGEST_DENSE_MASS}"
    return Decision("mass matrix", "diagonal", f"z has {size}")


@dataclass(frozen=True)
class Mass:
    """What a client's draws and gradients have said of the scales to step by.

    Args:
        mean: Running means of z and of its gradients, ``[C, 2, d]``.
        variance: Their running variances, ``[C, 2, d]``.
        weight: How many draws these are worth, ``[C]``.
        covariance: Their running covariances, ``[C, 2, d, d]``; None where the matrix is diagonal.

    >>> mass = Mass.fresh(1, 1, torch.zeros(1))
    >>> z = torch.tensor([[[1.0], [3.0]]])
    >>> mass = mass.after(z, -z / 0.25, passes=torch.zeros(1))  # a Gaussian of variance 1/4
    >>> round(mass.sd(prior=torch.tensor([0.5])).item(), 3)
    0.5
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor
    covariance: Tensor | None = None

    @classmethod
    def fresh(cls, clients: int, dimension: int, like: Tensor) -> Mass:
        # Two tensors, not one twice: a client's state is written into place.
        mean, variance = (like.new_zeros((clients, 2, dimension)) for _ in range(2))
        dense = 2 <= dimension <= LARGEST_DENSE_MASS
        covariance = like.new_zeros((clients, 2, dimension, dimension)) if dense else None
        return cls(mean, variance, like.new_zeros((clients,)), covariance)

    def after(self, draws: Tensor, grads: Tensor, passes: Tensor) -> Mass:
        """With draws and gradients ``[C, S, d]`` of one more pass, after so many passes ``[C]``."""
        new = torch.stack((draws, grads), 1)
        old = self.weight * (passes / (passes + 1)).clamp(max=LONGEST_MEMORY)
        weight = old + draws.shape[1]
        share = (draws.shape[1] / weight)[:, None, None]
        mean = new.mean(2)
        gap = mean - self.mean
        away = new - mean.unsqueeze(2)
        variance = (1 - share) * (self.variance + share * gap.square()) + share * away.square().mean(2)
        covariance, known = self.covariance, self.covariance
        if covariance is not None:
            part, spread = share.unsqueeze(-1), away.mT @ away / draws.shape[1]
            outer = gap.unsqueeze(-1) * gap.unsqueeze(-2)
            covariance = (1 - part) * (covariance + part * outer) + part * spread
        # A chain that ran off to where squares overflow says nothing about scales.
        good = torch.isfinite(variance).flatten(1).all(1)
        wide = good[:, None, None]
        return Mass(
            torch.where(wide, self.mean + share * gap, self.mean),
            torch.where(wide, variance, self.variance),
            torch.where(good, weight, self.weight),
            None if covariance is None or known is None else torch.where(wide[..., None], covariance, known),
        )

    def factor(self, prior: Tensor, correlation: Tensor | None) -> Tensor:
        """A ``[C, d, d]``, lower triangular, with A A' the covariance to step by, pulled towards the prior's
        widths ``[d]`` and correlations ``[d, d]``."""
        assert self.covariance is not None
        sd = self.sd(prior)
        scale, d = sd.double(), sd.shape[1]
        z, g = self.covariance.double().unbind(1)
        z, g = z / scale.unsqueeze(-1) / scale.unsqueeze(-2), g * scale.unsqueeze(-1) * scale.unsqueeze(-2)
        # Coordinates that never moved say nothing, nor does a chain before its first pass.
        moved = ((self.variance > 0).all(1) & torch.isfinite(z + g).all(-1)).all(-1)
        share = (self.weight / (self.weight + PRIOR_DRAWS + d)).double() * moved
        identity = torch.eye(d, dtype=z.dtype, device=z.device)
        share, known = share[:, None, None], moved[:, None, None]
        z, g = (torch.where(known, share * c + (1 - share) * c * identity, identity) for c in (z, g))
        start = identity if correlation is None else correlation.double()
        root, _ = torch.linalg.cholesky_ex(share * geometric_mean(z, g) + (1 - share) * start)
        out: Tensor = (scale.unsqueeze(-1) * root).to(sd.dtype)
        return out

    def sd(self, prior: Tensor) -> Tensor:
        """Scales ``[C, d]`` to step by, pulled towards the prior's ``[d]``, all there is at first."""
        z, g = self.variance.unbind(1)
        moved = (z > 0) & (g > 0)
        found = torch.where(moved, 0.25 * (z.log() - g.log()), prior.log())
        share = (self.weight / (self.weight + PRIOR_DRAWS)).unsqueeze(-1)
        return torch.exp(share * found + (1 - share) * prior.log())


def geometric_mean(a: Tensor, b: Tensor) -> Tensor:
    """The positive matrix X with X B X = A, of a batch: half-way between A and B^-1.

    >>> a, b = torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([1.0, 4.0]))
    >>> geometric_mean(a, b).diagonal()
    tensor([2.0000, 0.5000])
    """
    root = torch.linalg.cholesky_ex(b)[0]
    values, vectors = torch.linalg.eigh(root.mT @ a @ root)
    inner = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    half = torch.linalg.solve_triangular(root.mT, inner, upper=True)
    out: Tensor = torch.linalg.solve_triangular(root.mT, half.mT, upper=True)
    return out
