"""HMC that can also leave a mode: each transition first proposes a jump, then follows the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.kernels.base import Noise, State, Transition
from fedpop.kernels.hmc import HMC
from fedpop.kernels.target import Precision, Target


@dataclass(frozen=True)
class JumpHMC(HMC):
    """HMC for populations with clusters, whose posteriors may have several modes far apart.

    Trajectories cannot cross a region without density. So z' is first drawn from a law that covers the prior
    (the prior itself, or the Gaussian base of an energy) and accepted with probability
    min(1, p(z' | D) q(z) / (p(z | D) q(z'))): an independence step, exact for any such q. Jumps are accepted
    where the data say little, which is where more than one mode matters; in many dimensions they are
    rare.

    Args:
        leapfrog: Steps of a transition after its jump (default: 5); each costs a gradient, as the jump does.

    >>> JumpHMC().gradients_per_step
    6
    """

    name: ClassVar[str] = "JumpHMC"

    @property
    def gradients_per_step(self) -> int:
        return self.leapfrog + 1

    def step(
        self, target: Target, plan: tuple[Precision, Tensor], state: State, noise: Noise, m: int
    ) -> Transition:
        return super().step(target, plan, self.jump(target, state, noise.at("jump"), m), noise, m)

    @staticmethod
    def jump(target: Target, state: State, noise: Noise, m: int) -> State:
        prior, beta = target.prior, target.beta
        uniform = noise.uniform(m, 2)
        new = State.at(target, prior.cover(beta, noise.normal(m), uniform[..., 0]))
        ratio = new.value - state.value + prior.log_cover(beta, state.z) - prior.log_cover(beta, new.z)
        accepted = torch.isfinite(new.grad).all(-1) & (uniform[..., 1].log() <= ratio)
        return new.where(accepted, state)
