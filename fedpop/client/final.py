"""The final pass: draws of z with theta frozen, which are what users see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Few, Whole
from fedpop.client.sampler import Sampler
from fedpop.federation.cohort import Cohort
from fedpop.kernels import resolve_kernel, run
from fedpop.kernels.prior_chains import draw
from fedpop.keys import Key
from fedpop.settings import Setting


@dataclass(frozen=True)
class Final(Setting):
    """The pass with theta fixed that gives the draws users see.

    Args:
        chains: How many for each client, 4 unless told; R-hat compares them.
        draws: Of each chain, 250 unless told; more make intervals smoother.
        burn_in: Transitions before them, which adapt; 300 unless told, none where draws are exact.

    >>> Final(draws=100).total
    400
    """

    chains: Few = 4
    draws: Few = 250
    burn_in: Whole = 300

    @property
    def total(self) -> int:
        return self.chains * self.draws


SHORT = Final(chains=1, draws=50, burn_in=50)
"""A pass for looks between rounds: means over clients do not need more."""
JUDGING = Final(chains=2, draws=100, burn_in=100)
"""A pass for a verdict on theta, whose scores are regressed on gradients."""


def final_pass(
    sampler: Sampler,
    final: Final,
    phi: Tensor,
    beta: Tensor,
    cohort: Cohort,
    key: Key,
    states: Tensor | None = None,
) -> Tensor:
    """Draws ``[C, chains, draws, d]`` from p(z | D_i, theta): several chains, burn-in, adaptation off."""
    hierarchy, key = sampler.hierarchy, key.at(purpose="final")
    kernel = sampler.kernel
    if not kernel.adjusted:  # what users see should have the right law, whatever training used
        kernel = resolve_kernel(None, hierarchy.model, hierarchy.prior)
    with torch.no_grad():
        target = hierarchy.target_at(phi, beta, cohort)
        z = draw(hierarchy.prior, beta, cohort.units, key.at(purpose="start"), final.chains, states)
        tuning = sampler.first_tuning(kernel, len(cohort), beta)
        if not kernel.independent(target):
            for part in range(final.burn_in // 10):
                warm = key.at(purpose=f"warm-{part}")
                done = run(kernel, target, z, tuning, 10, warm, cohort.units, adapt=True)
                z, tuning = done.state.z, done.tuning
        done = run(kernel, target, z, tuning, final.draws, key, cohort.units, adapt=False)
    return done.draws.transpose(1, 2)
