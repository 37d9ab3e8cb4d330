"""The step on beta: how the server moves the population prior, and in which form units send I."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from fedpop.checked import Count, Fraction, OneOf
from fedpop.decisions import Decision
from fedpop.errors import SettingsError
from fedpop.kernels.target import Hierarchy
from fedpop.message import Tensors
from fedpop.priors import Normal, Prior
from fedpop.server.optimisers import Adam, Constant, Optimiser, Rounds, Stage
from fedpop.settings import Setting

FORMS = ("auto", "left", "right", "mixed")


@dataclass(frozen=True)
class Turn:
    """The round in which beta moves."""

    k: int
    stage: Stage
    clients: int
    active: float
    """How many of them a round has on average."""
    curvature: float = 0.0
    """Of the likelihood in z, the mean over clients, where they were asked for it."""


@dataclass(frozen=True)
class EM(Setting):
    """Steps of stochastic-approximation EM on a prior of one or several Normals.

    Where a round has only some of the clients, the prior's mean would carry their chance, and keep it in
    directions of which data say little, where clients' own z follow the mean; the scale would grow by it. So
    with few the rate falls over the rounds from their share in ``few`` to that in all (in ``many``, if these
    are less). While a backbone learns it is the root of that share: features follow the mean, too, and
    its chance costs less than its lag.

    Args:
        rate: How much of EM's own step is made in the first half of the rounds, above 0 and at most 1; 1
            by default, which is EM itself.
        final: The rate falls to this from half of the rounds to the last one, and noise with it; above
            0, at most ``rate``, 0.1 by default.
        few: A first round with so many clients makes the whole step; 10 by default.
        many: Every round with so many clients does, or with all of them; 100 by default. 1 has every round
            make it.

    >>> step = EM(rate=1.0, final=0.1)
    >>> step.at(0, rounds=100), round(step.at(75, rounds=100), 2)
    (1.0, 0.55)
    >>> [round(step.share(3, 30, k), 2) for k in (0, 10, 100)], step.share(200, 10**6, 5)
    ([0.3, 0.15, 0.1], 1.0)
    """

    rate: Fraction = 1.0
    final: Fraction = 0.1
    few: Count = 10
    many: Count = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final > self.rate:
            raise SettingsError(f"EM rates satisfy 0 < final <= rate <= 1, not {self}")

    def at(self, k: int, rounds: Rounds) -> float:
        share = Stage.of(rounds).share(k)
        return self.rate if share < 0.5 else self.rate + (self.final - self.rate) * (2 * share - 1)

    def share(self, active: float, clients: int, k: int) -> float:
        """How much of that a round of so many clients takes."""
        last = min(1.0, active / min(clients, self.many))
        return max(last, min(1.0, active / self.few) * self.few / (self.few + k))

    def move(self, hierarchy: Hierarchy, beta: Tensor, score: Tensor, turn: Turn) -> Tensor:
        """beta after one step from the estimated mean of scores, hyperprior included."""
        share = self.share(turn.active, turn.clients, turn.k)
        if hierarchy.model.learns_features:
            share = math.sqrt(share)
        rate = share * self.at(turn.k, turn.stage)
        # Clients that are all alike leave a prior without width, and EM's step of mu with it: then
        # mu moves by gradient steps of one over the likelihood's mean curvature.
        floor = 1 / turn.curvature if turn.curvature > 0 else 0.0
        stiffness = hierarchy.hyperprior.stiffness(hierarchy.prior, beta, floor)
        rate /= max(1.0, stiffness * rate / turn.clients)
        return hierarchy.prior.em_step(beta, score, rate, floor)


@dataclass(frozen=True)
class EMAdam(Setting):
    """EM on the prior's mean, and Adam on the logarithm of its scale.

    What ``FedSOUL`` takes where posteriors are not closed-form and features stay as they are. EM's steps of a
    scale are as short as data say little of z, far too short for a handful of examples; and what a score of
    the scale is worth cannot be estimated from its variance over units far from the optimum. Adam's are at
    most its ``rate``, and shorter where scores of successive rounds disagree. While a backbone learns, EM's
    are better: heads on features that say nothing yet are best all alike, quick steps would soon make them
    so, and features would learn from one head instead of many.

    Args:
        em: The step of the mean; its rate over the rounds is that of the scale's steps, too. ``EM()`` by
            default.
        scale: The step of the scale, for an isotropic or diagonal covariance. At rate 0.15 by default, with
            short memories: no round changes the scale by more than a sixth, and scores from far away do not
            slow the last rounds down. A first round with fewer clients than ``em.few`` takes less of it, by
            the root of their share.

    >>> EMAdam(scale=Adam(0.05)).em
    EM(rate=1.0, final=0.1, few=10, many=100)
    """

    em: EM = field(default_factory=EM)
    scale: Adam = field(default_factory=lambda: Adam(0.15, Constant(), beta1=0.8, beta2=0.9))

    def init(self, prior: Prior, beta: Tensor) -> Tensors:
        return self.scale.init(_alone(prior).log_scale(beta))

    def move(
        self, hierarchy: Hierarchy, beta: Tensor, score: Tensor, state: Tensors, turn: Turn
    ) -> tuple[Tensor, Tensors]:
        normal, new = _alone(hierarchy.prior), self.em.move(hierarchy, beta, score, turn)
        old, grad = normal.log_scale(beta), normal.log_scale(score)
        rate = self.scale.rate * math.sqrt(min(1.0, turn.active / self.em.few))
        rate *= self.em.at(turn.k, turn.stage) * self.scale.schedule.factor(turn.k, turn.stage)
        scale, state = self.scale.moved(old, grad, state, torch.ones_like(old), rate)
        return torch.cat((new[: len(beta) - len(old)], scale if normal.learn_scale else old)), state


def _stands_alone(prior: Prior) -> bool:
    """Whether coordinates of beta are logarithms of the scale, each by itself."""
    return prior.component is prior and prior.covariance != "full"


def _alone(prior: Prior) -> Normal:
    if not _stands_alone(prior) or prior.component is None:
        raise SettingsError(
            "EMAdam moves the scale of one Normal with an isotropic or diagonal covariance; use EM()"
        )
    return prior.component


CLOSED_FORM_STEP, SAMPLED_STEP, STEP_WITHOUT_EM = EM(), EMAdam(), Adam(0.02)
"""What None stands for: where posteriors are closed-form or a backbone learns; elsewhere; and for priors that
EM cannot move."""


def _suited(hierarchy: Hierarchy) -> tuple[EM | EMAdam | Optimiser, str]:
    """What None stands for with this model and prior, and why."""
    prior = hierarchy.prior
    if not prior.em:
        return STEP_WITHOUT_EM, f"EM has no step for {prior.name} priors"
    if hierarchy.closed_form:
        return CLOSED_FORM_STEP, "posteriors are closed-form"
    if hierarchy.model.learns_features:
        return CLOSED_FORM_STEP, "features are learned, and heads are best all alike at first"
    if not _stands_alone(prior):
        return CLOSED_FORM_STEP, "the scale has no coordinates that stand alone"
    return SAMPLED_STEP, "posteriors are not closed-form, and features stay as they are"


@dataclass(frozen=True)
class BetaStep(Setting):
    """How beta, the population prior, moves.

    Args:
        step: ``EM()``, ``EMAdam()`` or an optimiser, which is what runs. None (the default) is Adam at rate
            0.02 for priors that EM cannot move, else ``EMAdam()`` where posteriors are not closed-form,
            no backbone learns, and the covariance is isotropic or diagonal, else ``EM()``.
        form: That of the score I which clients send (see ``fedpop.priors.normal``): "left" is the
            paper's, "right" has no noise for a client without data, "mixed" none where posteriors are
            Gaussian. The last two need a Normal prior, "mixed" a linear head too. "auto" (the default)
            is "mixed" for a Normal prior and a linear head, else "left"; under a full covariance z may have
            128 entries for that, at most.

    >>> BetaStep(EM(0.5, 0.1), form="left").form
    'left'
    """

    step: EM | EMAdam | Optimiser | None = None
    form: Annotated[str, OneOf(*FORMS)] = "auto"

    def on(self, hierarchy: Hierarchy) -> EM | EMAdam | Optimiser:
        """The step for this model and prior."""
        prior = hierarchy.prior
        if self.step is None:
            return _suited(hierarchy)[0]
        if isinstance(self.step, EM | EMAdam) and not prior.em:
            raise SettingsError(
                f"EM steps cannot be made for {prior.name} priors; use beta_step=fedpop.steps.Adam()"
            )
        if isinstance(self.step, EMAdam):
            _alone(prior)  # raises
        return self.step

    def decisions(self, hierarchy: Hierarchy) -> Sequence[Decision]:
        """The step on beta, where it was left open."""
        if self.step is not None:
            return ()
        step, why = _suited(hierarchy)
        return (Decision("step on the prior", type(step).__name__, why),)

    def wants_curvature(self, hierarchy: Hierarchy) -> bool:
        """EM's step of the mean vanishes with the scale: then it goes by the likelihood's curvature."""
        return not isinstance(self.on(hierarchy), Optimiser)

    def init(self, hierarchy: Hierarchy, beta: Tensor) -> Tensors:
        step = self.on(hierarchy)
        if isinstance(step, Optimiser):
            return step.init(beta)
        return {} if isinstance(step, EM) else step.init(hierarchy.prior, beta)

    def move(
        self, hierarchy: Hierarchy, beta: Tensor, score: Tensor, state: Tensors, turn: Turn
    ) -> tuple[Tensor, Tensors]:
        """beta after one step from the estimated sum of scores, hyperprior included."""
        step, prior = self.on(hierarchy), hierarchy.prior
        if isinstance(step, EM):
            return step.move(hierarchy, beta, score / turn.clients, turn), state
        if isinstance(step, EMAdam):
            return step.move(hierarchy, beta, score / turn.clients, state, turn)
        gradient, units = prior.gradient(beta, score), prior.units(beta)
        return step.step(beta, gradient, state, units, turn.k, turn.stage)
