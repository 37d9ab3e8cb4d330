"""The step on beta: how the server moves the population prior, and in which form units send I."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
MEMORY = 0.2
"""How fast the variance of units' scores forgets."""


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

    def spread(self, prior: Prior, score: Tensor) -> Tensor | None:
        """What units add to their score I ``[C, size]``, so that its variance over units can be formed."""
        part = prior.scale_score(score) if isinstance(self.on(prior), EM) else None
        return None if part is None else part.square()

    def init(self, prior: Prior, beta: Tensor) -> Tensors:
        step = self.on(prior)
        if isinstance(step, Optimiser):
            return step.init(beta)
        part = prior.scale_score(beta)
        if part is None:
            return {}
        zero = torch.zeros_like(part)
        return {"mean": zero, "square": zero.clone(), "weight": beta.new_zeros(())}

    def move(
        self,
        prior: Prior,
        hyperprior: Hyperprior,
        beta: Tensor,
        score: Tensor,
        curvature: float,
        state: Tensors,
        k: int,
        rounds: int,
        clients: int,
        heard: float,
        squares: Tensor | None,
    ) -> tuple[Tensor, Tensors]:
        """beta after one step from the estimated sum of scores, hyperprior included.

        Of ``clients`` units about ``heard`` are in a round; ``squares`` is the sum over all of them of the
        squared scores of the scale, where they sent any.
        """
        step = self.on(prior)
        if isinstance(step, EM):
            share = min(1.0, heard / FEW)
            rate = share * step.at(k, rounds)
            spread = None
            if squares is not None and state:
                part = prior.scale_score(score)
                assert part is not None
                state = _averaged(state, part / clients, squares / clients, share * MEMORY)
                weight = state["weight"]
                spread = state["square"] / weight - (state["mean"] / weight).square()
            # Clients that are all alike leave a prior without width, and EM's step of mu with it: then
            # mu moves by gradient steps of one over the likelihood's mean curvature.
            floor = 1 / curvature if curvature > 0 else 0.0
            rate /= max(1.0, hyperprior.stiffness(prior, beta, floor) * rate / clients)
            return prior.em_step(beta, score / clients, rate, floor, spread), state
        return step.step(beta, prior.gradient(beta, score), state, prior.units(beta), k, rounds)


def _averaged(state: Tensors, mean: Tensor, square: Tensor, rate: float) -> Tensors:
    """Exponential averages with their total weight."""
    new = {"mean": mean, "square": square, "weight": torch.ones_like(state["weight"])}
    return {name: (1 - rate) * state[name] + rate * value for name, value in new.items()}
