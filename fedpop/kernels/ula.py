"""Unadjusted Langevin: the kernel of FedSOUL in the paper (Algorithm 1, lines 11 to 14)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import NotNegative, Range
from fedpop.kernels.base import Kernel, Noise, State, Transition, Tuning, guarded
from fedpop.kernels.target import Target

STABLE = Range(above=0, below=2, why="in units of 1/L steps of 2 and more grow without bound")


@dataclass(frozen=True)
class ULA(Kernel):
    """z <- z + gamma grad log p(z | D, theta) + sqrt(2 gamma) xi.

    gamma_i = c_k / L_i with L_i the largest curvature of client i's log-posterior at theta_k, and
    c_k = step_size (1 + k)^-decay: one gamma for all clients is not usable, and the paper's
    supplement allows one for each. On a Gaussian posterior with precision Q its stationary covariance
    is Q^-1 (I - gamma Q / 2)^-1.

    Args:
        step_size: c_0, in units of 1/L_i, between 0 and 2 (default: 0.8). Smaller steps have less bias and
            mix more slowly.
        decay: How fast steps fall over rounds, 0 or more (default: 0, for steps that stay as they are).

    >>> ULA(step_size=0.5, decay=0.3)
    ULA(step_size=0.5, decay=0.3)
    """

    step_size: Annotated[float, STABLE] = 0.8
    decay: NotNegative = 0.0
    name: ClassVar[str] = "ULA"
    adjusted: ClassVar[bool] = False

    def preparation(self, target: Target) -> int:
        return target.curvature_evaluations

    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> Tensor:
        c = self.step_size * (1 + round) ** -self.decay
        gamma = c * tuning.log_step.exp() / target.largest_curvature(z)
        out: Tensor = gamma[:, None, None]
        return out

    def step(self, target: Target, plan: Tensor, state: State, noise: Noise, m: int) -> Transition:
        gamma = plan
        xi = noise.normal(m)
        moved = state.z + gamma * state.grad + torch.sqrt(2 * gamma) * xi
        new, diverged = guarded(State.at(target, moved), state)
        return Transition(new, torch.ones_like(state.value), diverged)
