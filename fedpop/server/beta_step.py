"""The step on beta: how the server moves the population prior, and in which form units send I."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fedpop.checked import OneOf
from fedpop.errors import SettingsError
from fedpop.kernels.hierarchy import Hierarchy
from fedpop.message import Tensors, Total
from fedpop.priors import Hyperprior, Prior
from fedpop.server.em import EM
from fedpop.server.optimisers import Adam, Optimiser
from fedpop.server.schedules import Constant, Rounds
from fedpop.settings import Setting

FORMS = ("auto", "left", "right", "mixed")
FEW, MANY = 10, 100
"""EM takes its full step where a round has all units, or ``MANY`` of them. Otherwise the prior's mean would
carry their chance, and keep it in directions of which data say little, where units' own z follow the mean;
the scale would grow by it. So with fewer the rate falls from their share in ``FEW`` to that in all."""
SCALE = Adam(0.15, Constant(), beta1=0.8, beta2=0.9)
"""Steps on the logarithm of the scale where posteriors are not closed-form and features stay as they are.
EM's are as short as data say little of z, far too short for a handful of examples; and what a score of the
scale is worth cannot be told from its variance over units far from the optimum. These are at most so long,
so that no round changes the scale by more than a sixth, and shorter where scores of successive rounds
disagree. The memory of squares is short: scores from far away would slow the last rounds down.

While a backbone learns, EM's stay: heads on features that say nothing yet are best all alike, these steps
would soon make them so, and features would learn from one head instead of many."""


@dataclass(frozen=True)
class BetaStep(Setting):
    """How beta, the population prior, moves.

    Args:
        step: ``EM()`` or an optimiser; None (the default) is EM where the prior allows it, else Adam at
            rate 0.02.
        form: That of the score I which clients send (see ``fedpop.priors.normal``): "left" is the
            paper's, "right" has no noise for a client without data, "mixed" none where posteriors are
            Gaussian. The last two need a Normal prior, "mixed" a linear head too. "auto" (the default)
            chooses by head and prior.

    >>> BetaStep(EM(0.5, 0.1), form="left").form
    'left'
    """

    step: EM | Optimiser | None = None
    form: Annotated[str, OneOf(*FORMS)] = "auto"

    def on(self, prior: Prior) -> EM | Optimiser:
        """The step for this prior."""
        if self.step is None:
            return EM() if prior.em else Adam(0.02)
        if isinstance(self.step, EM) and not prior.em:
            raise SettingsError(
                f"EM steps cannot be made for {prior.name} priors; use beta_step=fedpop.steps.Adam()"
            )
        return self.step

    def wants_curvature(self, prior: Prior) -> bool:
        """EM's step of the mean vanishes with the scale: then it goes by the likelihood's curvature."""
        return isinstance(self.on(prior), EM)

    def init(self, hierarchy: Hierarchy, beta: Tensor) -> Tensors:
        step, scale = self.on(hierarchy.prior), hierarchy.prior.scale_score(beta)
        if isinstance(step, Optimiser):
            return step.init(beta)
        slow = hierarchy.closed_form or hierarchy.model.learns_features
        return {} if slow or scale is None else SCALE.init(scale)

    def move(
        self,
        hierarchy: Hierarchy,
        hyperprior: Hyperprior,
        beta: Tensor,
        score: Tensor,
        total: Total,
        state: Tensors,
        k: int,
        rounds: Rounds,
        clients: int,
        heard: float,
    ) -> tuple[Tensor, Tensors]:
        """beta after one step from the estimated sum of scores, hyperprior included."""
        prior = hierarchy.prior
        step = self.on(prior)
        if isinstance(step, EM):
            share = _share(heard, clients, k)
            if hierarchy.model.learns_features:
                share = math.sqrt(share)  # features follow the mean, too: its chance costs less than its lag
            rate = share * step.at(k, rounds)
            curvature = float(total.estimate("curvature", beta.new_zeros(()))) / clients
            # Clients that are all alike leave a prior without width, and EM's step of mu with it: then
            # mu moves by gradient steps of one over the likelihood's mean curvature.
            floor = 1 / curvature if curvature > 0 else 0.0
            rate /= max(1.0, hyperprior.stiffness(prior, beta, floor) * rate / clients)
            score = score / clients
            new = prior.em_step(beta, score, rate, floor)
            if not state:
                return new, state
            old, grad = prior.scale_score(beta), prior.scale_score(score)
            assert old is not None and grad is not None
            adam = replace(SCALE, rate=SCALE.rate * math.sqrt(min(1.0, heard / FEW)) * step.at(k, rounds))
            scale, state = adam.step(old, grad, state, torch.ones_like(old), k, rounds)
            return torch.cat((new[: len(beta) - len(old)], scale if prior.learns_scale else old)), state
        return step.step(beta, prior.gradient(beta, score), state, prior.units(beta), k, rounds)


def _share(heard: float, clients: int, k: int) -> float:
    """How much of EM's step a round of so many units takes.

    >>> [round(_share(3, 30, k), 2) for k in (0, 10, 100)], _share(200, 10**6, 5)
    ([0.3, 0.15, 0.1], 1.0)
    """
    last = min(1.0, heard / min(clients, MANY))
    return max(last, min(1.0, heard / FEW) * FEW / (FEW + k))
