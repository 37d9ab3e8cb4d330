"""Stochastic-gradient Langevin dynamics (Welling and Teh, 2011) on each client's mini-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, NotNegative, Positive
from fedpop.errors import SettingsError
from fedpop.kernels.base import Kernel, Noise, State, Transition, Tuning, guarded
from fedpop.kernels.target import Target


@dataclass(frozen=True)
class SGLD(Kernel):
    """z <- z + gamma g + sqrt(2 gamma) xi, g the log-posterior's gradient estimated on a few examples.

    The likelihood's part of g is n_i/|B_i| times that of a fresh uniform subset B_i (all examples of a
    client that has no more than ``batch``; chains of one client share it), the prior's part is exact. In
    round k

        gamma_i = step_size |B_i| / (n_i L_i) (offset + k)^-decay,

    with L_i the largest curvature of client i's log-posterior: a pass over the data moves as far as one
    step of ULA would, and clients of all sizes have about the same bias. At a fixed step that bias is of
    order gamma: on a Gaussian posterior with precision Q the mean is exact, and the covariance S solves
    Q S + S Q - gamma Q S Q = 2 I + gamma V, V the covariance of g given z, which is of order n_i Q / |B_i|.
    It vanishes as the step decreases; averages over rounds converge fastest, as k^-1/3, with decay = 1/3
    (Teh, Thiery and Vollmer, 2016). The draws that users see come from an adjusted kernel.

    Args:
        batch: How many of a client's examples a step uses (default: 32).
        step_size: In units of 1/L_i; ``step_size * offset^-decay`` lies between 0 and 2 (default: 0.5).
        offset: Rounds by which the fall of steps is put off, above 0 (default: 1).
        decay: How fast steps fall over rounds, 0 or more (default: 1/3); 0 for steps that stay as they are.

    >>> SGLD(batch=16).gradients_per_step
    1
    """

    batch: Count = 32
    step_size: Positive = 0.5
    offset: Positive = 1.0
    decay: NotNegative = 1 / 3
    name: ClassVar[str] = "SGLD"
    adjusted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.step_size * self.offset**-self.decay
        if not 0 < first < 2:
            raise SettingsError(
                f"SGLD is stable for 0 < step_size * offset^-decay < 2 (in units of 1/L), not {first:g}"
            )

    @property
    def batch_size(self) -> int:
        return self.batch

    def preparation(self, target: Target) -> int:
        return target.curvature_evaluations

    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> tuple[Tensor, Tensor]:
        n = target.likelihood.sizes
        factor = (n / n.clamp(min=1, max=self.batch)).clamp(min=1).to(z.dtype)
        c = self.step_size * (self.offset + round) ** -self.decay
        gamma = c * tuning.log_step.exp() / (factor * target.largest_curvature(z))
        return gamma[:, None, None], factor.unsqueeze(1)

    def step(
        self,
        target: Target,
        plan: tuple[Tensor, Tensor],
        state: State,
        noise: Noise,
        m: int,
    ) -> Transition:
        gamma, factor = plan
        moved = state.z + gamma * state.grad + torch.sqrt(2 * gamma) * noise.normal(m)
        # The next batch does not know where the chain is: its gradient there is unbiased.
        part = target.likelihood.subset(self.batch, partial(noise.per_row, m))
        new = State.at(replace(target, likelihood=part), moved)
        new, diverged = guarded(new, state, factor)
        return Transition(new, torch.ones_like(state.value), diverged)
