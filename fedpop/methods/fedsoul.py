"""FedSOUL, the paper's name for FedSOUK with Langevin steps, in two presets; and the choice of an engine.

``FedSOUL(model)`` is what works best: the kernel that the head asks for, Adam on phi, EM steps on the prior,
a spectral start where there is one; and maximum marginal likelihood in the place of chains where posteriors
are closed-form (``choice`` says when). ``FedSOUL.paper(model)`` is Algorithm 1 to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedpop.checked import OneOf
from fedpop.client.sampler import Chain
from fedpop.errors import PrivacyError, SettingsError
from fedpop.federation.participation import Participation
from fedpop.kernels import ULA
from fedpop.methods.base import Chooses, Chosen
from fedpop.methods.fedsouk import FedSOUK
from fedpop.methods.marginal_ml import MaximumMarginalLikelihood, obstacle
from fedpop.models.base import Model
from fedpop.priors import Normal
from fedpop.server.anneal import Anneal
from fedpop.server.averaging import Averaging
from fedpop.server.beta_step import BetaStep
from fedpop.server.optimisers import SGD, Polynomial

LARGEST_EXACT_THETA = 500
"""Parameters up to which ``auto`` takes the exact engine: its messages hold their square, once or twice."""
OF_CHAINS = ("local_steps", "batch", "kernel", "chain", "anneal", "phi_step", "beta_step", "average")
"""Settings of the sampled engine: where one is given it is obeyed."""


@dataclass(frozen=True, kw_only=True)
class FedSOUL(FedSOUK, Chooses):
    """The paper's method, with the kernel that the head asks for.

    Chains make exact steps where the posterior is Gaussian, and HMC's elsewhere. ``FedSOUL.paper()`` is
    the paper's Algorithm 1 to the letter.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local_steps: The paper's M, how many steps a chain makes in a round: one number, a
            ``fp.chains.Steps`` schedule over rounds, or one for each client by name. More cost more and
            lessen noise. None (the default) is 10, or 1 where z is deep inside a network.
        batch: How many of a client's examples a round works on, drawn anew in each: 50 by default, which for
            the same number of passes through a network does far better than all of them, in more and cheaper
            rounds; None is all. It is for networks with a linear head; other models take all.
        start: Where phi starts: "spectral", or ``Spectral()``, from second moments of the data; "random"
            as the model was given; "auto" (the default) spectral where it applies, else as it was given
            with a prior that suits the data.
        engine: What finds theta: "sampled" is Algorithm 1; "exact" is ``fp.MaximumMarginalLikelihood``, for
            closed-form posteriors, with everyone in every round, uncompressed; "auto" (the default) the
            exact one where it applies, theta has 500 numbers at most, and nothing was said of chains or
            steps. ``print(population)`` says which it was, and why.
        prior: The population's: a prior of ``fp.priors`` or its name. "normal" by default, with the
            covariance that suits the model; "diagonal", "full", "mixture" and "energy" are others.
        kernel: What chains step by: a kernel of ``fp.kernels`` or its name; None (the default) the one
            that suits head and prior.
        chain: How chains are run, ``fp.chains.Chain()`` by default.
        phi_step: How phi moves: a ``PhiStep`` or an optimiser of ``fp.steps``; None is Adam, with the
            rate, and for networks the weight decay, that suit backbone and data.
        beta_step: How the prior moves: a ``BetaStep``, ``EM()``, ``EMAdam()`` or an optimiser of
            ``fp.steps``; None is what suits model and prior, as ``fp.steps.BetaStep`` says.
        hyperprior: Of phi and the prior's parameters, flat by default: ``fp.priors.Hyperprior(...)``.
        anneal: How a normal likelihood's noise variance falls to its own value, against local optima;
            ``Anneal()`` by default, ``Anneal(rounds=0)`` for not.
        average: Which average of theta is published; ``Averaging()`` by default, over the last quarter.
        final: The pass that gives the draws users see; ``fp.chains.Final()`` by default.
        compressor: Of the gradients J: one of ``fp.compressors`` or its name, or a mapping from clients'
            names to them; "identity" (the default) sends them as they are.
        clip: The largest norm of a client's J, and of its I; longer ones are shortened, which biases
            their sums. None (the default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.
        preset: "default" or "paper": only a name for tables, which ``FedSOUL.paper()`` sets.

    >>> from torch import nn
    >>> import fedpop as fp
    >>> model = fp.Composition(nn.Linear(4, 2), nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    >>> fp.FedSOUL(model).sampler.kernel, fp.FedSOUL.paper(model).sampler.kernel
    (Exponential(h=1.0), ULA(step_size=0.8, decay=0.0))
    """

    engine: Annotated[str, OneOf("auto", "sampled", "exact")] = "auto"
    preset: Annotated[str, OneOf("default", "paper")] = "default"
    name: ClassVar[str] = "FedSOUL"

    @property
    def label(self) -> str:
        return self.name if self.preset == "default" else f"{self.name}-{self.preset}"

    def choose(self, rule: Participation, waits: bool) -> Chosen:
        return choice(self, rule, waits)

    def by_marginal_likelihood(self) -> MaximumMarginalLikelihood:
        """The exact engine, with those of these settings that it has."""
        return MaximumMarginalLikelihood(
            self.model,
            prior=self.prior,
            hyperprior=self.hyperprior,
            start=self.start,
            final=self.final,
            ball=self.on_phi.ball,
            guard=self.guard,
        )

    def under_privacy(self) -> FedSOUL:
        if self.engine == "exact":
            raise PrivacyError("the exact engine's sums have no bound; use engine='sampled' under privacy")
        return super().under_privacy().replace(engine="sampled")

    @classmethod
    def paper(
        cls, model: Model, *, rate: float | None = None, power: float = 0.6, **settings: Any
    ) -> FedSOUL:
        """The paper's algorithm to the letter.

        Unadjusted Langevin with gamma_i = 0.8 / L_i; eta1 = eta2 = rate (1 + k)^-power, plain steps, from
        the modules' own values and N(0, 1); no averaging.

        Args:
            model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
            rate: Of the first step; None (the default) finds the largest power of ten whose 20 trial rounds
                do not lower the likelihood.
            power: How fast steps shrink, 0.6 by default.
        """
        step = SGD(rate, Polynomial(power))
        defaults: dict[str, Any] = {
            "preset": "paper",
            "kernel": ULA(),
            "chain": Chain(burn_in=0, follow=False),
            "prior": Normal(scale=1.0),
            "phi_step": step,
            "beta_step": BetaStep(step, form="left"),
            "start": "random",
            "anneal": Anneal(rounds=0),
            "average": Averaging("last"),
            "guard": None,
        }
        return cls(model, **(defaults | settings))


def choice(method: FedSOUL, rule: Participation, waits: bool) -> Chosen:
    """Which engine finds theta in a run with this participation, and why.

    >>> import fedpop as fp
    >>> from torch import nn
    >>> model = fp.Composition(nn.Linear(4, 2), nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    >>> choice(fp.FedSOUL(model), fp.participation.Everyone(), waits=True).reason
    'exact: closed-form posteriors, 14 parameters, everyone takes part'
    >>> choice(fp.FedSOUL(model, local_steps=11), fp.participation.Everyone(), waits=True).reason
    'sampled: local_steps was given, which is of chains'
    """
    usual = type(method)(method.model, prior=method.prior)
    given = [name for name in OF_CHAINS if getattr(method, name) != getattr(usual, name)]
    of_chains = f"{' and '.join(given)} {'was' if len(given) == 1 else 'were'} given, which is of chains"
    why = obstacle(method.hierarchy)
    if not rule.everyone:
        why = "not everyone takes part in every round"
    elif not waits:
        why = "rounds close on a quorum, without everyone's sums"
    elif not method.channel.transparent:
        why = "sums are compressed or clipped"
    if method.engine == "exact":
        if why is not None:
            raise SettingsError(f"engine='exact' cannot be used here: {why}; use engine='sampled'")
        exact = method.by_marginal_likelihood()
        return Chosen(exact, f"exact: as asked for, {exact.size} parameters" + f"; {of_chains}" * bool(given))
    if method.engine == "sampled":
        why = "as asked for"
    elif why is None and given:
        why = of_chains
    if why is None:
        exact = method.by_marginal_likelihood()
        if exact.size <= LARGEST_EXACT_THETA:
            reason = f"closed-form posteriors, {exact.size} parameters, everyone takes part"
            return Chosen(exact, f"exact: {reason}")
        why = f"{exact.size} parameters, more than {LARGEST_EXACT_THETA}"
    then = ", then scoring steps on theta" if method.wants_information else ""
    return Chosen(method, f"sampled: {why}{then}")
