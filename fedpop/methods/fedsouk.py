"""FedSOUK: federated stochastic optimisation with Markov kernels (the paper's Algorithm 1).

Round k, with theta = (phi, beta), for every active client i:

    Z_0   its last chain state (stateful), or a draw from p(. | beta_k) (stateless)
    Z_m   ~ Q(Z_{m-1}, .)                                     m = 1, ..., M
    I_i   = 1/M sum_m grad_beta log p(Z_m | beta_k)           (or its other form, see priors.normal)
    J_i   = 1/M sum_m grad_phi  log p(D_i | Z_m, phi_k)       sent as C(J_i), C an unbiased compressor

and on the server, with b/|A| or 1/p_i weights,

    beta_{k+1} = Proj(beta_k + eta1 [grad log p(beta_k) + sum I_i])
    phi_{k+1}  = Proj(phi_k  + eta2 [grad log p(phi_k)  + sum C(J_i)]).

phi is frozen while a chain runs, so features are computed once, and J is one backward pass through the
backbone whatever M. The paper's FedSOUL is FedSOUK with Langevin steps (``FedSOUL.paper()``, to the letter);
``FedSOUL`` chooses kernel and engine by the head.

The algorithm's lines, and where they are:

    3          ``FedSOUK.broadcast``
    5 to 8     client/sampler.py ``Sampler.enter``, and ``Sampler.run``, which starts where a chain stands
    10 to 15   kernels/base.py ``run``, called by ``Sampler.run``; the Langevin step is kernels/ula.py
    17         I: ``Sampler.scores``
    18         J: client/phi_step.py ``PhiWork``
    19         C: message/channel.py, of the vectors named in ``compressed``
    21, 22     ``FedSOUK.server_round``: what is in brackets is ``_gradients``, with b/|A| from
               message/message.py ``Total.estimate``; eta1 is server/beta_step.py, eta2
               server/optimisers.py; Proj priors/base.py ``into_ball`` and ``Prior.project``
    24         ``FedSOUK.publish``, and hierarchical.py ``personalise``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedpop.checked import Count
from fedpop.client.phi_step import PhiStep, PhiWork
from fedpop.client.sampler import (
    Chain,
    LocalSteps,
    Sampler,
    chain_cost,
    describe_steps,
    groups_of,
    most_steps,
)
from fedpop.decisions import Decision
from fedpop.errors import PrivacyError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import map_inputs
from fedpop.kernels import Kernel, Target, Tuning, prior_chains, resolve_kernel
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.message.message import prefixed, unprefixed
from fedpop.methods.base import About, Facts, FindsRate, Footprint, Remembers, Round, Staged, Trial
from fedpop.methods.hierarchical import Hierarchical
from fedpop.priors import Normal
from fedpop.priors.base import Sets, Unnormalised, into_ball, normals_of
from fedpop.questions import Question
from fedpop.questions.targets import TargetSize
from fedpop.server import scoring
from fedpop.server.anneal import Anneal
from fedpop.server.averaging import Averaging, aligner
from fedpop.server.beta_step import EM, BetaStep, EMAdam, Turn
from fedpop.server.optimisers import RATE_TRIAL_ROUNDS, SGD, NetworkAdam, Optimiser, Stage, largest_rate

USUAL_STEPS, STEPS_OF_DEEP = 10, 1
"""Transitions of a chain in a round where nothing is said: a step of a head costs little, one of parameters
deep inside a network as much as the round's own backward pass."""


SMALL_NETWORK = NetworkAdam().least
"""Networks with so many weights or fewer are judged by their likelihood."""


