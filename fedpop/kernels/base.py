"""What a Markov kernel is, and the one loop that runs any of them on a cohort.

A kernel is a frozen dataclass of settings. ``prepare`` is called once per round, with theta fixed, and
does what is expensive (a factorisation, say); ``step`` makes one transition of all chains. A chain's
``State`` carries the log-posterior and its gradient, so that a transition pays only for new points.
What adapts (a step size per client, and a mass matrix where there is no curvature to go by) lives in
``Tuning`` and is saved with the chains.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedpop.kernels.mass import Mass
from fedpop.kernels.target import DensePrecision, Precision, Target
from fedpop.keys import Key
from fedpop.models.local import Evaluated, LinearLikelihood
from fedpop.settings import Setting

LEAST_GAIN = 0.1
"""How far the logarithm of a step goes in a pass, for each unit of acceptance that is amiss: one over the
root of the number of passes, but at least so much, since theta moves and the step has to follow."""
NARROWED = 2.0
"""A direction that turns out so many times narrower than it was taken to be is what had made steps short."""
DIVERGED_NATS, SLACK_NATS = 1000.0, 10.0
"""A log-density that falls by so much in a transition diverged; where nothing is rejected, by so much and ten
for each dimension of z. Of draws where they belong it differs by some sqrt(d)."""


@dataclass(frozen=True)
class State:
    """Chains at z ``[C, K, d]`` with log-posterior ``[C, K]`` and gradient ``[C, K, d]``."""

    z: Tensor
    value: Tensor
    grad: Tensor

    @classmethod
    def at(cls, target: Target, z: Tensor) -> State:
        return cls(z, *target.value_and_grad(z))

    def where(self, mask: Tensor, other: State) -> State:
        """This state where ``mask`` ``[C, K]`` holds, the other one elsewhere."""
        wide = mask.unsqueeze(-1)
        return State(
            torch.where(wide, self.z, other.z),
            torch.where(mask, self.value, other.value),
            torch.where(wide, self.grad, other.grad),
        )


@dataclass(frozen=True)
class Tuning:
    """What adapts per client: the logarithm of its step, how often it was adapted, perhaps a mass."""

    log_step: Tensor
    updates: Tensor
    mass: Mass | None = None

    NAMES: ClassVar[tuple[str, ...]] = (
        *("log_step", "updates", "mass_mean", "mass_variance", "mass_weight", "mass_covariance"),
    )
    """What ``to_local`` may give."""

    @classmethod
    def fresh(cls, clients: int, log_step: float, like: Tensor, dimension: int | None = None) -> Tuning:
        """Nothing learned yet; ``dimension`` is that of z where a mass is to be adapted."""
        mass = None if dimension is None else Mass.fresh(clients, dimension, like)
        return cls(like.new_full((clients,), log_step), like.new_zeros((clients,)), mass)

    def to_local(self) -> dict[str, Tensor]:
        """As named tensors, to be stored with a client's chains."""
        local = {"log_step": self.log_step, "updates": self.updates}
        if self.mass is not None:
            local |= {f"mass_{name}": getattr(self.mass, name) for name in _MASS}
            local |= {} if self.mass.covariance is None else {"mass_covariance": self.mass.covariance}
        return local

    @classmethod
    def from_local(cls, local: Mapping[str, Tensor]) -> Tuning:
        if "mass_mean" not in local:
            return cls(local["log_step"], local["updates"])
        mean, variance, weight = (local[f"mass_{name}"] for name in _MASS)
        mass = Mass(mean, variance, weight, local.get("mass_covariance"))
        return cls(local["log_step"], local["updates"], mass)

    def where(self, mask: Tensor, other: Tuning) -> Tuning:
        """This tuning for the clients where ``mask`` ``[C]`` holds, the other one elsewhere."""
        mine, theirs = self.to_local(), other.to_local()
        wide = {n: mask.reshape(-1, *(1,) * (v.dim() - 1)) for n, v in mine.items()}
        return Tuning.from_local({n: torch.where(wide[n], v, theirs[n]) for n, v in mine.items()})


_MASS = ("mean", "variance", "weight")


