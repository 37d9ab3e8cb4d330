"""The exponential integrator of Langevin dynamics, preconditioned; exact on Gaussian posteriors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedpop.checked import Fraction
from fedpop.kernels.base import Kernel, Noise, State, Transition, Tuning, guarded
from fedpop.kernels.target import Precision, Target


@dataclass(frozen=True)
class Exponential(Kernel):
    """z <- z + h Q^-1 grad + sqrt(h (2 - h)) L^-T xi, with Q = L L' and h in (0, 1].

    Where the posterior is Gaussian with precision Q this leaves it invariant at any h, and at h = 1 it
    is an independent draw. Where Q only bounds the curvature it under-disperses, by up to a factor
    two, and drags a learned prior scale down: use HMC there.

    Args:
        h: The step size, above 0 and at most 1 (default: 1). Smaller ones make draws depend on each other.

    >>> Exponential(h=0.5)
    Exponential(h=0.5)
    """

    h: Fraction = 1.0
    name: ClassVar[str] = "Exponential"
    adjusted: ClassVar[bool] = False
    of_normals: ClassVar[bool] = True

    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> tuple[Precision, Tensor]:
        return target.precision(), (self.h * tuning.log_step.exp())[:, None, None]

    def step(
        self,
        target: Target,
        plan: tuple[Precision, Tensor],
        state: State,
        noise: Noise,
        m: int,
    ) -> Transition:
        precision, h = plan
        xi = noise.normal(m)
        # One product with L^-T serves drift and noise: Q^-1 grad = L^-T (L^-1 grad).
        move = h * precision.root(state.grad) + (h * (2 - h)).sqrt() * xi
        new = State.at(target, state.z + precision.root_transposed(move))
        new, diverged = guarded(new, state)
        return Transition(new, new.value.new_ones(new.value.shape), diverged)

    def independent(self, target: Target) -> bool:
        return self.h == 1 and target.conjugate

    def draw_all(
        self, target: Target, plan: tuple[Precision, Tensor], tuning: Tuning, noise: Noise
    ) -> Tensor | None:
        """At h = 1 a step forgets where it started: N(mean, Q^-1), as often as there are steps."""
        if not self.independent(target) or bool(tuning.log_step.any()):
            return None
        xi = noise.all_normal()
        if xi is None:
            return None
        clients, steps, chains, d = xi.shape
        centred = plan[0].root_transposed(xi.reshape(clients, steps * chains, d))
        return (target.posterior_mean.unsqueeze(1) + centred).reshape(xi.shape)
