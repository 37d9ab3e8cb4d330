"""The chain of a unit's random effect: where it starts, its burn-in, and the M steps of a round.

M is one number, a schedule over the rounds, or one number for each client by name. Units with different
numbers are worked on in groups: random numbers are keyed by unit and step, so nobody's draws depend on the
grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedpop.checked import Count, Few, Whole
from fedpop.decisions import Decision
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy, Kernel, Pass, Target, Tuning, resolve_kernel, run
from fedpop.kernels.follow import carried, first_place, follows, whitened
from fedpop.kernels.prior_chains import draw
from fedpop.keys import Key, unit_of
from fedpop.message import Tensors
from fedpop.priors.base import normals_of
from fedpop.settings import Setting


@dataclass(frozen=True)
class Steps(Setting):
    """A number of kernel steps that grows or falls linearly over the first rounds.

    Args:
        start: Steps in round 0.
        end: Steps from round ``over`` on.
        over: How many rounds the change takes, 100 by default.

    >>> [Steps(2, 10, over=4).at(k) for k in range(6)]
    [2, 4, 6, 8, 10, 10]
    """

    start: Few
    end: Few
    over: Count = 100

    def at(self, k: int) -> int:
        """M in round k."""
        return round(self.start + (self.end - self.start) * min(k / self.over, 1.0))


LocalSteps = Few | Steps | Mapping[str, Few]


def steps_of(setting: LocalSteps, units: Tensor, k: int) -> list[int]:
    """M in round k for each of these units."""
    if isinstance(setting, Mapping):
        own = {unit_of(name): number for name, number in setting.items()}
        return [own[u] for u in units.tolist()]
    return [_same(setting, k)] * len(units)


def _same(setting: int | Steps, k: int) -> int:
    """M in round k where it is the same for all."""
    return setting.at(k) if isinstance(setting, Steps) else setting


def groups_of(setting: LocalSteps, units: Tensor, k: int) -> list[tuple[int, Tensor | None]]:
    """Each M with the positions of the units that make so many steps; None for all of them."""
    if not isinstance(setting, Mapping):
        return [(_same(setting, k), None)]
    steps = torch.tensor(steps_of(setting, units, k), device=units.device)
    different = torch.unique(steps).tolist()
    if len(different) == 1:
        return [(different[0], None)]
    return [(m, (steps == m).nonzero().squeeze(1)) for m in different]


def most_steps(setting: LocalSteps) -> int:
    """The largest M that there can be, to plan memory for."""
    if isinstance(setting, Steps):
        return max(setting.start, setting.end)
    return max(setting.values(), default=1) if isinstance(setting, Mapping) else setting


def describe_steps(setting: LocalSteps) -> str:
    """In words, for a summary.

    >>> describe_steps(10), describe_steps(Steps(2, 8)), describe_steps({"anna": 5, "ben": 20})
    ('10 per round', '2 to 8 per round', '5 to 20 per round')
    """
    if isinstance(setting, int):
        return f"{setting} per round"
    if isinstance(setting, Steps):
        ends = (setting.start, setting.end)
    else:
        ends = (min(setting.values()), max(setting.values()))
    return f"{ends[0]} to {ends[1]} per round" if ends[0] != ends[1] else f"{ends[0]} per round"


FIRST_BURN_IN, SHORT_BURN_IN, DEEP_BURN_IN = 100, 30, 10
LARGEST_MIXED = 128
"""Dimensions of z up to which the mixed form of I, with a dense covariance, is the default."""


@dataclass(frozen=True)
class Chain(Setting):
    """How units' chains are run in a round.

    Args:
        chains: How many each unit has, 1 by default; more cost more and halve the noise at four.
        burn_in: Transitions that come first in a unit's first round; None is 100 for heads that are not
            linear (10 where z is deep inside a network), 30 where chains ``follow`` the mode, and none
            elsewhere.
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
    batches: bool = False
    """Rounds may work on a batch of a unit's examples."""

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
        model = self.hierarchy.model
        usual = SHORT_BURN_IN if self.follows else 0
        if not model.linear:
            usual = DEEP_BURN_IN if model.deep else FIRST_BURN_IN
        return usual if self.chain.burn_in is None else self.chain.burn_in

    def enter(self, units: Tensor, beta: Tensor, key: Key, states: Tensor | None) -> Tensors:
        """A unit's first state: a draw from the prior, and nothing learned about steps yet."""
        prior = self.hierarchy.prior
        z = draw(prior, beta, units, key.at(purpose="enter"), self.chain.chains, states)
        out = {"z": z} | first_tuning(self.hierarchy, self.kernel, len(units), beta).to_local()
        rows = (len(units), 1)
        if self.follows:
            out |= {"mode": prior.mu(beta).repeat(rows), "width": prior.unit(beta).repeat(rows)}
            out |= {"white": torch.zeros_like(z)} if self.batches else {}
        return out

    def run(
        self,
        target: Target,
        local: Tensors,
        cohort: Cohort,
        steps: int,
        key: Key,
        *,
        states: Tensor | None,
        drawn: Tensor | None = None,
    ) -> Pass:
        """The M transitions of a round, from where each chain stands (or from the prior). Examples of units
        ``drawn`` are others in every round."""
        z, tuning, mode, climbed = local["z"], Tuning.from_local(local), None, 0
        if not self.chain.stateful:
            prior, start = self.hierarchy.prior, key.at(purpose="stateless")
            z = draw(prior, target.beta, cohort.units, start, self.chain.chains, states)
        with torch.no_grad():
            if "mode" in local and follows(self.kernel, target):
                z, mode, climbed = self._followed(target, z, local, cohort, key, drawn)
            spent = batched = 0
            if self.burn_in:
                z, tuning, spent, batched = self._burnt_in(target, z, tuning, cohort, key)
            done = run(
                self.kernel, target, z, tuning, steps, key.at(purpose="chain"), cohort.units, adapt=True
            )
        if not spent + climbed and mode is None:
            return done
        if drawn is not None and mode is not None:
            with torch.no_grad():
                scale = target.prior.unit(target.beta).expand_as(mode)
                white = whitened(target, mode, done.state.z - mode.unsqueeze(1), scale)
            # Nobody's state may depend on whether others' examples were drawn.
            white = torch.where(drawn[:, None, None], white, local["white"])
            done = replace(done, white=white)
        spent = spent + climbed + done.gradient_evaluations
        return replace(done, gradient_evaluations=spent, batched=done.batched + batched, mode=mode)

    def _followed(
        self, target: Target, z: Tensor, local: Tensors, cohort: Cohort, key: Key, drawn: Tensor | None
    ) -> tuple[Tensor, Tensor, int]:
        """Chains moved along with their posteriors; those without a past put where theirs is."""
        tuning = Tuning.from_local(local)
        first = tuning.updates == 0 if self.chain.stateful else torch.ones_like(tuning.updates).bool()
        spent = 0
        if bool((~first).any()):
            z, mode, spent = carried(target, z, local["mode"], local["width"], local.get("white"), drawn)
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

    def states(self, done: Pass, local: Tensors, beta: Tensor, good: Tensor) -> Tensors:
        """What units keep of a pass; a chain that is nowhere stays where it was."""
        new = {"z": done.state.z}
        if done.mode is not None:
            new |= {"mode": done.mode, "width": self.hierarchy.prior.unit(beta).expand_as(done.mode)}
            if "white" in local:
                new["white"] = local["white"] if done.white is None else done.white
        stored = {n: torch.where(good.reshape(-1, *[1] * (v.dim() - 1)), v, local[n]) for n, v in new.items()}
        return stored | done.tuning.to_local()

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
        return self._suited[0] if form == "auto" else form

    @cached_property
    def _suited(self) -> tuple[str, str]:
        """The form of I that suits the head and the prior, and why."""
        model, prior = self.hierarchy.model, self.hierarchy.prior
        if len(prior.forms) == 1:
            return prior.forms[0], f"a {prior.name} prior has no other"
        # A head through vmap has no curvature to step by: its first chains lag behind theta, and there
        # the right form, which is only zero in equilibrium, makes EM diverge.
        if not model.linear:
            return "left", "the head is not linear: its first chains lag behind theta"
        size = model.z_layout.size
        if prior.covariance == "full" and size > LARGEST_MIXED:
            return "left", f"a full covariance of {size} dimensions, more than {LARGEST_MIXED}"
        if "mixed" not in prior.forms:
            return "left", f"a {prior.name} prior has no mixed form"
        return "mixed", "the head is linear: no noise from a client without data, nor where it is Gaussian"

    def decisions(self, form: str) -> Sequence[Decision]:
        """The form of I, where it was left open."""
        return (Decision("form of I", *self._suited),) if form == "auto" else ()

    @staticmethod
    def fit_to_send(target: Target, done: Pass, scores: Tensor) -> Tensor:
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