@dataclass(frozen=True, kw_only=True)
class FedSOUK(Hierarchical, Remembers, Staged, FindsRate):
    """The paper's Algorithm 1 with any kernel.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local_steps: The paper's M, steps of a chain in a round: one number, a ``fp.chains.Steps``
            schedule, or one for each client by name. More cost more, with less noise. None (the default) is
            10, or 1 where z is deep inside a network.
        start: Where phi starts: "spectral", "random", or "auto" (the default) for what suits the data.
        batch: How many of a client's examples a round works on, 50 by default, drawn anew in each; None is
            all. It is for networks with a linear head; other models take all.
        prior: The population's, of ``fp.priors`` or by name; "normal" by default.
        kernel: What chains step by, of ``fp.kernels`` or by name; what suits head and prior by default.
        chain: How chains are run, ``fp.chains.Chain()`` by default.
        phi_step: How phi moves: a ``PhiStep`` or an optimiser of ``fp.steps``; Adam by default,
            for networks with a weight decay.
        beta_step: How the prior moves: a ``BetaStep``, ``EM()``, ``EMAdam()`` or an optimiser; what suits
            model and prior by default.
        hyperprior: Of phi and the prior's parameters; flat by default.
        anneal: How a normal likelihood's noise variance falls to its own value, against local optima.
        average: Which average of theta is published; that over the last quarter by default.
        final: The pass that gives the draws users see; ``fp.chains.Final()`` by default.
        compressor: Of the gradients J, of ``fp.compressors`` or by name; "identity" by default, for none.
        clip: The largest norm of a client's J, and of its I; None (the default) shortens none.
        guard: How many times the usual norm makes a message absurd; 1000 by default, None for never.

    >>> from torch import nn
    >>> import fedpop as fp
    >>> model = fp.Composition(nn.Linear(4, 2), nn.Linear(2, 3), "categorical")
    >>> fp.FedSOUK(model, local_steps=5).sampler.kernel
    HMC(leapfrog=5)
    """

    local_steps: LocalSteps | None = None
    batch: Count | None = 50
    kernel: Kernel | str | None = None
    chain: Chain = field(default_factory=Chain)
    phi_step: PhiStep | Optimiser | None = None
    beta_step: BetaStep | EM | EMAdam | Optimiser | None = None
    anneal: Anneal = field(default_factory=Anneal)
    average: Averaging = field(default_factory=Averaging)

    name: ClassVar[str] = "FedSOUK"
    about: ClassVar[About] = About(
        "Kotelevskii et al., NeurIPS 2022", personalised=True, memory="M d + d_phi", instance="itself"
    )
    private: ClassVar[tuple[str, ...]] = (
        "z", "mode", "width", "white", "mass_mean", "mass_variance", "mass_covariance",
    )  # fmt: skip
    keeps: ClassVar[tuple[str, ...]] = ("z", "mode", "width", "white", *Tuning.NAMES)
    guarded: ClassVar[tuple[str, ...]] = ("I", "J")
    compressed: ClassVar[tuple[str, ...]] = ("J",)
    clipped: ClassVar[tuple[str, ...]] = guarded
    private_sums: ClassVar[tuple[str, ...]] = guarded

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampler.check(self.on_beta.form)
        self.on_beta.on(self.hierarchy)
        if self.on_phi.local is not None and self.chain.rao_blackwell:
            raise SettingsError("local epochs on phi average over draws of z; they exclude rao_blackwell")

    # --- settings, resolved where they are used ----------------------------------------------

    @property
    def steps(self) -> LocalSteps:
        """M: what was asked for, or what suits the price of a step."""
        if self.local_steps is None:
            return USUAL_STEPS if not self.model.deep else STEPS_OF_DEEP
        return self.local_steps

    @cached_property
    def sampler(self) -> Sampler:
        kernel = resolve_kernel(self.kernel, self.model, self.hierarchy.prior)
        return Sampler(self.hierarchy, kernel, self.chain, batches=self.rows is not None)

    @property
    def draws_by(self) -> Kernel:
        return self.sampler.kernel

    @cached_property
    def on_phi(self) -> PhiStep:
        return self.phi_step if isinstance(self.phi_step, PhiStep) else PhiStep(self.phi_step)

    @property
    def rows(self) -> int | None:
        """How many of a client's examples a round works on, at most: one step on phi from a few of them is
        nearly as good as from all. Chains must find their posteriors on others in every round, which those of
        a linear head do; and a small model maximises its likelihood, of which a batch's is another."""
        if self.batch is None or not self.model.network or self.model.weights <= SMALL_NETWORK:
            return None
        placed = self.model.linear and self.hierarchy.prior.component is self.hierarchy.prior
        return self.batch if placed and self.chain.follow and self.on_phi.whole else None

    @cached_property
    def on_beta(self) -> BetaStep:
        return self.beta_step if isinstance(self.beta_step, BetaStep) else BetaStep(self.beta_step)

    @property
    def footprint(self) -> Footprint:
        draws, copies = most_steps(self.steps) * self.chain.chains, 4 * (self.on_phi.local is not None)
        foot = replace(super().footprint, draws=draws, phi_copies=copies, steady=self.on_phi.steady)
        return replace(foot, rows=self.rows)

    def decisions(self) -> Sequence[Decision]:
        """What steps are made by, where that was left open."""
        form = self.sampler.decisions(self.on_beta.form)
        return (*self.on_phi.decisions(self.model), *self.on_beta.decisions(self.hierarchy), *form)

    @property
    def wants_information(self) -> bool:
        """Scoring steps in further stages, where nothing was said of steps. A backbone's likelihood is too
        far from a quadratic: there they left the optimum that they began at."""
        return not self.model.learns_features and self.phi_step is None and self.beta_step is None

    # --- before the rounds -------------------------------------------------------------------

    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        asked = self.start_questions(self.first_phi(facts, key), facts.restart)
        given = self.model.likelihood.given_noise is None and any(q.starts_noise for q in asked)
        if given or not self.anneal.asks(self.model, facts.first_stage):
            return asked
        return (*asked, TargetSize(self.model, self.anneal.minimum))

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        phi, beta = self.first_theta(facts, key, known)
        server = {"phi": phi}
        if "target_size" in known:
            server = self.anneal.begun(self.model, phi, known["target_size"], facts.first_stage)
            phi = server["phi"]
        server |= {"beta": beta} | self.first_sets(phi, beta, self.on_phi.ball)
        if (rate := self.on_phi.rate(0, facts.stage, self.head_size(beta))) is not None:
            server["phi_rate"] = phi.new_tensor(rate)
        return (
            server
            | prefixed("phi.", self.on_phi.step(self.model).init(phi))
            | prefixed("beta.", self.on_beta.init(self.hierarchy, beta))
            | prefixed("prior.", self._first_chains(beta, key))
            | prefixed("average.", self.average.init(torch.cat((phi, beta))))
        )

    def _first_chains(self, beta: Tensor, key: Key) -> Tensors:
        """The server's own on a prior whose constant is not known."""
        prior = self.hierarchy.prior
        if not isinstance(prior, Unnormalised):
            return {}
        return prior_chains.first_states(prior, beta, key.at(purpose="negative"))

    def extended(self, server: Tensors, facts: Facts, inverse: Tensor | None = None) -> Tensors:
        server = scoring.begun(server, self.publish(server), inverse)
        rate = self.on_phi.rate(facts.start, facts.stage, self.head_size(server["beta"]))
        return server if rate is None else server | {"phi_rate": server["phi"].new_tensor(rate)}

    def broadcast(self, server: Tensors) -> Tensors:
        sent: Tensors = {n: server[n] for n in ("phi", "beta", "phi_rate", "noise") if n in server}
        prior = self.hierarchy.prior
        if isinstance(prior, Unnormalised):
            sent |= prior_chains.shipped(prior, unprefixed("prior.", server))
        return sent

    # --- under differential privacy ----------------------------------------------------------

    def under_privacy(self) -> Self:
        """From a start that asks nobody, without annealing to the size of the data. Where features are
        learned only the scale of z times that of phi is identified, and noise would let them drift apart: z's
        stays."""
        prior = self.hierarchy.prior
        if not isinstance(prior, Normal):
            raise PrivacyError(
                f"the score of a {prior.name} prior has no bound that holds whatever the data are; use a "
                "Normal prior under privacy"
            )
        if self.start not in ("auto", "random"):
            raise PrivacyError("start questions see data that no budget covers; use start='random'")
        step = self.on_phi.optimiser
        if isinstance(step, SGD) and step.rate is None:
            raise PrivacyError("trial rounds see data that no budget covers; give the steps on phi a rate")
        if self.on_phi.step(self.model).averages:
            raise PrivacyError(
                "averaged local epochs are divided by numbers of examples, which no budget covers; use "
                "another step on phi"
            )
        fixed = replace(
            prior, scale=prior.scale or 1.0, learn_scale=prior.learn_scale and not self.model.learns_features
        )
        return replace(self, guard=None, start="random", prior=fixed, anneal=Anneal(rounds=0))

    # --- a unit's round: lines 5 to 19 of Algorithm 1 ----------------------------------------

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        beta = broadcast["beta"].to(self.model.initial_z().dtype)
        return self.sampler.enter(units, beta, key, broadcast.get("states"))

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Iterator[Answer]:
        for steps, rows in groups_of(self.steps, cohort.units, round.number):
            if rows is None:
                yield from self._answers(round, cohort, local, steps)
                continue
            wanted = round.coefficients
            part = round if wanted is None else replace(round, coefficients=wanted[rows])
            states = {n: v[rows] for n, v in local.items()}
            for answer in self._answers(part, cohort.select(rows), states, steps):
                yield replace(answer, rows=rows if answer.rows is None else rows[answer.rows])

    def _answers(self, round: Round, cohort: Cohort, local: Tensors, steps: int) -> Iterator[Answer]:
        """Z_1, ..., Z_M, then I and J of everyone at once, or unit by unit where each J travels alone."""
        broadcast, key, wanted = round.broadcast, round.key, round.coefficients
        phi, beta, states = broadcast["phi"], broadcast["beta"], broadcast.get("states")
        cohort, share = self._batch(cohort, key)
        wanted = wanted if wanted is None or share is None else wanted * share
        noise = float(broadcast["noise"]) if "noise" in broadcast else None  # while it is annealed
        model, drawn = self.model.at_noise(noise), not self.chain.rao_blackwell
        # phi is frozen while chains run: features are computed once, and chains see no graph.
        work = PhiWork.of(model, self.on_phi, phi, cohort, key, wanted is not None, drawn)
        features = map_inputs(Tensor.detach, work.features)
        target = self.hierarchy.target(phi, beta, features, cohort, work.keys, noise)

        anew = None if share is None else share > 1
        run = partial(self.sampler.run, states=states, drawn=anew)
        done = run(target, local, cohort, steps, key)  # lines 5 to 15
        draws = done.draws.flatten(1, 2)
        i = self.sampler.scores(target, done, draws, self.on_beta.form)  # line 17
        good = self.sampler.fit_to_send(target, done, i)
        new = self.sampler.states(done, local, beta, good)

        vectors = {"I": i} | self._beside(target, cohort, i)
        passes = self.on_phi.passes(cohort, work.once)
        price = chain_cost(cohort, done, self.chain.chains, self.sampler.kernel.batch_size, passes)
        moments = None if drawn else target.moments()
        if work.fused and wanted is not None:
            good, value, j = work.summed(moments, draws, good, wanted, done.evaluated)  # line 18, summed
            yield Answer(good, vectors, new, price(value, good, None), sums={"J": j})
            return
        for rows, value, j, whole in work.blocks(
            moments, draws, target, broadcast.get("phi_rate")
        ):  # line 18
            j = j if share is None else j * share[rows].to(j.dtype).unsqueeze(1)
            own = {n: v[rows] for n, v in vectors.items()} | {"J": j}
            stored, fit = {n: v[rows] for n, v in new.items()}, good[rows] & whole
            yield Answer(fit, own, stored, price(value, fit, rows), rows=rows)

    def _batch(self, cohort: Cohort, key: Key) -> tuple[Cohort, Tensor | None]:
        """What the round works on, and what J of it is multiplied by to be of all of a client's examples."""
        if self.rows is None or cohort.longest <= self.rows:
            return cohort, None
        batch = cohort.drawn(self.rows, key.at(purpose="batch"))
        return batch, cohort.sizes.double() / batch.sizes.clamp(min=1)

    def _beside(self, target: Target, cohort: Cohort, like: Tensor) -> Tensors:
        """What some steps on beta and phi need beside I and J: a curvature, and numbers of examples."""
        out = Tensors()
        if self.on_beta.wants_curvature(self.hierarchy) and (c := target.likelihood_curvature()) is not None:
            out["curvature"] = c
        if self.on_phi.local is not None:
            out["examples"] = cohort.sizes.to(like.dtype).unsqueeze(1)
        return out

    # --- the server's step: lines 21 and 22 --------------------------------------------------

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        k, warm = key.round, self.warm_up(facts.first_stage)
        stage = Stage(max(facts.start, warm), facts.rounds)  # schedules and averages begin after it
        if k < warm:
            server = self.anneal.cooled(self.model, server, k + 1, facts.first_stage)
        if total.no_step:
            return server
        i, j, chains = self._gradients(server, total, facts, key)
        phi, beta, states = self._steps(server, i, j, total, facts, k, stage)
        phi = into_ball(phi, float(server["ball"]))
        beta = self.hierarchy.prior.project(beta, Sets.of(server))
        after = self._average_and_rate(server, phi, beta, facts, k, stage, warm)
        return server | {"phi": phi, "beta": beta} | states | prefixed("prior.", chains) | after

    def _gradients(
        self, server: Tensors, total: Total, facts: Facts, key: Key
    ) -> tuple[Tensor, Tensor, Tensors]:
        """What stands in the brackets: the hyperprior's gradients and b/|A| times the sums of I and of J."""
        prior, phi, beta = self.hierarchy.prior, server["phi"], server["beta"]
        i = self.hyperprior.plus_beta(prior, beta, total.estimate("I", beta))
        j = self.hyperprior.plus_phi(phi, total.estimate("J", phi))
        chains: Tensors = {}
        if isinstance(prior, Unnormalised):  # as much of what scores lack as there is of the clients' scores
            lacking, chains = prior_chains.normaliser(prior, beta, unprefixed("prior.", server), key)
            i = i + lacking * (total.weight * total.scale)
        if self.on_phi.step(self.model, facts.examples).averages:  # the clients' mean move
            j = j * server["phi_rate"] / total.estimate("examples", phi.new_zeros(())).clamp(min=1)
        return i, j, chains

    def _steps(
        self, server: Tensors, i: Tensor, j: Tensor, total: Total, facts: Facts, k: int, stage: Stage
    ) -> tuple[Tensor, Tensor, Tensors]:
        """phi and beta after their steps, or after one of scoring, and the optimisers' states."""
        prior, phi, beta = self.hierarchy.prior, server["phi"], server["beta"]
        beta_state, phi_state = (unprefixed(f"{n}.", server) for n in ("beta", "phi"))
        if "inverse" in server:
            theta, slope = torch.cat((phi, beta)), torch.cat((j, prior.gradient(beta, i)))
            crowd = facts.clients / facts.expected
            theta = scoring.step(theta, slope, server["inverse"], k - facts.start, crowd)
            phi, beta = theta[: len(phi)], theta[len(phi) :]
        else:
            curvature = float(total.estimate("curvature", beta.new_zeros(()))) / facts.clients
            turn = Turn(k, stage, facts.clients, facts.expected, curvature)
            beta, beta_state = self.on_beta.move(self.hierarchy, beta, i, beta_state, turn)
            optimiser = self.on_phi.step(self.model, facts.examples)
            phi, phi_state = optimiser.step(phi, j, phi_state, server["unit"], k, stage)
        return phi, beta, prefixed("phi.", phi_state) | prefixed("beta.", beta_state)

    def _average_and_rate(
        self, server: Tensors, phi: Tensor, beta: Tensor, facts: Facts, k: int, stage: Stage, warm: int
    ) -> Tensors:
        """The average of theta over rounds, aligned where theta is known up to a gauge, and the rate that
        clients step with in the next round."""
        eta = self.on_phi.step(self.model, facts.examples).schedule.factor(k, stage)
        align, average = aligner(self.model, self.hierarchy.prior), unprefixed("average.", server)
        average = self.average.update(average, torch.cat((phi, beta)), eta, k, stage, align, warm)
        rate = self.on_phi.rate(k + 1, stage, self.head_size(beta))
        rates = {} if rate is None else {"phi_rate": phi.new_tensor(rate)}
        return rates | prefixed("average.", average)

    def head_size(self, beta: Tensor) -> float:
        """The root mean square of z under the prior, where it is the head of a network."""
        normals = normals_of(self.hierarchy.prior)
        if not self.model.network or normals is None:
            return 0.0
        return max(
            float((p.normal.mu(p.beta).square() + p.normal.sd(p.beta).square()).mean().sqrt())
            for p in normals.parts(beta)
        )

    def warm_up(self, rounds: int) -> int:
        return self.anneal.warm_up(self.model, rounds)

    def publish(self, server: Tensors) -> Tensors:
        theta = self.average.value(unprefixed("average.", server), torch.cat((server["phi"], server["beta"])))
        size, prior = server["phi"].shape[0], self.hierarchy.prior
        states = {"states": server["prior.states"]} if "prior.states" in server else {}
        sets = {n: server[n] for n in ("sets", "ball")}
        return {"phi": theta[:size], "beta": prior.project(theta[size:], Sets.of(server))} | sets | states

    # --- eta_0 by trial ----------------------------------------------------------------------

    def calibrated(self, trial: Trial) -> Self:
        """Plain steps with ``rate=None`` get theirs from trial rounds."""
        step = self.on_phi.optimiser
        if not isinstance(step, SGD) or step.rate is not None:
            return self
        # Judged by the likelihood, which has the noise that there is.
        plain = replace(self, anneal=Anneal(rounds=0))
        exact = self.hierarchy.closed_form
        return self.with_rate(
            largest_rate(lambda rate: trial(plain.with_rate(rate), RATE_TRIAL_ROUNDS), exact)
        )

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

    # --- in words and numbers ----------------------------------------------------------------

    def metrics(self, server: Tensors, cost: Mapping[str, float]) -> dict[str, float | None]:
        clients = cost.get("clients", 0.0)
        return super().metrics(server, cost) | {
            "acceptance": cost["acceptance"] / clients if clients else None,
            "divergences": cost.get("divergences", 0.0),
        }

    def drift(self, server: Tensors) -> float | None:
        halves = self.average.halves(unprefixed("average.", server))
        if halves is None:
            return None
        return float((halves[1] - halves[0]).norm() / halves[1].norm().clamp(min=1e-30))

    def how(self) -> list[tuple[str, str]]:
        return [("kernel", f"{self.sampler.kernel}, {describe_steps(self.steps)}")]
