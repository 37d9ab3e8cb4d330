"""The step on beta: how the server moves the population prior, and in which form units send I."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedpop.channel import Total
from fedpop.errors import SettingsError
from fedpop.priors import Hyperprior, Prior
from fedpop.server.em import EM
from fedpop.server.optimisers import Adam, Optimiser
from fedpop.settings import Setting, require_one_of

FORMS = ("auto", "left", "right", "mixed")
Tensors = dict[str, Tensor]
FEW = 10
"""Units in a round from which EM takes its full step: with fewer the prior's mean, at a rate r, would carry a
noise of sqrt(r / (2 - r) / heard) of the population's spread, and the scale would grow by it."""
FAST = 10.0
"""Visits over which the steps of the scale that go by units' spread give way to those of EM: 1/k averages chance out."""
MEMORY = 0.2
"""How fast the variance of units' scores forgets."""


class Counts(Protocol):
    """What the server knows of the federation."""

    @property
    def clients(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def heard(self) -> float:
        """How many clients a round has on average."""


@dataclass(frozen=True)
class BetaStep(Setting):
    """Steps of EM or of an optimiser on beta (None: EM where the prior allows it, else Adam); ``form`` is
    that of I (see ``priors.normal``), chosen by head and prior unless told.

    >>> BetaStep(EM(0.5, 0.1), form="left").form
    'left'
    """

    step: EM | Optimiser | None = None
    form: str = "auto"

    def __post_init__(self) -> None:
        require_one_of(FORMS, form=self.form)

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

    def init(self, prior: Prior, beta: Tensor) -> Tensors:
        step = self.on(prior)
        return step.init(beta) if isinstance(step, Optimiser) else {}

    def move(
        self,
        prior: Prior,
        hyperprior: Hyperprior,
        beta: Tensor,
        score: Tensor,
        total: Total,
        state: Tensors,
        facts: Counts,
        k: int,
    ) -> tuple[Tensor, Tensors]:
        """beta after one step from the estimated sum of scores, hyperprior included."""
        step, clients = self.on(prior), facts.clients
        if isinstance(step, EM):
            share = min(1.0, facts.heard / FEW)
            rate = share * step.at(k, facts.rounds)
            state = _spread(state, total, clients, share * MEMORY)
            visits = k * min(1.0, facts.heard / clients)
            slow = FAST / (FAST + visits)
            curvature = float(total.estimate("curvature", beta.new_zeros(()))) / clients
            # Clients that are all alike leave a prior without width, and EM's step of mu with it: then
            # mu moves by gradient steps of one over the likelihood's mean curvature.
            floor = 1 / curvature if curvature > 0 else 0.0
            rate /= max(1.0, hyperprior.stiffness(prior, beta, floor) * rate / clients)
            return prior.em_step(beta, score / clients, rate, floor, state.get("spread"), slow), state
        return step.step(beta, prior.gradient(beta, score), state, prior.units(beta), k, facts.rounds)


def _spread(state: Tensors, total: Total, clients: int, rate: float) -> Tensors:
    """The variance over units of what they remember of the scale's score, averaged over rounds."""
    if "spread" not in total.weighted:
        return state
    mean, square = (total.weighted["spread"] * (total.scale / clients)).chunk(2)
    now = square - mean.square()
    return {"spread": torch.lerp(state["spread"], now, rate) if "spread" in state else now}
