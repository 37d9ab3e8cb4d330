"""The final pass: draws of z with theta frozen, which are what users see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Few, Whole
from fedpop.client.sampler import first_tuning
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy, Kernel, resolve_kernel, run
from fedpop.kernels.follow import first_place, follows
from fedpop.kernels.prior_chains import draw
from fedpop.keys import Key
from fedpop.settings import Setting


@dataclass(frozen=True)
class Final(Setting):
    """The pass with theta fixed that gives the draws users see.

    Args:
        chains: How many for each client, 4 by default; R-hat compares them.
        draws: Of each chain; by default 250, or 140 where z has more than 100 entries, as a network's head
            has: nobody looks at them one by one, and probabilities need no more. More make intervals
            smoother.
        burn_in: Transitions before them, which adapt; by default 60 where chains start about the mode of a
            linear head, 300 elsewhere. There are none where draws are exact.

    >>> Final().each(d=2), Final().each(d=650), Final(draws=40).each(d=650)
    (250, 140, 40)
    """

    chains: Few = 4
    draws: Few | None = None
    burn_in: Whole | None = None

    def each(self, d: int) -> int:
        """Draws of a chain where z has so many entries."""
        if self.draws is not None:
            return self.draws
        return FINAL_DRAWS if d <= WIDE_Z else FINAL_DRAWS_OF_WIDE_Z


FINAL_DRAWS, FINAL_DRAWS_OF_WIDE_Z, WIDE_Z = 250, 140, 100
BURN_IN_FROM_MODE, BURN_IN_FROM_ANYWHERE = 60, 300
"""Transitions of a burn-in from about the mode, and from anywhere."""
SHORT = Final(chains=1, draws=50, burn_in=50)
"""A pass for looks between rounds: means over clients do not need more."""
JUDGING = Final(chains=2, draws=100, burn_in=100)
"""A pass for a verdict on theta, whose scores are regressed on gradients."""


def final_pass(
    hierarchy: Hierarchy,
    kernel: Kernel,
    final: Final,
    theta: tuple[Tensor, Tensor],
    cohort: Cohort,
    key: Key,
    states: Tensor | None = None,
) -> Tensor:
    """Draws ``[C, chains, draws, d]`` from p(z | D_i, theta): several chains, burn-in, adaptation off."""
    (phi, beta), key = theta, key.at(purpose="final")
    if not kernel.adjusted:  # what users see should have the right law, whatever training used
        kernel = resolve_kernel(None, hierarchy.model, hierarchy.prior)
    with torch.no_grad():
        target = hierarchy.target_at(phi, beta, cohort)
        start, near = key.at(purpose="start"), follows(kernel, target)
        if near:  # there is one mode, which no start can miss
            z, _, _ = first_place(target, cohort.units, final.chains, start)
        else:
            z = draw(hierarchy.prior, beta, cohort.units, start, final.chains, states)
        tuning = first_tuning(hierarchy, kernel, len(cohort), beta)
        burn_in = (
            final.burn_in
            if final.burn_in is not None
            else BURN_IN_FROM_MODE
            if near
            else BURN_IN_FROM_ANYWHERE
        )
        if not kernel.independent(target):
            for part in range(burn_in // 10):
                warm = key.at(purpose=f"warm-{part}")
                done = run(kernel, target, z, tuning, 10, warm, cohort.units, adapt=True)
                z, tuning = done.state.z, done.tuning
        done = run(kernel, target, z, tuning, final.each(z.shape[-1]), key, cohort.units, adapt=False)
    return done.draws.transpose(1, 2)
