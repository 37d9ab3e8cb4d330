"""The chain of a unit's random effect: where it starts, its burn-in, and the M steps of a round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedpop.checked import Few, Whole
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy, Kernel, Pass, Target, Tuning, resolve_kernel, run
from fedpop.kernels.follow import carried, first_place, follows
from fedpop.kernels.prior_chains import draw
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.priors.base import normals_of
from fedpop.settings import Setting

FIRST_BURN_IN, SHORT_BURN_IN = 100, 30
LARGEST_MIXED = 128
"""Dimensions of z up to which the mixed form of I, with a dense covariance, is the default."""


@dataclass(frozen=True)
class Chain(Setting):
    """How units' chains are run in a round.

    Args:
        chains: How many each unit has, 1 unless told; more cost more and halve the noise at four.
        burn_in: Transitions that come first in a unit's first round; None is 100 for
            heads that are not linear, 30 where chains ``follow`` the mode, and none elsewhere.
        stateful: False starts each round from the prior, for clients that can keep nothing between rounds.
        follow: Chains of linear heads follow the mode of their posterior as theta moves, and start there.
        rao_blackwell: Conditional expectations in closed form take the place of averages over draws.

    >>> Chain(chains=4, stateful=False)
    Chain(chains=4, burn_in=None, stateful=False, follow=True, rao_blackwell=False)
    """

    chains: Few = 1
    burn_in: Whole | None = None
    stateful: bool = True
    follow: bool = True
    rao_blackwell: bool = False


def first_tuning(hierarchy: Hierarchy, kernel: Kernel, units: int, beta: Tensor) -> Tuning:
    """Of units whose chains nothing is known of."""
    return kernel.first_tuning(
        units, beta, None if hierarchy.model.linear else hierarchy.prior.dimension(beta)
    )


@dataclass(frozen=True)
class Sampler:
    """Chains on the posteriors of a hierarchy by one kernel."""

    hierarchy: Hierarchy
    kernel: Kernel
    chain: Chain

    @cached_property
    def follows(self) -> bool:
        """Chains are carried along with the modes of their posteriors; see ``kernels.follow``."""
        prior, kernel = self.hierarchy.prior, self.kernel
        exact = self.hierarchy.closed_form and kernel == resolve_kernel(None, self.hierarchy.model, prior)
        one = self.hierarchy.model.linear and prior.component is prior
        return self.chain.follow and one and not exact

    @property
    def burn_in(self) -> int:
        """A linear head's curvature is known, so its first step fits, and its chain starts by the mode: what
        is left to find is its width."""
        usual = FIRST_BURN_IN if not self.hierarchy.model.linear else SHORT_BURN_IN if self.follows else 0
        return usual if self.chain.burn_in is None else self.chain.burn_in

    def enter(self, units: Tensor, beta: Tensor, key: Key, states: Tensor | None) -> Tensors:
        """A unit's first state: a draw from the prior, and nothing learned about steps yet."""
        prior = self.hierarchy.prior
        z = draw(prior, beta, units, key.at(purpose="enter"), self.chain.chains, states)
        out = {"z": z} | first_tuning(self.hierarchy, self.kernel, len(units), beta).to_local()
        rows = (len(units), 1)
        if self.follows:
            out |= {"mode": prior.mu(beta).repeat(rows), "width": prior.unit(beta).repeat(rows)}
        return out

    def run(
        self, target: Target, local: Tensors, cohort: Cohort, steps: int, key: Key, states: Tensor | None
    ) -> Pass:
        """The M transitions of a round, from where each chain stands (or from the prior)."""
        z, tuning, mode, climbed = local["z"], Tuning.from_local(local), None, 0
        if not self.chain.stateful:
            prior, start = self.hierarchy.prior, key.at(purpose="stateless")
            z = draw(prior, target.beta, cohort.units, start, self.chain.chains, states)
        with torch.no_grad():
            if "mode" in local and follows(self.kernel, target):
                z, mode, climbed = self._followed(target, z, local, tuning, cohort, key)
            spent = batched = 0
            if self.burn_in:
                z, tuning, spent, batched = self._burnt_in(target, z, tuning, cohort, key)
            done = run(
                self.kernel, target, z, tuning, steps, key.at(purpose="chain"), cohort.units, adapt=True
            )
        if not spent + climbed and mode is None:
            return done
        spent = spent + climbed + done.gradient_evaluations
        return replace(done, gradient_evaluations=spent, batched=done.batched + batched, mode=mode)

    def _followed(
        self, target: Target, z: Tensor, local: Tensors, tuning: Tuning, cohort: Cohort, key: Key
    ) -> tuple[Tensor, Tensor, int]:
        """Chains moved along with their posteriors; those without a past put where theirs is."""
        first = tuning.updates == 0 if self.chain.stateful else torch.ones_like(tuning.updates).bool()
        spent = 0
        if bool((~first).any()):
            z, mode, spent = carried(target, z, local["mode"], local["width"])
        if not bool(first.any()):
            return z, mode, spent
        place, top, more = first_place(target, cohort.units, self.chain.chains, key.at(purpose="place"))
        if bool(first.all()):
            return place, top, more
        z = torch.where(first[:, None, None], place, z)
        return z, torch.where(first[:, None], top, mode), spent + more

    def _burnt_in(
        self, target: Target, z: Tensor, tuning: Tuning, cohort: Cohort, key: Key
    ) -> tuple[Tensor, Tuning, int, int]:
        """Transitions that units make in their first round before those that count: a chain far from its
        posterior, at a step that does not fit, would send gradients of any size, and an optimiser that
        divides by their past size stands still for hundreds of rounds after."""
        first, spent, batched = tuning.updates == 0, 0, 0
        if not bool(first.any()):
            return z, tuning, 0, 0
        for part in range(-(-self.burn_in // 10)):
            steps, now = min(10, self.burn_in - 10 * part), key.at(purpose=f"burn-in-{part}")
            done = run(self.kernel, target, z, tuning, steps, now, cohort.units, adapt=True)
            z = torch.where(first[:, None, None], done.state.z, z)
            tuning = done.tuning.where(first, tuning)
            spent, batched = spent + done.gradient_evaluations, batched + done.batched
        return z, tuning, spent, batched

    def kept(self, done: Pass, local: Tensors, beta: Tensor, good: Tensor) -> Tensors:
        """What units keep of a pass; a chain that is nowhere stays where it was."""
        new = {"z": done.state.z}
        if done.mode is not None:
            new |= {"mode": done.mode, "width": self.hierarchy.prior.unit(beta).expand_as(done.mode)}
        held = {n: torch.where(good.reshape(-1, *[1] * (v.dim() - 1)), v, local[n]) for n, v in new.items()}
        return held | done.tuning.to_local()

    def scores(self, target: Target, done: Pass, draws: Tensor, form: str) -> Tensor:
        """I of every unit, ``[C, size]``, from its draws ``[C, S, d]`` or in closed form; see
        priors.normal."""
        prior, normals = self.hierarchy.prior, normals_of(self.hierarchy.prior)
        if self.chain.rao_blackwell and normals is not None:
            return normals.expected_score(target.beta, *target.mixture())
        g = done.likelihood_grads
        g = (
            target.likelihood_grad(draws, done.grads.reshape(draws.shape))
            if g is None
            else g.reshape(draws.shape)
        )
        form = self.form_for(form)
        guess = target.guess(draws, done.grads.reshape(draws.shape)) if form == "mixed" else None
        return prior.score(target.beta, draws, g, form, guess)

    def form_for(self, form: str) -> str:
        """The form of I that was asked for, or the one that suits the head and the prior."""
        model, forms = self.hierarchy.model, self.hierarchy.prior.forms
        if form != "auto":
            return form
        if len(forms) == 1:
            return forms[0]
        # A head through vmap has no curvature to step by: its first chains lag behind theta, and there
        # the right form, which is only zero in equilibrium, makes EM diverge.
        if not model.linear:
            return "left"
        large = self.hierarchy.prior.covariance == "full" and model.z_layout.size > LARGEST_MIXED
        return "left" if large or "mixed" not in forms else "mixed"

    @staticmethod
    def fit_to_be_heard(target: Target, done: Pass, scores: Tensor) -> Tensor:
        """Units whose chains are where there is density, and whose scores are finite, ``[C]``."""
        # One number that is not finite makes a sum that is not: cheaper than to look at each.
        parts = [done.state.value, done.state.z.flatten(1), scores]
        if target.linear:  # a chain whose curvature overflows stands still: it says nothing
            parts.append(target.block_precision.inverse_root.flatten(1))
        total = torch.cat(parts, 1).sum(1)
        return total - total == 0

    def check(self, form: str) -> None:
        """Raise where what was asked for cannot be."""
        prior, model = self.hierarchy.prior, self.hierarchy.model
        if form not in ("auto", *prior.forms):
            raise SettingsError(
                f"the {form} form of I needs a Normal prior, not {prior.name}; use form='left'"
            )
        if form == "mixed" and not model.linear:
            raise SettingsError("the mixed form of I needs the curvature of a linear head")
        if self.chain.rao_blackwell and not self.hierarchy.closed_form:
            raise SettingsError(
                "rao_blackwell needs closed-form posteriors: a linear head with a normal likelihood, and a "
                "prior made of Normals"
            )
        if self.kernel.of_normals and prior.component is None:
            raise SettingsError(
                f"{self.kernel.name} is exact for priors made of Normals, as {prior.name} is not; use HMC()"
            )
        self.kernel.check(self.hierarchy.closed_form)
