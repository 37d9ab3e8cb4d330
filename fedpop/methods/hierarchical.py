"""What methods share that learn a population prior and sample each unit's random effect.

The settings of chains and steps, resolved when they are used; and everything after training, when theta is
fixed and every unit has a posterior of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedpop.client.final import JUDGING, SHORT, Final, final_pass
from fedpop.client.phi_step import PhiStep
from fedpop.client.sampler import Chain, Sampler
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.kernels import Hierarchy, Kernel, Tuning, prior_chains, resolve_kernel, run
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm, Trial, mean_loss
from fedpop.models.predictive import Predictive, mixture_score
from fedpop.priors import Hyperprior, Prior
from fedpop.priors import resolve as resolve_prior
from fedpop.server.anneal import Anneal
from fedpop.server.averaging import Averaging
from fedpop.server.beta_step import BetaStep
from fedpop.server.calibration import ROUNDS, largest_rate
from fedpop.server.em import EM
from fedpop.server.optimisers import SGD, Optimiser
from fedpop.server.state import unprefixed


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Algorithm):
    """p(D_i | phi, z_i) p(z_i | beta), with chains on each z_i."""

    prior: Prior | str = "normal"
    kernel: Kernel | str | None = None
    chain: Chain = field(default_factory=Chain)
    phi_step: PhiStep | Optimiser | None = None
    beta_step: BetaStep | EM | Optimiser | None = None
    hyperprior: Hyperprior = field(default_factory=Hyperprior)
    anneal: Anneal = field(default_factory=Anneal)
    average: Averaging = field(default_factory=Averaging)
    final: Final = field(default_factory=Final)

    private: ClassVar[tuple[str, ...]] = (
        "z", "mode", "width", "mass_mean", "mass_variance", "mass_covariance",
    )  # fmt: skip
    keeps: ClassVar[tuple[str, ...]] = ("z", "mode", "width", *Tuning.NAMES)
    uncertainty: ClassVar[bool] = True

    @cached_property
    def hierarchy(self) -> Hierarchy:
        prior = resolve_prior(self.prior, self.model.prior_covariance())
        return Hierarchy(self.model, prior, self.hyperprior)

    @cached_property
    def sampler(self) -> Sampler:
        kernel = resolve_kernel(self.kernel, self.model, self.hierarchy.prior)
        return Sampler(self.hierarchy, kernel, self.chain)

    @property
    def final_draws(self) -> int:
        return self.final.chains * self.final.each(self.model.z_layout.size)

    def looked_at(self) -> Self:
        return replace(self, final=SHORT)

    def judged(self) -> Self:
        return replace(self, final=JUDGING)

    @cached_property
    def on_phi(self) -> PhiStep:
        return self.phi_step if isinstance(self.phi_step, PhiStep) else PhiStep(self.phi_step)

    @cached_property
    def on_beta(self) -> BetaStep:
        return self.beta_step if isinstance(self.beta_step, BetaStep) else BetaStep(self.beta_step)

    @property
    def compressed_size(self) -> int:
        return self.model.phi_layout.size

    @property
    def phi_copies(self) -> int:
        return 4 if self.on_phi.local is not None else 0

    @property
    def steady(self) -> bool:
        return self.on_phi.steady

    def head_size(self, beta: Tensor) -> float:
        """The root mean square of z under the prior, where it is the head of a network."""
        normal = self.hierarchy.prior.component
        if not self.model.network or normal is None:
            return 0.0
        parts = self.hierarchy.prior.parts(beta) or []
        return max(
            float((p.normal.mu(p.beta).square() + p.normal.sd(p.beta).square()).mean().sqrt()) for p in parts
        )

    def warm_up(self, rounds: int) -> int:
        return self.anneal.warm_up(self.model, rounds)

    def at_noise(self, told: Tensors) -> Self:
        """This method in a round for which a noise variance was sent, or itself."""
        if "noise" not in told:
            return self
        return self.with_model(self.model.with_noise(float(told["noise"])))

    # --- eta_0 by trial ----------------------------------------------------------------------

    @property
    def _free(self) -> bool:
        return isinstance(step := self.on_phi.optimiser, SGD) and step.rate is None

    def calibrated(self, trial: Trial) -> Self:
        """Plain steps with ``rate=None`` get theirs from trial rounds."""
        if not self._free:
            return self
        # Judged by the likelihood, which has the noise that there is.
        plain = replace(self, anneal=Anneal(rounds=0))
        exact = self.hierarchy.closed_form
        return self.with_rate(largest_rate(lambda rate: trial(plain.with_rate(rate), ROUNDS), exact))

    def rate(self) -> float | None:
        return step.rate if isinstance(step := self.on_phi.optimiser, SGD) else None

    def with_rate(self, rate: float) -> Self:
        """The same plain steps on phi and beta, with this eta_0."""
        on_phi, on_beta = self.on_phi, self.on_beta
        if isinstance(on_phi.optimiser, SGD):
            on_phi = replace(on_phi, optimiser=replace(on_phi.optimiser, rate=rate))
        if isinstance(on_beta.step, SGD):
            on_beta = replace(on_beta, step=replace(on_beta.step, rate=rate))
        return replace(self, phi_step=on_phi, beta_step=on_beta)

    # --- a unit's own model ------------------------------------------------------------------

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        """Draws from p(z | D_i, theta): a pass of its own, wherever the chains of training stand."""
        phi, beta, states = published["phi"], published["beta"], published.get("states")
        return {"draws": final_pass(self.sampler, self.final, phi, beta, cohort, key, states)}

    def without_data(self, published: Tensors, cohort: Cohort, key: Key) -> Tensors:
        """Draws from the prior."""
        beta, states, prior = published["beta"], published.get("states"), self.hierarchy.prior
        z = prior_chains.final_draws(prior, beta, cohort.units, key, self.final_draws, states)
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
        """With a short run of the chains from where they stand, in place of a final pass."""
        phi, tuning = published["phi"], Tuning.from_local(local)
        with torch.no_grad():
            target = self.hierarchy.target_at(phi, published["beta"], cohort)
            kernel, now = self.sampler.kernel, key.at(purpose="score")
            done = run(kernel, target, local["z"], tuning, 20, now, cohort.units, adapt=False)
            draws = done.draws[:, 5:].flatten(1, 2)
            return mixture_score(self.model, phi, draws, self.model.features(phi, held_out), held_out)

    # --- in words and numbers ----------------------------------------------------------------

    def metrics(self, server: Tensors, cost: Mapping[str, float]) -> dict[str, float | None]:
        clients = cost.get("clients", 0.0)
        mean, sd = self.hierarchy.prior.summary(server["beta"], unprefixed("prior.", server))
        return {
            "loss": mean_loss(cost),
            "acceptance": cost["acceptance"] / clients if clients else None,
            "divergences": cost.get("divergences", 0.0),
            "gradient_evaluations": cost.get("gradient_evaluations", 0.0),
            "prior_mean_norm": float(torch.linalg.vector_norm(mean)),
            "prior_sd": float(torch.linalg.vector_norm(sd)) / math.sqrt(len(sd)),
        }

    def at_bound(self, published: Tensors) -> list[str]:
        words = self.hierarchy.within(published).prior.at_bound(published["beta"])
        phi, ball = published["phi"], float(published.get("ball", math.inf))
        at_edge = phi.numel() > 0 and float(phi.norm()) >= 0.9999 * ball
        return [*words, f"phi is at the edge of its ball, {ball:g}"] if at_edge else words

    def drift(self, server: Tensors) -> float | None:
        halves = self.average.halves(unprefixed("average.", server))
        if halves is None:
            return None
        return float((halves[1] - halves[0]).norm() / halves[1].norm().clamp(min=1e-30))

    def lines(self, published: Tensors) -> list[tuple[str, str]]:
        words = self.hierarchy.prior.lines(published["beta"], published)
        return [("prior" if i == 0 else "", line) for i, line in enumerate(words)]
