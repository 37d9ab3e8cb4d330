"""Ascent steps on one flat vector, with explicit state, and how their rates change over the rounds.

A run is made of stages: one, unless it is extended or runs until it has converged. What is defined by the
number of rounds (a decay, the tail that is averaged) is defined by those of the present stage, and starts
anew with the next one; what goes by the round alone (``Constant``, ``Polynomial``) goes on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedpop.checked import Factor, NotNegative, Positive, Whole
from fedpop.errors import EstimateError, SettingsError
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.settings import Setting


class Stage(NamedTuple):
    """Rounds k = start, ..., end - 1 of a run.

    >>> Stage(100, 300).share(150)
    0.25
    """

    start: int
    end: int

    @classmethod
    def of(cls, rounds: Rounds) -> Stage:
        """A number of rounds is a run of one stage."""
        return cls(0, rounds) if isinstance(rounds, int) else rounds

    def share(self, k: int) -> float:
        """How much of the stage is over before round k."""
        return min(max(k - self.start, 0) / max(self.end - self.start, 1), 1.0)


Rounds = int | Stage


class Schedule(Setting, ABC):
    """A factor as a function of the round k = 0, ..., K-1."""

    @abstractmethod
    def factor(self, k: int, rounds: Rounds) -> float: ...


@dataclass(frozen=True)
class Constant(Schedule):
    """No change.

    >>> Constant().factor(70, rounds=100)
    1.0
    """

    def factor(self, k: int, rounds: Rounds) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial(Schedule):
    """(1 + k)^-power, the paper's decreasing steps.

    Args:
        power: 0 or more, 0.6 by default; above 0.5 and up to 1 stochastic approximation converges.

    >>> Polynomial(power=0.5).factor(3, rounds=100)
    0.5
    """

    power: NotNegative = 0.6

    def factor(self, k: int, rounds: Rounds) -> float:
        return float((1 + k) ** -self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """A factor that falls from 1 along half a cosine, after a linear rise where one is asked for.

    Args:
        end: The factor at the end of the run (of each stage, where it is extended); 0 by default.
        warm_up: How many of the first rounds the factor rises in; 0 by default. A few help Adam on a
            deep network, whose first steps are all of full size.

    >>> Cosine().factor(0, rounds=100), round(Cosine().factor(50, rounds=100), 6)
    (1.0, 0.5)
    >>> [round(Cosine(warm_up=10).factor(k, rounds=10**6), 3) for k in (0, 4, 9, 10)]
    [0.1, 0.5, 1.0, 1.0]
    """

    end: NotNegative = 0.0
    warm_up: Whole = 0

    def factor(self, k: int, rounds: Rounds) -> float:
        wave = 0.5 * (1 + math.cos(math.pi * Stage.of(rounds).share(k)))
        return (self.end + (1 - self.end) * wave) * min(1.0, (k + 1) / max(self.warm_up, 1))


@dataclass(frozen=True)
class Decay(Schedule):
    """A factor that is 1 for a share of the rounds and then falls linearly.

    Args:
        constant: The share of the rounds (of each stage, where a run is extended) in which it is 1, in
            [0, 1); 0.5 by default.
        end: The factor at the end; 0 by default.

    >>> [Decay(constant=0.5).factor(k, rounds=100) for k in (0, 50, 75)]
    [1.0, 1.0, 0.5]
    >>> [Decay(constant=0.5).factor(k, Stage(100, 200)) for k in (100, 150, 175)]  # a run of 100, extended
    [1.0, 1.0, 0.5]
    """

    constant: Factor = 0.5
    end: NotNegative = 0.0

    def factor(self, k: int, rounds: Rounds) -> float:
        first, last = Stage.of(rounds)
        start = self.constant * (last - first)
        if k - first < start:
            return 1.0
        return self.end + (1 - self.end) * max(0.0, 1 - (k - first - start) / max(last - first - start, 1))


OptimiserState = dict[str, Tensor]


class Optimiser(Setting, ABC):
    """One rule ``x, gradient -> x``; the gradient is that of the whole objective (a sum)."""

    schedule: Schedule
    averages: ClassVar[bool] = False
    """Its gradient is the clients' mean move rather than a sum of gradients."""

    def for_weights(self, count: int, examples: float = math.inf) -> Optimiser:
        """This rule where the first ``count`` coordinates are weights, which so many examples are there for;
        those after them are a likelihood's own parameters, which no weight decay should touch."""
        return self

    @abstractmethod
    def init(self, x: Tensor) -> OptimiserState: ...

    @abstractmethod
    def step(
        self, x: Tensor, grad: Tensor, state: OptimiserState, unit: Tensor, k: int, rounds: Rounds
    ) -> tuple[Tensor, OptimiserState]:
        """The next x; ``unit`` is the natural size of a change of each coordinate."""


