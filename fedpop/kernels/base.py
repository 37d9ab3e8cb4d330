"""What a Markov kernel is, and the one loop that runs any of them on a cohort.

A kernel is a frozen dataclass of settings. ``prepare`` is called once per round, with theta fixed, and
does what is expensive (a factorisation, say); ``step`` makes one transition of all chains. A chain's
``State`` carries the log-posterior and its gradient, so that a transition pays only for new points.
What adapts (a step size per client) lives in ``Tuning`` and is saved with the chains.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedpop.kernels.target import Target
from fedpop.runtime.random import Key


@dataclass(frozen=True)
class State:
    """Chains at z ``[C, K, d]`` with log-posterior ``[C, K]`` and gradient ``[C, K, d]``."""

    z: Tensor
    value: Tensor
    grad: Tensor

    @classmethod
    def at(cls, target: Target, z: Tensor) -> State:
        return cls(z, *target.value_and_grad(z))

    def where(self, keep: Tensor, other: State) -> State:
        """This state where ``keep`` ``[C, K]`` holds, the other one elsewhere."""
        wide = keep.unsqueeze(-1)
        return State(
            torch.where(wide, self.z, other.z),
            torch.where(keep, self.value, other.value),
            torch.where(wide, self.grad, other.grad),
        )


@dataclass(frozen=True)
class Tuning:
    """What adapts per client: the logarithm of its step, and how often it was adapted."""

    log_step: Tensor
    updates: Tensor

    @classmethod
    def fresh(cls, clients: int, log_step: float, like: Tensor) -> Tuning:
        return cls(like.new_full((clients,), log_step), like.new_zeros((clients,)))

    def where(self, keep: Tensor, other: Tuning) -> Tuning:
        """This tuning for the clients where ``keep`` ``[C]`` holds, the other one elsewhere."""
        return Tuning(
            torch.where(keep, self.log_step, other.log_step), torch.where(keep, self.updates, other.updates)
        )


@dataclass(frozen=True)
class Transition:
    """One transition's outcome: the new state, acceptance probability and divergence, ``[C, K]``."""

    state: State
    acceptance: Tensor
    diverged: Tensor


@dataclass(frozen=True)
class Trace:
    """M draws of every chain, ``[C, M, K, d]``, with the log-posterior's gradient at each."""

    draws: Tensor
    grads: Tensor
    state: State
    tuning: Tuning
    acceptance: Tensor
    diverged: Tensor
    gradient_evaluations: int
    """Per client and chain."""


class Noise:
    """The random numbers of a pass: keyed per client and transition, fetched in chunks."""

    CHUNK = 2**20

    def __init__(self, key: Key, ids: Tensor, z: Tensor, steps: int) -> None:
        self._key, self._ids, self._dtype, self._steps = key, ids, z.dtype, steps
        self._shape = tuple(z.shape[1:])
        self._chunk = max(1, min(steps, self.CHUNK // max(z.numel(), 1)))
        self._held: dict[str, tuple[int, Tensor]] = {}

    def normal(self, m: int) -> Tensor:
        """Standard normal numbers for transition m, in the shape of z."""
        return self._fetch("noise", m, self._shape, self._key.at(purpose="noise").normal)

    def uniform(self, m: int, count: int) -> Tensor:
        """``count`` uniform numbers per chain for transition m, ``[C, K, count]``."""
        shape = (self._shape[0], count)
        return self._fetch("accept", m, shape, self._key.at(purpose="accept").uniform)

    def _fetch(self, name: str, m: int, shape: tuple[int, ...], draw: Callable[..., Tensor]) -> Tensor:
        start, held = self._held.get(name, (-1, None))
        if held is None or not start <= m < start + held.shape[1]:
            start = m - m % self._chunk
            steps = min(self._chunk, self._steps - start)
            held = draw(self._ids, shape, self._dtype, start, steps)
            self._held[name] = (start, held)
        return held[:, m - start]


class Kernel(ABC):
    """A Markov kernel on z, vectorised over clients and chains."""

    name: ClassVar[str]
    adjusted: ClassVar[bool]
    """Accept/reject makes the target its exact stationary law."""

    initial_log_step: ClassVar[float] = 0.0
    target_acceptance: ClassVar[float | None] = None
    largest_log_step: ClassVar[float] = 0.0

    @property
    def gradients_per_step(self) -> int:
        return 1

    @abstractmethod
    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> Any:
        """What is computed once for a fixed theta."""

    @abstractmethod
    def step(self, target: Target, plan: Any, state: State, noise: Noise, m: int) -> Transition:
        """One transition of every chain."""

    def adapt(self, tuning: Tuning, acceptance: Tensor, diverged: Tensor) -> Tuning:
        """The next tuning from a pass's mean acceptance ``[C]`` and divergences ``[C]``."""
        log_step = tuning.log_step
        if self.target_acceptance is not None:
            gain = (tuning.updates + 1).pow(-0.5).clamp(min=0.1)
            log_step = log_step + gain * (acceptance - self.target_acceptance)
        # A chain that diverged takes half the step from now on.
        log_step = torch.where(diverged > 0, tuning.log_step - math.log(2), log_step)
        return Tuning(log_step.clamp(max=self.largest_log_step), tuning.updates + 1)


def guarded(new: State, old: State) -> tuple[State, Tensor]:
    """Unadjusted kernels: where a step left the region of finite or plausible density, stay."""
    plausible = new.value > old.value - 1e3 - 10 * new.z.shape[-1]
    good = plausible & torch.isfinite(new.value) & torch.isfinite(new.grad).all(-1)
    started = torch.isfinite(old.value)
    keep = good | (~started & torch.isfinite(new.value))
    return new.where(keep, old), ~keep


def run(
    kernel: Kernel,
    target: Target,
    z: Tensor,
    tuning: Tuning,
    steps: int,
    key: Key,
    ids: Tensor,
    *,
    adapt: bool,
) -> Trace:
    """``steps`` transitions of every chain from z ``[C, K, d]``, theta fixed."""
    state = State.at(target, z)
    lost = ~(torch.isfinite(state.value) & torch.isfinite(state.grad).all(-1))
    if bool(lost.any()):
        # theta moved and left the chain where there is no density: no step could bring it back.
        mean = target.prior.mu(target.beta).expand_as(z)
        state = State.at(target, mean).where(lost, state)
    plan = kernel.prepare(target, state.z, tuning, key.round)
    noise = Noise(key, ids, z, steps)
    draws, grads = [], []
    acceptance = torch.zeros_like(state.value)
    diverged = torch.zeros_like(state.value)
    for m in range(steps):
        out = kernel.step(target, plan, state, noise, m)
        state = out.state
        draws.append(state.z)
        grads.append(state.grad)
        acceptance = acceptance + out.acceptance / steps
        diverged = diverged + out.diverged
    accepted, events = acceptance.mean(1), diverged.sum(1)
    return Trace(
        draws=torch.stack(draws, 1),
        grads=torch.stack(grads, 1),
        state=state,
        tuning=kernel.adapt(tuning, accepted, events) if adapt else tuning,
        acceptance=accepted,
        diverged=events,
        gradient_evaluations=1 + steps * kernel.gradients_per_step,
    )
