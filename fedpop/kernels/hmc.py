"""Hamiltonian Monte Carlo, preconditioned, with a step drawn anew for each transition; and HMC that can also
leave a mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Few
from fedpop.kernels.base import Kernel, Noise, State, Transition, Tuning, metropolis
from fedpop.kernels.target import Precision, Target


@dataclass(frozen=True)
class HMC(Kernel):
    """Hamiltonian Monte Carlo: leapfrog steps with mass matrix Q, then accept or reject.

    Args:
        leapfrog: Steps of a transition (default: 5); each costs a gradient.

    Q is the curvature bound plus the prior's precision (a linear head), or a matrix that adapts to each
    client's draws, from the prior's precision on (any other head: dense up to 20 dimensions of z, diagonal
    above). Each client's largest step e adapts to an acceptance of 0.8 and stays below 0.6; the step of a
    transition is uniform on (e/3, e), because a fixed number of fixed steps can be half a period of the
    directions that the data say nothing about: z would swing from one side to the other while norm(z)^2
    hardly moves.

    >>> HMC(leapfrog=3).gradients_per_step
    3
    """

    leapfrog: Few = 5
    name: ClassVar[str] = "HMC"
    adjusted: ClassVar[bool] = True
    adapts_mass: ClassVar[bool] = True
    initial_log_step: ClassVar[float] = math.log(0.5)
    largest_log_step: ClassVar[float] = math.log(0.6)
    target_acceptance: ClassVar[float] = 0.8

    @property
    def gradients_per_step(self) -> int:
        return self.leapfrog

    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> tuple[Precision, Tensor]:
        return self.preconditioner(target, tuning), tuning.log_step.exp()

    def step(
        self,
        target: Target,
        plan: tuple[Precision, Tensor],
        state: State,
        noise: Noise,
        m: int,
    ) -> Transition:
        precision, largest = plan
        # Momentum in whitened coordinates, r = L^-1 p ~ N(0, I).
        r, uniform = noise.normal(m), noise.uniform(m, 2)
        e = largest[:, None] * (1 + 2 * uniform[..., 0]) / 3
        e = e.unsqueeze(-1)
        start = state.value - 0.5 * r.square().sum(-1)
        z, r = state.z, r + 0.5 * e * precision.root(state.grad)
        for _ in range(self.leapfrog - 1):
            z = z + e * precision.root_transposed(r)
            r = r + e * precision.root(target.grad(z))
        new = State.at(target, z + e * precision.root_transposed(r))
        r = r + 0.5 * e * precision.root(new.grad)
        change = new.value - 0.5 * r.square().sum(-1) - start
        return metropolis(new, state, change, uniform[..., 1])


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