def chain_cost(
    cohort: Cohort, done: Pass, chains: int, batch: int | None, passes: float
) -> Callable[[Tensor, Tensor, Tensor | None], dict[str, float]]:
    """The cost of a cohort's chains as a function of log-likelihoods ``[R]`` and whose numbers may be sent,
    for the units at ``rows`` (None: all of them); what was spent together is counted with the first of
    them."""
    examples = cohort.examples
    batched = examples if batch is None else int(cohort.sizes.clamp(max=batch).sum())
    steps = examples * (done.gradient_evaluations - done.batched) + batched * done.batched
    counted = False

    def cost(value: Tensor, good: Tensor, rows: Tensor | None) -> dict[str, float]:
        nonlocal counted
        sizes, acceptance, diverged = cohort.sizes, done.acceptance, done.diverged
        if rows is not None:
            sizes, acceptance, diverged = sizes[rows], acceptance[rows], diverged[rows]
        numbers, clients = torch.stack((value, acceptance, diverged)), len(value)
        if not bool(good.all()):
            numbers[:2] = torch.where(good, numbers[:2], 0.0)
            sizes, clients = sizes[good], int(good.sum())
        likelihood, accepted, divergences = numbers.sum(1, dtype=torch.float64).tolist()
        out = {
            "log_likelihood": likelihood,
            "examples": float(examples if len(sizes) == len(cohort) else sizes.sum()),
            "acceptance": accepted,
            "clients": float(clients),
            "divergences": divergences,
        }
        if not counted:  # with the first block
            counted = True
            out |= {
                "gradient_evaluations": float(len(cohort) * chains * done.gradient_evaluations),
                "head_steps": float(chains * steps),
                "backbone_passes": float(passes),
            }
        return out

    return cost