@dataclass(frozen=True)
class SGD(Optimiser):
    """x += rate * gradient: plain stochastic approximation, as in Algorithm 1.

    Args:
        rate: The step size eta_0, in x's own units; None has it found by trial rounds before the first
            one.
        schedule: What it is multiplied by over the rounds; ``Constant()`` by default, the paper's is
            ``Polynomial(0.6)``.

    >>> import torch
    >>> x, _ = SGD(0.5).step(torch.zeros(2), torch.tensor([1.0, -2.0]), {}, torch.ones(2), 0, 10)
    >>> x
    tensor([ 0.5000, -1.0000])
    """

    rate: Positive | None
    schedule: Schedule = field(default_factory=Constant)

    def init(self, x: Tensor) -> OptimiserState:
        return {}

    def step(
        self, x: Tensor, grad: Tensor, state: OptimiserState, unit: Tensor, k: int, rounds: Rounds
    ) -> tuple[Tensor, OptimiserState]:
        if self.rate is None:
            raise SettingsError("this step has no rate yet; it is found by trial rounds in fit()")
        return x + self.rate * self.schedule.factor(k, rounds) * grad, state


@dataclass(frozen=True)
class Adam(Optimiser):
    """Adam in relative units: a step changes a coordinate by a share of its natural size.

    Args:
        rate: That share, about; 0.1 by default. Smaller for deep networks, whose default in FedSOUL is
            0.03.
        schedule: What the rate is multiplied by over the rounds; ``Decay()`` by default: constant for
            half of them, then linear to zero.
        beta1: How much of the mean of gradients is kept in a step, in [0, 1); 0.9 by default.
        beta2: How much of the mean of their squares is kept in a step, in [0, 1); 0.99 by default.

    >>> import torch
    >>> step, x, unit = Adam(rate=0.1), torch.zeros(2), torch.tensor([1.0, 50.0])
    >>> step.step(x, torch.tensor([3.0, -0.01]), step.init(x), unit, 0, 10)[0]
    tensor([ 0.1000, -5.0000])
    """

    rate: Positive = 0.1
    schedule: Schedule = field(default_factory=Decay)
    beta1: Factor = 0.9
    beta2: Factor = 0.99

    def init(self, x: Tensor) -> OptimiserState:
        zero = torch.zeros_like(x)
        return {"first": zero, "second": zero.clone(), "count": x.new_zeros(())}

    def step(
        self, x: Tensor, grad: Tensor, state: OptimiserState, unit: Tensor, k: int, rounds: Rounds
    ) -> tuple[Tensor, OptimiserState]:
        return self.moved(x, grad, state, unit, self.rate * self.schedule.factor(k, rounds))

    def moved(
        self, x: Tensor, grad: Tensor, state: OptimiserState, unit: Tensor, rate: float
    ) -> tuple[Tensor, OptimiserState]:
        """A step at this rate."""
        count = state["count"] + 1
        steps = float(count)
        first = torch.lerp(state["first"], grad, 1 - self.beta1)
        second = torch.addcmul(self.beta2 * state["second"], grad, grad, value=1 - self.beta2)
        # Coordinates that never had a gradient stay where they are.
        move = first / second.sqrt().clamp(min=torch.finfo(x.dtype).tiny)
        unbiased = math.sqrt(1 - self.beta2**steps) / (1 - self.beta1**steps)
        new = torch.addcmul(x, unit, move, value=rate * unbiased)
        return new, {"first": first, "second": second, "count": count}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay beside it: x shrinks in every step, whatever the gradient is.

    Args:
        rate: How far a step goes, as a share of a coordinate's natural size; 0.1 by default.
        schedule: What the rate, and the decay with it, is multiplied by over the rounds; ``Decay()``
            by default: constant for half of them, then linear to zero.
        beta1: How much of the mean of gradients is kept in a step, in [0, 1); 0.9 by default.
        beta2: How much of the mean of their squares is kept in a step, in [0, 1); 0.99 by default.
        decay: A step shrinks x by ``rate * decay`` of itself, which must be below 1; 0.01 by default.
            Raise it where a network learns its training examples by heart.
        weights: How many of the first coordinates decay; None (the default) is all of them. Methods set
            it themselves, so that a likelihood's own parameters do not.

    >>> import torch
    >>> step, x = AdamW(rate=0.1, decay=0.5), torch.tensor([2.0])
    >>> step.step(x, torch.zeros(1), step.init(x), torch.ones(1), 0, 10)[0]
    tensor([1.9000])
    """

    decay: float = 0.01
    weights: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rate * self.decay < 1:
            raise SettingsError(
                f"a step shrinks x by rate * decay, which lies in [0, 1), not {self.rate * self.decay:g}"
            )

    def for_weights(self, count: int, examples: float = math.inf) -> Optimiser:
        return replace(self, weights=count)

    def step(
        self, x: Tensor, grad: Tensor, state: OptimiserState, unit: Tensor, k: int, rounds: Rounds
    ) -> tuple[Tensor, OptimiserState]:
        kept = torch.ones_like(x)
        kept[: self.weights] -= self.rate * self.schedule.factor(k, rounds) * self.decay
        return super().step(kept * x, grad, state, unit, k, rounds)


@dataclass(frozen=True)
class NetworkAdam(Adam):
    """Adam for a network's weights, which decay as under a prior that is worth some examples.

    What ``FedSOUL`` takes for networks. phi is one estimate for all: with few examples in all it would learn
    them by heart (``docs/defaults.md``), so that ``AdamW``'s decay is ``worth`` over their number, at most
    one, where weights outnumber them. A small network is judged by its likelihood and maximises it.

    Args:
        rate: How far a step goes, as a share of a coordinate's natural size; 0.03 by default.
        schedule: What the rate, and the decay with it, is multiplied by over the rounds;
            ``Cosine(warm_up=10)`` by default. Adam's first steps move all weights of a layer by the same
            size and, where one cause makes their signs agree, all in one direction, which multiplies over
            layers: so the first round moves them by a tenth of that, and the next nine by as much more.
        beta1: How much of the mean of gradients is kept in a step, in [0, 1); 0.9 by default.
        beta2: How much of the mean of their squares is kept in a step, in [0, 1); 0.99 by default.
        worth: Of how many examples the prior is worth; 100 by default, and 0 is none.
        least: Networks with so many weights or fewer have no decay; 500 by default.

    >>> step = NetworkAdam()
    >>> step.for_weights(2000, examples=1000).decay, step.for_weights(400, examples=10).decay
    (0.1, 0.0)
    """

    rate: Positive = 0.03
    schedule: Schedule = field(default_factory=lambda: Cosine(warm_up=10))
    worth: NotNegative = 100
    least: Whole = 500

    def for_weights(self, count: int, examples: float = math.inf) -> Optimiser:
        many = count > max(examples, self.least)
        decay = min(self.worth / max(examples, 1), 1.0) if many else 0.0
        return AdamW(self.rate, self.schedule, self.beta1, self.beta2, decay, count)


@dataclass(frozen=True)
class MeanMove(Optimiser):
    """FedAvg's step, x += rate * the clients' mean move, weighted by examples.

    It is for methods whose clients step on their own copies, as with ``PhiStep(MeanMove(), local=...)``.

    Args:
        rate: How much of the mean move is made, 1 by default.
        schedule: What the rate is multiplied by over the rounds; ``Constant()`` by default.
        momentum: How much of the last round's step is carried into this one's, in [0, 1); 0 by default.

    >>> MeanMove(momentum=0.9)
    MeanMove(rate=1.0, schedule=Constant(), momentum=0.9)
    """

    rate: Positive = 1.0
    schedule: Schedule = field(default_factory=Constant)
    momentum: Factor = 0.0
    averages: ClassVar[bool] = True

    def init(self, x: Tensor) -> OptimiserState:
        return {"velocity": torch.zeros_like(x)} if self.momentum else {}

    def step(
        self, x: Tensor, grad: Tensor, state: OptimiserState, unit: Tensor, k: int, rounds: Rounds
    ) -> tuple[Tensor, OptimiserState]:
        if self.momentum:
            grad = self.momentum * state["velocity"] + grad
            state = {"velocity": grad}
        return x + self.rate * self.schedule.factor(k, rounds) * grad, state


def natural_units(model: Model, phi: Tensor) -> Tensor:
    """The natural size of a change of each coordinate of phi: its tensor's root mean square."""
    overall = float(phi.square().mean().sqrt()) if phi.numel() else 1.0
    unit = torch.ones_like(phi)
    for name, span in model.phi_layout.spans().items():
        size = float(phi[span].square().mean().sqrt())
        # log-variances live on a scale of one; a tensor of zeros says nothing of its own scale.
        known = 1.0 if name.startswith("likelihood.") else model.phi_layout.unit(name)
        unit[span] = known or size or overall or 1.0
    return unit


