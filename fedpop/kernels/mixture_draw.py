"""Exact draws where the posterior is a mixture of Gaussians: a component, then a Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.kernels.base import Kernel, Noise, State, Transition, Tuning, guarded
from fedpop.kernels.target import BlockPrecision, Target


class Posterior(NamedTuple):
    """Component by component: where the draws of each client end in (0, 1], means, and Q."""

    edges: Tensor
    means: list[Tensor]
    factors: list[BlockPrecision]


@dataclass(frozen=True)
class MixtureDraw(Kernel):
    """Component k with probability w_k p(D | k) / p(D), then z ~ N(m_k, Q_k^-1): an independent draw.

    For a Normal likelihood, a linear head and a prior made of Normals; with one of them it is the
    exponential step with h = 1.

    >>> from torch import nn
    >>> import fedpop as fp
    >>> model = fp.Composition(nn.Linear(4, 2), nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    >>> fp.FedSOUL(model, prior="mixture").kernel
    MixtureDraw()
    """

    name: ClassVar[str] = "MixtureDraw"
    adjusted: ClassVar[bool] = False

    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> Posterior:
        if not target.closed_form:
            raise SettingsError(
                "MixtureDraw needs a normal likelihood, a linear head and a prior made of Normals; use HMC()"
            )
        log_weight = target.component_evidence()
        # A client whose likelihood overflows has no weights: any component will do, it is left out anyway.
        log_weight = torch.where(torch.isfinite(log_weight), log_weight, torch.zeros_like(log_weight))
        means = [part.moments()[0] for part in target.components]
        factors = [part.block_precision for part in target.components]
        return Posterior(log_weight.softmax(1).cumsum(1)[:, :-1], means, factors)

    def step(self, target: Target, plan: Posterior, state: State, noise: Noise, m: int) -> Transition:
        xi, uniform = noise.normal(m), noise.uniform(m, 1)
        chosen = (uniform > plan.edges.unsqueeze(1)).sum(-1, keepdim=True)
        z = torch.zeros_like(xi)
        for k, (mean, factor) in enumerate(zip(plan.means, plan.factors, strict=True)):
            z = torch.where(chosen == k, mean.unsqueeze(1) + factor.root_transposed(xi), z)
        new, diverged = guarded(State.at(target, z), state)
        return Transition(new, new.value.new_ones(new.value.shape), diverged)
