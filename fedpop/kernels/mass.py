"""A diagonal mass matrix per client, for heads that have no curvature bound to precondition with.

The scale of coordinate j is (var z_j / var g_j)^1/4, from running variances of a client's own draws and of
the log-posterior's gradients g there, which a chain has anyway. Of all diagonal matrices this one brings the
whitened posterior nearest to N(0, I) in Fisher divergence (nutpie's choice). Where the posterior is Gaussian
with independent coordinates it is exact from two draws on, however little of it they have seen; the variance
of the draws alone would have to wait until the chain has been everywhere.

theta moves while it is learned, so old passes fade: pass k counts k times as much as the first, until passes
from more than about fifty ago are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST_MEMORY = 0.98
"""The largest share of the past that survives a pass."""
PRIOR_DRAWS = 5.0
"""The prior's scale counts as so many draws, on the scale of logarithms."""


@dataclass(frozen=True)
class Mass:
    """Means and variances ``[C, 2, d]`` of z and of its gradients, worth so many draws ``[C]``.

    >>> mass = Mass.fresh(1, 1, torch.zeros(1))
    >>> z = torch.tensor([[[1.0], [3.0]]])
    >>> mass = mass.after(z, -z / 0.25, passes=torch.zeros(1))  # a Gaussian of variance 1/4
    >>> round(mass.sd(prior=torch.tensor([0.5])).item(), 3)
    0.5
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor

    @classmethod
    def fresh(cls, clients: int, dimension: int, like: Tensor) -> Mass:
        # Two tensors, not one twice: a client's state is written into place.
        mean, variance = (like.new_zeros((clients, 2, dimension)) for _ in range(2))
        return cls(mean, variance, like.new_zeros((clients,)))

    def after(self, draws: Tensor, grads: Tensor, passes: Tensor) -> Mass:
        """With draws and gradients ``[C, S, d]`` of one more pass, after so many passes ``[C]``."""
        new = torch.stack((draws, grads), 1)
        old = self.weight * (passes / (passes + 1)).clamp(max=LONGEST_MEMORY)
        weight = old + draws.shape[1]
        share = (draws.shape[1] / weight)[:, None, None]
        mean = new.mean(2)
        gap = mean - self.mean
        spread = (new - mean.unsqueeze(2)).square().mean(2)
        variance = (1 - share) * (self.variance + share * gap.square()) + share * spread
        # A chain that ran off to where squares overflow says nothing about scales.
        good = torch.isfinite(variance).flatten(1).all(1)
        wide = good[:, None, None]
        return Mass(
            torch.where(wide, self.mean + share * gap, self.mean),
            torch.where(wide, variance, self.variance),
            torch.where(good, weight, self.weight),
        )

    def sd(self, prior: Tensor) -> Tensor:
        """Scales ``[C, d]`` to step by, pulled towards the prior's ``[d]``, all there is at first."""
        z, g = self.variance.unbind(1)
        moved = (z > 0) & (g > 0)
        found = torch.where(moved, 0.25 * (z.log() - g.log()), prior.log())
        share = (self.weight / (self.weight + PRIOR_DRAWS)).unsqueeze(-1)
        return torch.exp(share * found + (1 - share) * prior.log())