def redrawn(model: Model, phi: Tensor, key: Key) -> Tensor:
    """Another random start: every tensor drawn anew with its own mean and standard deviation."""
    noise = key.normal(key.server(phi.device), (phi.numel(),), phi.dtype)[0]
    out = phi.clone()
    for span in model.phi_layout.spans().values():
        part = phi[span]
        if part.numel() > 1:
            out[span] = part.mean() + part.std() * noise[span]
    return out


RATE_TRIAL_ROUNDS = 20


def largest_rate(path_of: Callable[[float], list[float]], exact: bool) -> float:
    """The largest power of ten of whose trial rounds none lowers the likelihood, by more than a hundredth of
    what was gained or (where it is not ``exact``) by more than it fluctuates.

    Where steps of a few clients are so noisy that every rate lowers it now and then, an exact likelihood may
    fluctuate too, as long as something was gained. ``path_of(rate)`` gives the likelihood at the start and
    after each trial round.
    """
    paths = {}
    for exponent in range(1, -13, -1):
        paths[exponent] = path_of(10.0**exponent)
        if rises(paths[exponent], 0.0 if exact else fluctuation(paths[exponent])):
            return 10.0**exponent
    for exponent, path in paths.items():
        if path[-1] > path[0] and rises(path, fluctuation(path)):
            return 10.0**exponent
    raise EstimateError(
        "no step size from 10 down to 1e-12 kept the likelihood from falling over "
        f"{RATE_TRIAL_ROUNDS} trial rounds; give a rate, or more local_steps, which make steps less noisy"
    )


def fluctuation(path: list[float]) -> float:
    """Four times the median move of a round."""
    moves = sorted(abs(new - old) for old, new in pairwise(path))
    return 4 * moves[len(moves) // 2]


def rises(path: list[float], noise: float) -> bool:
    """Nothing is lost, in the end or in a round, but for so much noise and a hundredth of what is gained."""
    gained = path[-1] - path[0]
    tolerance = max(0.01 * gained, noise)
    return gained >= -noise and all(new >= old - tolerance for old, new in pairwise(path))
