"""What methods with a population prior share: p(D_i | phi, z_i) p(z_i | beta), theta = (phi, beta) learned.

Where theta starts, and everything after training, when it is fixed and every unit has a posterior of its own.
How theta is found is each method's own: by chains (``fedsouk``), by quasi-Newton steps (``marginal_ml``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor

from fedpop.checked import OneOf
from fedpop.client.final import JUDGING, SHORT, Final, final_pass
from fedpop.client.sampler import first_tuning
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.kernels import Hierarchy, Kernel, Tuning, prior_chains, resolve_kernel, run
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.message.message import unprefixed
from fedpop.methods.base import Algorithm, Asks, Facts, Footprint, PopulationPrior, mean_loss
from fedpop.models.predictive import Predictive, mixture_score
from fedpop.priors import Hyperprior, Prior
from fedpop.priors import resolve as resolve_prior
from fedpop.priors.base import NORM_REACH, Sets, moments
from fedpop.questions import Question, starts
from fedpop.questions.spectral import Spectral
from fedpop.server.optimisers import natural_units, redrawn


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Algorithm, PopulationPrior, Asks):
    """p(D_i | phi, z_i) p(z_i | beta): theta is learned, z is each unit's own."""

    prior: Prior | str = "normal"
    hyperprior: Hyperprior = field(default_factory=Hyperprior)
    start: Annotated[str, OneOf(*starts.STARTS)] | Spectral = "auto"
    final: Final = field(default_factory=Final)

    uncertainty: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hyperprior.check(self.hierarchy.prior)
        self.start_questions(self.model.initial_phi())  # raises where it cannot be

    @cached_property
    def hierarchy(self) -> Hierarchy:
        prior = resolve_prior(self.prior, self.model.prior_covariance())
        return Hierarchy(self.model, prior, self.hyperprior)

    @property
    def draws_by(self) -> Kernel:
        """The kernel of posterior draws: by default, the one that suits head and prior."""
        return resolve_kernel(None, self.model, self.hierarchy.prior)

    @property
    def footprint(self) -> Footprint:
        final = self.final.chains * self.final.each(self.model.z_layout.size)
        return Footprint(compressed=self.model.phi_layout.size, final_draws=final)

    def for_evaluation(self) -> Self:
        return replace(self, final=SHORT)

    def for_verdict(self) -> Self:
        return replace(self, final=JUDGING)

    # --- where theta starts ------------------------------------------------------------------

    def restarted(self) -> Self:
        return replace(self, start="random")

    def start_questions(
        self, phi: Tensor, restart: int = 0, anneals: bool = False
    ) -> Sequence[Question[Tensors]]:
        """What everyone is asked for it, from this phi on."""
        return starts.questions(self.start, self.model, self.hierarchy.prior, phi, restart, anneals)

    def first_phi(self, facts: Facts, key: Key) -> Tensor:
        """phi as it was given, or as a restart has it."""
        phi = self.model.initial_phi()
        if facts.restart == 0:
            return phi
        return redrawn(self.model, phi, key.at(purpose=f"restart-{facts.restart}"))

    def first_theta(self, facts: Facts, key: Key, known: Tensors) -> tuple[Tensor, Tensor]:
        """phi and beta before the first round, given the answers."""
        own = key.at(purpose=f"prior-{facts.restart}")
        return starts.theta(self.model, self.hierarchy.prior, self.first_phi(facts, key), known, own)

    def first_sets(self, phi: Tensor, beta: Tensor, ball: float | None) -> Tensors:
        """phi's natural units; the bounds and radii of the projection sets of a run that starts here."""
        ball = ball or NORM_REACH * max(1.0, float(phi.norm()))
        unit, sets = natural_units(self.model, phi), self.hierarchy.prior.first_sets(beta)
        return {"unit": unit, "sets": sets, "ball": phi.new_tensor(ball, dtype=torch.float64)}

    # --- under differential privacy ----------------------------------------------------------

    def private_size(self, name: str, broadcast: Tensors) -> int:
        return len(broadcast["beta"]) if name == "I" else super().private_size(name, broadcast)

    def whitened(self, name: str, v: Tensor, broadcast: Tensors, inverse: bool = False) -> Tensor:
        """I in units of its own spread under the prior, whatever the data are."""
        normal = self.hierarchy.prior.component
        if name != "I" or normal is None:
            return v
        return normal.whitened_score(broadcast["beta"].to(v), v, inverse)

    # --- a unit's own model ------------------------------------------------------------------

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        """Draws from p(z | D_i, theta): a pass of its own, wherever the chains of training stand."""
        theta, states = (published["phi"], published["beta"]), published.get("states")
        return {"draws": final_pass(self.hierarchy, self.draws_by, self.final, theta, cohort, key, states)}

    def without_data(self, published: Tensors, cohort: Cohort, key: Key) -> Tensors:
        """Draws from the prior."""
        beta, states, prior = published["beta"], published.get("states"), self.hierarchy.prior
        z = prior_chains.final_draws(prior, beta, cohort.units, key, self.footprint.final_draws, states)
        return {"draws": z.unflatten(1, (self.final.chains, -1))}

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        """The posterior predictive: the average of p(y | x, z) over the draws of z."""
        phi = published["phi"]
        with torch.no_grad():
            eta = self.model.outputs_at(phi, personal["draws"].flatten(0, 2), x)
        return Predictive(eta, self.model.likelihood, self.model.params(phi), key, plug_in=False)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        """With a short run of chains in place of a final pass: from where they stand, or, where nobody keeps
        any, of draws that are exact and need no place to start from."""
        phi, beta = published["phi"], published["beta"]
        with torch.no_grad():
            target = self.hierarchy.target_at(phi, beta, cohort)
            if "z" in local:
                z, tuning = local["z"], Tuning.from_local(local)
            else:
                z = self.hierarchy.prior.mu(beta).repeat(len(cohort), 1, 1)
                tuning = first_tuning(self.hierarchy, self.draws_by, len(cohort), beta)
            now = key.at(purpose="score")
            done = run(self.draws_by, target, z, tuning, 20, now, cohort.units, adapt=False)
            draws = done.draws[:, 5:].flatten(1, 2)
            return mixture_score(self.model, phi, draws, self.model.features(phi, held_out), held_out)

    # --- in words and numbers ----------------------------------------------------------------

    def metrics(self, server: Tensors, cost: Mapping[str, float]) -> dict[str, float | None]:
        mean, sd = moments(self.hierarchy.prior, server["beta"], unprefixed("prior.", server))
        return {
            "loss": mean_loss(cost),
            "gradient_evaluations": cost.get("gradient_evaluations", 0.0),
            "prior_mean_norm": float(torch.linalg.vector_norm(mean)),
            "prior_sd": float(torch.linalg.vector_norm(sd)) / math.sqrt(len(sd)),
        }

    def at_bound(self, published: Tensors) -> list[str]:
        words = self.hierarchy.prior.at_bound(published["beta"], Sets.of(published))
        phi, ball = published["phi"], float(published.get("ball", math.inf))
        at_edge = phi.numel() > 0 and float(phi.norm()) >= 0.9999 * ball
        return [*words, f"phi is at the edge of its ball, {ball:g}"] if at_edge else words

    def lines(self, published: Tensors) -> list[tuple[str, str]]:
        words = self.hierarchy.prior.lines(published["beta"], published)
        return [("prior" if i == 0 else "", line) for i, line in enumerate(words)]