@dataclass(frozen=True)
class Transition:
    """One transition's outcome: the new state, acceptance probability and divergence, ``[C, K]``."""

    state: State
    acceptance: Tensor
    diverged: Tensor


@dataclass(frozen=True)
class Pass:
    """M draws of every chain, ``[C, M, K, d]``, with the log-posterior's gradient at each."""

    draws: Tensor
    grads: Tensor
    state: State
    tuning: Tuning
    acceptance: Tensor
    diverged: Tensor
    gradient_evaluations: int
    """Per client and chain."""
    batched: int = 0
    """How many of these used a mini-batch only."""
    likelihood_grads: Tensor | None = None
    """The likelihood's part of ``grads``, where it is known."""
    evaluated: Evaluated | None = None
    """And what it was made of, of linear heads."""
    exact: bool = False
    """Independent draws, made at once: there is nothing to adapt."""
    mode: Tensor | None = None
    """Where the log-posterior is highest, ``[C, d]``, for chains that follow it."""
    white: Tensor | None = None
    """Where chains stand about it in its own width, ``[C, K, d]``, for rounds on batches."""


class Noise:
    """The random numbers of a pass: keyed per client and transition, fetched in chunks."""

    CHUNK = 2**20

    def __init__(self, key: Key, units: Tensor, z: Tensor, steps: int) -> None:
        self._key, self._units, self._dtype, self._steps = key, units, z.dtype, steps
        self._shape = tuple(z.shape[1:])
        self._chunk = max(1, min(steps, self.CHUNK // max(z.numel(), 1)))
        self._cached: dict[str, tuple[int, Tensor]] = {}
        self._like, self._nested = z, {}  # type: Tensor, dict[str, Noise]

    def at(self, purpose: str) -> Noise:
        """Other numbers for the same transitions."""
        if purpose not in self._nested:
            key = self._key.at(purpose=purpose)
            self._nested[purpose] = Noise(key, self._units, self._like, self._steps)
        return self._nested[purpose]

    def normal(self, m: int) -> Tensor:
        """Standard normal numbers for transition m, in the shape of z."""
        return self._fetch("noise", m, self._shape, self._key.at(purpose="noise").normal)[:, 0]

    def all_normal(self) -> Tensor | None:
        """Those of all transitions, ``[C, M, K, d]``; None where they are too many for memory."""
        if self._chunk < self._steps:
            return None
        return self._fetch("noise", 0, self._shape, self._key.at(purpose="noise").normal, self._steps)

    def all_uniform(self, count: int) -> Tensor | None:
        """``[C, M, K, count]``, likewise."""
        if self._chunk < self._steps:
            return None
        shape = (self._shape[0], count)
        return self._fetch("accept", 0, shape, self._key.at(purpose="accept").uniform, self._steps)

    def uniform(self, m: int, count: int) -> Tensor:
        """``count`` uniform numbers per chain for transition m, ``[C, K, count]``."""
        shape = (self._shape[0], count)
        return self._fetch("accept", m, shape, self._key.at(purpose="accept").uniform)[:, 0]

    def per_row(self, m: int, count: int) -> Tensor:
        """A uniform number for each of a client's examples in transition m, ``[C, count]``.

        An example's number does not depend on how many others there are, in its cohort's padding say.
        """
        return self._key.at(purpose=f"rows-{m}").uniform(self._units, (count,))

    def _fetch(
        self, name: str, m: int, shape: tuple[int, ...], draw: Callable[..., Tensor], count: int = 1
    ) -> Tensor:
        start, cached = self._cached.get(name, (-1, None))
        if cached is None or not start <= m < start + cached.shape[1]:
            start = m - m % self._chunk
            steps = min(self._chunk, self._steps - start)
            cached = draw(self._units, shape, self._dtype, start, steps)
            self._cached[name] = (start, cached)
        return cached[:, m - start : m - start + count]


class Kernel(Setting, ABC):
    """A Markov kernel on z, vectorised over clients and chains."""

    name: ClassVar[str]
    adjusted: ClassVar[bool]
    """Accept/reject makes the target its exact stationary law."""

    initial_log_step: ClassVar[float] = 0.0
    target_acceptance: ClassVar[float | None] = None
    largest_log_step: ClassVar[float] = 0.0
    adapts_mass: ClassVar[bool] = False
    """Learns a mass per client where the head has no curvature bound: dense for a small z, else diagonal."""

    @property
    def gradients_per_step(self) -> int:
        return 1

    @property
    def batch_size(self) -> int | None:
        """How many of a client's examples a step uses; None: all of them."""
        return None

    of_normals: ClassVar[bool] = False
    """It goes by the curvature of a Normal prior, or of several, alone."""

    def check(self, closed_form: bool) -> None:
        """Raise unless this kernel can sample posteriors that are, or are not, closed-form."""

    def independent(self, target: Target) -> bool:
        """Its draws from this posterior are exact and independent: there is nothing to burn in."""
        return False

    def preparation(self, target: Target) -> int:
        """Gradient evaluations (or products with a Hessian, which cost as much) that ``prepare`` makes."""
        return 0

    @abstractmethod
    def prepare(self, target: Target, z: Tensor, tuning: Tuning, round: int) -> Any:
        """What is computed once for a fixed theta."""

    @abstractmethod
    def step(self, target: Target, plan: Any, state: State, noise: Noise, m: int) -> Transition:
        """One transition of every chain."""

    def draw_all(self, target: Target, plan: Any, tuning: Tuning, noise: Noise) -> Tensor | None:
        """All M draws ``[C, M, K, d]`` at once, where they are independent; None where they are not."""
        return None

    def first_tuning(self, clients: int, like: Tensor, dimension: int | None = None) -> Tuning:
        """The tuning of clients never seen; ``dimension`` is that of z unless the head is linear."""
        return Tuning.fresh(clients, self.initial_log_step, like, dimension if self.adapts_mass else None)

    def preconditioner(self, target: Target, tuning: Tuning) -> Precision:
        """Q of a linear head; else what the client's own draws say, from the prior's precision on."""
        if tuning.mass is None:
            return target.precision()
        unit = target.prior.unit(target.beta)
        if tuning.mass.covariance is not None:
            return DensePrecision(tuning.mass.factor(unit, target.prior_correlation()))
        return target.precision(tuning.mass.sd(unit))

    def adapt(self, target: Target, done: Pass) -> Tuning:
        """The next tuning from what a pass did with the present one."""
        tuning = done.tuning
        log_step = tuning.log_step
        if done.exact:
            return replace(tuning, updates=tuning.updates + 1)
        if self.target_acceptance is not None:
            gain = (tuning.updates + 1).pow(-0.5).clamp(min=LEAST_GAIN)
            log_step = log_step + gain * (done.acceptance - self.target_acceptance)
        # A chain that diverged takes half the step from now on.
        log_step = torch.where(done.diverged > 0, tuning.log_step - math.log(2), log_step)
        mass = tuning.mass
        if mass is not None:
            prior = target.prior.unit(target.beta)
            draws, grads = done.draws.flatten(1, 2), done.grads.flatten(1, 2)
            before, mass = mass, mass.after(draws, grads, tuning.updates)
            # The step was short for the sake of a direction that turns out to be narrow: now that steps
            # are measured by its width, its own may stay as it was, and all others grow.
            narrowed = self._narrowed(target, prior, before, mass)
            log_step = torch.where(narrowed > NARROWED, log_step + narrowed.log(), log_step)
        return Tuning(log_step.clamp(max=self.largest_log_step), tuning.updates + 1, mass)

    @staticmethod
    def _narrowed(target: Target, prior: Tensor, before: Mass, after: Mass) -> Tensor:
        """By how much the width of that direction fell that was narrowed most, ``[C]``."""
        if after.covariance is None:
            return (before.sd(prior) / after.sd(prior)).amax(-1)
        correlation = target.prior_correlation()
        old, new = (mass.factor(prior, correlation).double() for mass in (before, after))
        out: Tensor = torch.linalg.matrix_norm(torch.linalg.solve_triangular(new, old, upper=False), 2)
        return out.to(prior.dtype)


def metropolis(new: State, old: State, change: Tensor, uniform: Tensor) -> Transition:
    """Accept or reject: ``change`` ``[C, K]`` is the log of the ratio of both ways' densities."""
    diverged = ~torch.isfinite(change) | (change < -DIVERGED_NATS)
    acceptance = torch.where(diverged, torch.zeros_like(change), change.clamp(max=0).exp())
    accepted = ~diverged & (uniform <= acceptance)
    return Transition(new.where(accepted, old), acceptance, diverged)


def guarded(new: State, old: State, slack: Tensor | float = 1.0) -> tuple[State, Tensor]:
    """Unadjusted kernels: where a step left the region of finite or plausible density, stay.

    ``slack`` widens what is plausible where values are estimates that were scaled up by so much.
    """
    plausible = new.value > old.value - slack * (DIVERGED_NATS + SLACK_NATS * new.z.shape[-1])
    good = plausible & torch.isfinite(new.value) & torch.isfinite(new.grad).all(-1)
    started = torch.isfinite(old.value)
    mask = good | (~started & torch.isfinite(new.value))
    return new.where(mask, old), ~mask


def run(
    kernel: Kernel,
    target: Target,
    z: Tensor,
    tuning: Tuning,
    steps: int,
    key: Key,
    units: Tensor,
    *,
    adapt: bool,
) -> Pass:
    """``steps`` transitions of every chain from z ``[C, K, d]``, theta fixed."""
    noise = Noise(key, units, z, steps)
    out = _at_once(kernel, target, z, tuning, noise, key.round) if kernel.independent(target) else None
    if out is None:
        out = _one_by_one(kernel, target, z, tuning, noise, steps, key.round)
    return replace(
        out,
        tuning=kernel.adapt(target, out) if adapt else tuning,
        gradient_evaluations=1 + kernel.preparation(target) + steps * kernel.gradients_per_step,
        batched=0 if kernel.batch_size is None else steps * kernel.gradients_per_step,
    )


def _at_once(
    kernel: Kernel, target: Target, z: Tensor, tuning: Tuning, noise: Noise, round: int
) -> Pass | None:
    """Independent draws need no loop, and no place to start from; where one of them has no density the loop
    sorts it out."""
    draws = kernel.draw_all(target, kernel.prepare(target, z, tuning, round), tuning, noise)
    if draws is None:
        return None
    clients, steps, chains, d = draws.shape
    flat, local, evaluated = draws.reshape(clients, steps * chains, d), target.likelihood, None
    if isinstance(local, LinearLikelihood) and local.short:
        evaluated = Evaluated(local, *local.value_and_slope(flat))
        likelihood, g = evaluated.value, local.grad_of(evaluated.slope).reshape(flat.shape)
    else:
        likelihood, g = local.value_and_grad(flat)
    prior, slope = target.prior.value_and_grad(target.beta, flat)
    value, grads = (likelihood + prior).reshape(clients, steps, chains), (g + slope).reshape(draws.shape)
    if not math.isfinite(float(value.sum() + grads.sum())):
        return None
    last = State(draws[:, -1], value[:, -1], grads[:, -1])
    none = value.new_zeros(clients)
    likelihood_grads = g.reshape(draws.shape)
    return Pass(
        draws, grads, last, tuning, torch.ones_like(none), none, 0, 0, likelihood_grads, evaluated, True
    )


def _one_by_one(
    kernel: Kernel, target: Target, z: Tensor, tuning: Tuning, noise: Noise, steps: int, round: int
) -> Pass:
    state = State.at(target, z)
    lost = ~(torch.isfinite(state.value) & torch.isfinite(state.grad).all(-1))
    if bool(lost.any()):
        # theta moved and left the chain where there is no density: no step could bring it back.
        mean = target.prior.mu(target.beta).expand_as(z)
        state = State.at(target, mean).where(lost, state)
    plan = kernel.prepare(target, state.z, tuning, round)
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
    return Pass(
        draws=torch.stack(draws, 1),
        grads=torch.stack(grads, 1),
        state=state,
        tuning=tuning,
        acceptance=acceptance.mean(1),
        diverged=diverged.sum(1),
        gradient_evaluations=0,
    )
