"""The step on beta: how the server moves the population prior, and in which form units send I."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.priors import Hyperprior, Prior
from fedpop.server.em import EM
from fedpop.server.optimisers import Adam, Optimiser
from fedpop.server.schedules import Rounds
from fedpop.settings import Setting, require_one_of

FORMS = ("auto", "left", "right", "mixed")
Tensors = dict[str, Tensor]


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
        curvature: float,
        state: Tensors,
        k: int,
        rounds: Rounds,
        clients: int,
    ) -> tuple[Tensor, Tensors]:
        """beta after one step from the estimated sum of scores, hyperprior included."""
        step = self.on(prior)
        if isinstance(step, EM):
            rate = step.at(k, rounds)
            # Clients that are all alike leave a prior without width, and EM's step of mu with it: then
            # mu moves by gradient steps of one over the likelihood's mean curvature.
            floor = 1 / curvature if curvature > 0 else 0.0
            rate /= max(1.0, hyperprior.stiffness(prior, beta, floor) * rate / clients)
            return prior.em_step(beta, score / clients, rate, floor), {}
        return step.step(beta, prior.gradient(beta, score), state, prior.units(beta), k, rounds)
