"""Exact draws where the posterior is a mixture of Gaussians: a component, then a Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.kernels.base import Kernel, Noise, State, Transition, Tuning, guarded
from fedpop.kernels.target import BlockPrecision, Target


class MixturePosterior(NamedTuple):
    """Component by component: where the draws of each client end in (0, 1], means, and Q."""

    edges: Tensor
    means: list[Tensor]
    factors: list[BlockPrecision]


@dataclass(frozen=True)
class MixtureDraw(Kernel):
    """Component k with probability w_k p(D | k) / p(D), then z ~ N(m_k, Q_k^-1): an independent draw.

    For a Normal likelihood, a linear head and a prior made of Normals; with one of them it is the
    exponential step with h = 1.

    >>> MixtureDraw().gradients_per_step
    1
    """

    name: ClassVar[str] = "MixtureDraw"
    adjusted: ClassVar[bool] = False

    def check(self, closed_form: bool) -> None:
        if not closed_form:
            raise SettingsError(
                "MixtureDraw needs a normal likelihood, a linear head and a prior made of Normals; use HMC()"
            )

    def independent(self, target: Target) -> bool:
        return True

    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> MixturePosterior:
        self.check(target.closed_form)
        log_weight = target.component_evidence()
        # A client whose likelihood overflows has no weights: any component will do, it is left out anyway.
        log_weight = torch.where(torch.isfinite(log_weight), log_weight, torch.zeros_like(log_weight))
        means = [part.moments()[0] for part in target.components]
        factors = [part.block_precision for part in target.components]
        return MixturePosterior(log_weight.softmax(1).cumsum(1)[:, :-1], means, factors)

    def step(self, target: Target, plan: MixturePosterior, state: State, noise: Noise, m: int) -> Transition:
        new, diverged = guarded(
            State.at(target, self._draws(plan, noise.normal(m), noise.uniform(m, 1))), state
        )
        return Transition(new, new.value.new_ones(new.value.shape), diverged)

    def draw_all(self, target: Target, plan: MixturePosterior, tuning: Tuning, noise: Noise) -> Tensor | None:
        xi, uniform = noise.all_normal(), noise.all_uniform(1)
        if xi is None or uniform is None:
            return None
        clients, _, _, d = xi.shape
        flat = self._draws(plan, xi.reshape(clients, -1, d), uniform.reshape(clients, -1, 1))
        return flat.reshape(xi.shape)

    @staticmethod
    def _draws(plan: MixturePosterior, xi: Tensor, uniform: Tensor) -> Tensor:
        chosen = (uniform > plan.edges.unsqueeze(1)).sum(-1, keepdim=True)
        z = torch.zeros_like(xi)
        for k, (mean, factor) in enumerate(zip(plan.means, plan.factors, strict=True)):
            z = torch.where(chosen == k, mean.unsqueeze(1) + factor.root_transposed(xi), z)
        return z
