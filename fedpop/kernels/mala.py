"""Metropolis-adjusted Langevin (Roberts and Tweedie, 1996), preconditioned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedpop.kernels.base import Kernel, Noise, State, Transition, Tuning, metropolis
from fedpop.kernels.target import Precision, Target


@dataclass(frozen=True)
class MALA(Kernel):
    """z' = z + (e^2/2) Q^-1 grad + e L^-T xi with Q = L L', accepted or rejected.

    Q is the curvature bound plus the prior's precision (a linear head) or the adapted mass (any
    other). One gradient per step; each client's e adapts to an acceptance of 0.574, the best for many
    dimensions (Roberts and Rosenthal, 1998). It is HMC with one leapfrog step of fixed size, and per
    gradient usually worse than HMC: its moves are a random walk's.

    >>> MALA().gradients_per_step
    1
    """

    name: ClassVar[str] = "MALA"
    adjusted: ClassVar[bool] = True
    adapts_mass: ClassVar[bool] = True
    initial_log_step: ClassVar[float] = math.log(0.7)
    # Beyond e = 2 the drift overshoots where the posterior is as narrow as Q says.
    largest_log_step: ClassVar[float] = math.log(2.0)
    target_acceptance: ClassVar[float] = 0.574

    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> tuple[Precision, Tensor]:
        return self.preconditioner(target, tuning), tuning.log_step.exp()[:, None, None]

    def step(
        self,
        target: Target,
        plan: tuple[Precision, Tensor],
        state: State,
        noise: Noise,
        m: int,
    ) -> Transition:
        precision, e = plan
        xi, uniform = noise.normal(m), noise.uniform(m, 1)[..., 0]
        drift = 0.5 * e * precision.root(state.grad)
        new = State.at(target, state.z + e * precision.root_transposed(drift + xi))
        # The noise that the reverse proposal would need, in the same whitened coordinates.
        back = drift + xi + 0.5 * e * precision.root(new.grad)
        change = new.value - state.value + 0.5 * (xi.square() - back.square()).sum(-1)
        return metropolis(new, state, change, uniform)
