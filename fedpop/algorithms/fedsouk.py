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
backbone whatever M. FedSOUL is FedSOUK with Langevin steps; ``FedSOUL.paper()`` is Algorithm 1 to the
letter, the default chooses the kernel by the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedpop.algorithms.base import (
    About,
    Algorithm,
    Facts,
    Info,
    Message,
    Tensors,
    Trial,
    leave_out,
    mean_loss,
    require_whole,
    weighted_sum,
)
from fedpop.channel import Channel
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.local_steps import LocalSteps, check_steps, in_groups, resolve_steps, steps_of
from fedpop.client.losses import body_loss
from fedpop.client.phi_gradient import PhiGradient, embedded, vectorises
from fedpop.errors import EstimateError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, leaves, map_inputs
from fedpop.kernels import (
    Exponential,
    Kernel,
    MixtureDraw,
    Pass,
    Target,
    Tuning,
    mirrored,
    resolve_kernel,
    run,
)
from fedpop.keys import Key
from fedpop.models.modules import RowKeys
from fedpop.models.predictive import Predictive, per_example
from fedpop.priors.base import Prior
from fedpop.priors.em import EM
from fedpop.priors.hyper import Hyperprior
from fedpop.priors.normal import Normal
from fedpop.priors.registry import resolve as resolve_prior
from fedpop.server.averaging import Averaging
from fedpop.server.gauge import aligner
from fedpop.server.optimisers import SGD, Adam, Average, Optimiser
from fedpop.server.schedules import Constant, Cosine, Schedule
from fedpop.server.start import SpectralStart, applies, natural_units, redrawn
from fedpop.server.state import prefixed, unprefixed

STARTS = ("auto", "spectral", "random")
FORMS = ("auto", "left", "right", "mixed")
LARGEST_MIXED = 128
BURN_IN = 100
NETWORK_STEP = Adam(0.03, Cosine())
"""The server's step on a network's phi; a linear backbone takes larger ones."""


@dataclass(frozen=True)
class Final:
    """The pass with theta fixed that gives the draws users see: ``chains`` chains of ``draws`` draws each,
    after ``burn_in`` transitions that adapt.

    >>> Final(draws=100).total
    400
    """

    chains: int = 4
    draws: int = 250
    burn_in: int = 300

    def __post_init__(self) -> None:
        require_whole(chains=self.chains, draws=self.draws, burn_in=self.burn_in)
        if self.chains < 1 or self.draws < 1 or self.burn_in < 0:
            raise SettingsError(f"the final pass needs chains, draws and a burn-in of 0 or more, not {self}")

    @property
    def total(self) -> int:
        return self.chains * self.draws


@dataclass(frozen=True, kw_only=True)
class FedSOUK(Algorithm):
    """The paper's method with any kernel; see the module's text.

    ``local_steps`` is the paper's M: one number, a ``Steps`` schedule over rounds, or one for each client.

    >>> from torch import nn
    >>> import fedpop as fp
    >>> model = fp.Composition(nn.Linear(4, 2), nn.Linear(2, 3), "categorical")
    >>> fp.FedSOUL(model).kernel
    HMC(leapfrog=5)
    """

    prior: Prior = "normal"  # type: ignore[assignment]  # Normal, with the covariance that suits the model
    kernel: Kernel | None = None
    local_steps: LocalSteps = 10
    chains: int = 1
    burn_in: int = None  # type: ignore[assignment]  # chosen by the head
    stateful: bool = True
    form: str = "auto"
    phi_step: Optimiser | None = None
    """None: Adam, with the rate that suits the backbone (``fedpop experiment defaults``)."""
    beta_step: EM | Optimiser | None = None
    hyperprior: Hyperprior = field(default_factory=Hyperprior)
    start: str = "auto"
    spectral: SpectralStart = field(default_factory=SpectralStart)
    average: Averaging = field(default_factory=Averaging)
    phi_epochs: int = 0
    """Local epochs on a client's own copy of phi instead of one gradient; see ``_phi_moves``."""
    phi_batch: int | None = None
    phi_rate: float = 0.05
    phi_momentum: float = 0.0
    phi_schedule: Schedule = field(default_factory=Constant)
    phi_ball: float = 1e6
    antithetic: bool = False
    final: Final = field(default_factory=Final)
    rao_blackwell: bool = False

    name: ClassVar[str] = "FedSOUK"
    about: ClassVar[About] = About(
        "Kotelevskii et al., NeurIPS 2022", personalised=True, memory="M d + d_phi", instance="itself"
    )
    private: ClassVar[tuple[str, ...]] = ("z", "mass_mean", "mass_variance")
    compressed: ClassVar[tuple[str, ...]] = ("J",)
    uncertainty: ClassVar[bool] = True
    marginal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prior", resolve_prior(self.prior, self.model.prior_covariance()))
        object.__setattr__(self, "kernel", resolve_kernel(self.kernel, self.model, self.prior))
        if self.burn_in is None:  # a linear head's curvature is known, so its first step fits
            object.__setattr__(self, "burn_in", 0 if self.model.known_linear else BURN_IN)
        if self.phi_step is None:
            object.__setattr__(self, "phi_step", NETWORK_STEP if self.model.network else Adam())
        if self.beta_step is None:
            object.__setattr__(self, "beta_step", self.prior.default_step())
        object.__setattr__(self, "local_steps", resolve_steps(self.local_steps))
        require_whole(chains=self.chains, burn_in=self.burn_in)
        if self.chains < 1:
            raise SettingsError(f"each client runs at least one chain, not {self.chains}")
        if self.burn_in < 0:
            raise SettingsError(f"burn_in must be 0 or more, not {self.burn_in}")
        if self.start not in STARTS:
            raise SettingsError(f"start is one of {', '.join(STARTS)}, not {self.start!r}")
        if self.start == "spectral" and not applies(self.model):
            raise SettingsError(
                "a spectral start needs a linear backbone and a linear head with one output, both "
                "without bias; use start='random'"
            )
        if self.form not in FORMS:
            raise SettingsError(f"the form of I is one of {', '.join(FORMS)}, not {self.form!r}")
        if self.form == "mixed" and not self.model.linear:
            raise SettingsError("the mixed form of I needs the curvature of a linear head")
        require_whole(phi_epochs=self.phi_epochs)
        if self.phi_epochs < 0:
            raise SettingsError(f"phi_epochs must be 0 (one gradient a round) or more, not {self.phi_epochs}")
        if self.phi_batch is not None and self.phi_batch < 1:
            raise SettingsError(f"phi_batch must be at least 1, not {self.phi_batch}")
        if not 0 < self.phi_rate < math.inf:
            raise SettingsError(
                f"phi_rate, the step on a client's own phi, must be positive, not {self.phi_rate}"
            )
        if isinstance(self.phi_step, Average) and not self.phi_epochs:
            raise SettingsError("phi_step=Average() averages clients' own steps on phi; it needs phi_epochs")
        if self.phi_epochs and self.rao_blackwell:
            raise SettingsError("local epochs on phi average over draws of z; they exclude rao_blackwell")
        if self.antithetic and self.chains % 2:
            raise SettingsError(f"antithetic chains come in pairs; chains must be even, not {self.chains}")
        if self.antithetic and not isinstance(self.prior, Normal):
            raise SettingsError(
                f"antithetic chains mirror each other about a Normal prior, not {self.prior.name}"
            )
        _ = self.local_sgd  # checks its own settings
        if self.rao_blackwell and not self.exact:
            raise SettingsError(
                "rao_blackwell needs closed-form posteriors: a linear head with a normal likelihood, and a "
                "prior made of Normals"
            )
        if self.prior.covariance == "full" and self.hyperprior.log_scale is not None:
            raise SettingsError("a hyperprior on the scale is there for isotropic or diagonal priors")
        self._check_prior()

    def _check_prior(self) -> None:
        """What was asked for, the prior can do."""
        prior = self.prior
        if self.form not in ("auto", *prior.forms):
            raise SettingsError(
                f"the {self.form} form of I needs a Normal prior, not {prior.name}; use form='left'"
            )
        if isinstance(self.beta_step, EM) and not prior.em:
            raise SettingsError(f"EM steps cannot be made for {prior.name} priors; use beta_step=Adam()")
        if isinstance(self.kernel, MixtureDraw) and not self.exact:
            raise SettingsError(
                "MixtureDraw needs a normal likelihood, a linear head and a prior made of Normals; use HMC()"
            )
        if self.hyperprior.on_beta and not isinstance(prior, Normal):
            raise SettingsError(
                f"a hyperprior on the prior's mean or scale is there for Normal priors, not {prior.name}"
            )

    def check(self, clients: int) -> None:
        super().check(clients)
        check_steps(self.local_steps, clients)

    @property
    def compressed_size(self) -> int:
        return self.model.phi_layout.size

    @property
    def local_sgd(self) -> LocalSGD:
        """The steps on a client's own phi."""
        return LocalSGD(max(self.phi_epochs, 1), self.phi_rate, self.phi_batch, self.phi_momentum)

    @property
    def phi_optimiser(self) -> Optimiser:
        assert self.phi_step is not None
        return self.phi_step

    @property
    def phi_copies(self) -> int:
        return 4 if self.phi_epochs else 0

    @property
    def markov_kernel(self) -> Kernel:
        assert self.kernel is not None
        return self.kernel

    @property
    def exact(self) -> bool:
        """Posteriors and the marginal likelihood are closed-form."""
        normal = self.model.linear and self.model.likelihood.name == "normal"
        return normal and self.prior.component is not None

    def check_restarts(self) -> None:
        if not self.prior.normalised and self.model.z_layout.size > 2:
            raise SettingsError(
                "restarts are compared by marginal likelihood, which is computed for "
                f"{self.prior.name} priors when z has at most two dimensions"
            )

    # --- before the rounds -------------------------------------------------------------------

    @property
    def spectral_start(self) -> bool:
        return self.start == "spectral" or (self.start == "auto" and applies(self.model))

    @property
    def steady(self) -> bool:
        return self.phi_batch is None or self.phi_epochs > 0

    @property
    def phases(self) -> tuple[str, ...]:
        if self.spectral_start:
            return ("moments", "spectral", "train")
        known = self.prior.scale is not None or not self.model.scale_from_features
        return ("train",) if known else ("scale", "train")

    def init(self, facts: Facts, key: Key) -> Tensors:
        phi = self.model.initial_phi()
        if facts.restart > 0:
            phi = redrawn(self.model, phi, key.at(purpose=f"restart-{facts.restart}"))
        mu = self.model.prior_centre() + self.prior.mean
        scale = 1.0 if self.prior.scale is None else self.prior.scale
        beta = self.prior.init(mu, scale, key.at(purpose=f"prior-{facts.restart}"))
        return self._server(phi, beta, key)

    def _server(self, phi: Tensor, beta: Tensor, key: Key | None = None) -> Tensors:
        key = Key(0) if key is None else key
        server = {"phi": phi, "beta": beta, "unit": natural_units(self.model, phi)}
        server |= prefixed("phi.", self.phi_optimiser.init(phi))
        if isinstance(self.beta_step, Optimiser):
            server |= prefixed("beta.", self.beta_step.init(beta))
        if self.phi_epochs:
            server["phi_rate"] = self._phi_rate(0, 1, phi)
        server |= prefixed("prior.", self.prior.server_state(beta, key.at(purpose="negative")))
        return server | prefixed("average.", self.average.init(torch.cat((phi, beta))))

    def _phi_rate(self, k: int, rounds: int, like: Tensor) -> Tensor:
        """a of round k, which clients are told."""
        return like.new_tensor(self.phi_rate * self.phi_schedule.factor(k, rounds))

    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        if phase == "moments":
            return {}
        if phase == "spectral":
            return {"whitener": server["whitener"]}
        theta = {n: server[n] for n in ("phi", "beta", "phi_rate") if n in server}
        return theta | self.prior.shipped(unprefixed("prior.", server))

    def enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        if "beta" not in broadcast:
            return {}
        beta = broadcast["beta"]
        tuning = self._first_tuning(self.markov_kernel, len(ids), beta)
        z = self.draw_prior(beta, ids, key.at(purpose="enter"), states=broadcast.get("states"))
        return {"z": z} | tuning.to_local()

    def _first_tuning(self, kernel: Kernel, clients: int, beta: Tensor) -> Tuning:
        return kernel.first_tuning(clients, beta, None if self.model.linear else self.prior.dimension(beta))

    def draw_prior(
        self, beta: Tensor, ids: Tensor, key: Key, chains: int | None = None, states: Tensor | None = None
    ) -> Tensor:
        """Z_0 ~ p(. | beta) for these clients, ``[C, K, d]``."""
        if chains is not None or not (self.antithetic and isinstance(self.prior, Normal)):
            return self.prior.draw(beta, ids, key, self.chains if chains is None else chains, states)
        noise = key.normal(ids, (self.chains, self.prior.dimension(beta)), beta.dtype)
        return self.prior.sample(beta, mirrored(noise))

    # --- a client's round --------------------------------------------------------------------

    def local_round(
        self,
        phase: str,
        broadcast: Tensors,
        cohort: Cohort,
        local: Tensors,
        channel: Channel,
        key: Key,
    ) -> tuple[Tensors, Message, Info]:
        if phase in ("moments", "spectral"):
            sums = self.spectral.local(phase, self.model, broadcast, cohort, channel)
            return local, Message(sums, len(cohort)), Info()
        phi, beta = broadcast["phi"], broadcast["beta"]
        if phase == "scale":
            return local, self._feature_size(phi, cohort, channel), Info()

        def work(group: Cohort, states: Tensors) -> tuple[Tensors, Message, Info]:
            return self.local_round(phase, broadcast, group, states, channel, key)

        done = in_groups(self.local_steps, cohort, local, key.round, work)
        if done is not None:
            return done
        keys = self.model.dropout_keys(cohort, key)
        phi = phi.detach().requires_grad_(phi.numel() > 0)
        epochs = self.phi_epochs > 0
        whole = self.phi_batch is None and not epochs
        fused = channel.fusable and whole
        separate = whole and not fused and not vectorises(self.model, phi)
        features, parts = embedded(self.model, phi, cohort, keys, graph=fused, separate=separate)
        target = self.target(phi.detach(), beta, map_inputs(Tensor.detach, features), cohort, keys)
        trace = self._chain(target, local, broadcast, cohort, key)
        clients, _, _, d = trace.draws.shape
        draws = trace.draws.reshape(clients, -1, d)
        scores = self._scores(target, trace, draws)
        good = self._good(target, trace, scores)

        estimate = PhiGradient(self.model, target.moments() if self.rao_blackwell else None, draws)
        extra: Tensors = {}
        if epochs:
            good, value, j, examples = self._phi_moves(
                phi, broadcast, target, draws, cohort, channel, key, good
            )
            extra["examples"] = examples
        elif fused:
            value, j = estimate.fused(phi, features, cohort, keys, good)
            if not bool(torch.isfinite(j).all()):
                good, value, j = estimate.one_by_one(phi, cohort, key, good, None)
            j = channel.fused("J", j, int(good.sum()))
        else:
            good, value, j = estimate.one_by_one(phi, cohort, key, good, channel, self.phi_batch, parts)
        i = weighted_sum(channel("I", scores), cohort.weights, good)
        sums = {"I": i, "J": j} | extra
        if not self.prior.normalised:  # the server knows who took part and with what weight: no bytes
            sums["weight"] = weighted_sum(torch.ones_like(scores[:, :1]), cohort.weights, good)
        if isinstance(self.beta_step, EM) and (size := target.likelihood_curvature()) is not None:
            sums["curvature"] = weighted_sum(channel("curvature", size), cohort.weights, good)
        message = Message(sums, int(good.sum()))
        z = torch.where(good[:, None, None], trace.state.z, local["z"])
        return (
            {"z": z} | trace.tuning.to_local(),
            message,
            self._info(cohort, trace, target, value, good, fused or separate),
        )

    def _phi_moves(
        self,
        phi: Tensor,
        broadcast: Tensors,
        target: Target,
        draws: Tensor,
        cohort: Cohort,
        channel: Channel,
        key: Key,
        good: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """D_i = n_i (phi_i - phi_k) / a in J_i's place: phi_i is phi_k after epochs of mini-batch steps a on
        the mean log-likelihood per example, averaged over the draws of z, which stay as they are.

        One full-batch step gives D_i = J_i. More of them drift towards each client's own optimum, as in
        FedAvg: the paper's theorem does not cover this.
        """
        with torch.no_grad():
            value = target.likelihood.value(draws).mean(1)
        phi = phi.detach()
        a = float(broadcast["phi_rate"])
        start = phi.expand(len(cohort), -1)
        loss = body_loss(self.model, cohort.embedded)
        key = key.at(purpose="body")
        moved = self.local_sgd.run(
            loss, start, draws, cohort.x, cohort, key, a, batched=self.model.batchable
        ).w
        n = cohort.sizes.to(phi.dtype).unsqueeze(1)
        good = good & torch.isfinite(moved).all(1)
        d = channel("J", torch.where(good.unsqueeze(1), n * (moved - start) / a, torch.zeros_like(moved)))
        examples = weighted_sum(channel("examples", n), cohort.weights, good)
        return good, value, weighted_sum(d, cohort.weights, good), examples

    def target(
        self,
        phi: Tensor,
        beta: Tensor,
        features: Inputs,
        cohort: Cohort,
        keys: RowKeys | None = None,
    ) -> Target:
        """The log-posterior of z of every client in the cohort."""
        return Target(self.model.bind(phi, features, cohort, keys), self.prior, beta)

    def _chain(self, target: Target, local: Tensors, broadcast: Tensors, cohort: Cohort, key: Key) -> Pass:
        z = local["z"]
        if not self.stateful:
            start = key.at(purpose="stateless")
            z = self.draw_prior(target.beta, cohort.ids, start, states=broadcast.get("states"))
        tuning = Tuning.from_local(local)
        steps = max(steps_of(self.local_steps, cohort.ids, key.round), default=1)
        with torch.no_grad():
            z, tuning, spent, batched = self._burn_in(target, z, tuning, cohort, key)
            trace = self._run(target, z, tuning, steps, key.at(purpose="chain"), cohort.ids)
        return replace(
            trace,
            gradient_evaluations=trace.gradient_evaluations + spent,
            batched=trace.batched + batched,
        )

    def _run(self, target: Target, z: Tensor, tuning: Tuning, steps: int, key: Key, ids: Tensor) -> Pass:
        kernel, pairs = self.markov_kernel, self.antithetic
        return run(kernel, target, z, tuning, steps, key, ids, adapt=True, antithetic=pairs)

    def _burn_in(
        self, target: Target, z: Tensor, tuning: Tuning, cohort: Cohort, key: Key
    ) -> tuple[Tensor, Tuning, int, int]:
        """Transitions that clients make in their first round before those that count: a chain far from its
        posterior, at a step that does not fit, would send gradients of any size, and an optimiser that
        divides by their past size stands still for hundreds of rounds after."""
        first, spent, batched = tuning.updates == 0, 0, 0
        if self.burn_in == 0 or not bool(first.any()):
            return z, tuning, 0, 0
        for part in range(-(-self.burn_in // 10)):
            steps = min(10, self.burn_in - 10 * part)
            trace = self._run(target, z, tuning, steps, key.at(purpose=f"burn-in-{part}"), cohort.ids)
            z = torch.where(first[:, None, None], trace.state.z, z)
            tuning = trace.tuning.where(first, tuning)
            spent, batched = spent + trace.gradient_evaluations, batched + trace.batched
        return z, tuning, spent, batched

    def _scores(self, target: Target, trace: Pass, draws: Tensor) -> Tensor:
        if self.rao_blackwell:
            return self.prior.expected_score(target.beta, *target.mixture())
        g = target.likelihood_grad(draws, trace.grads.reshape(draws.shape))
        if self.form == "mixed" or (self.form == "auto" and self._mixes(target)):
            return self.prior.score(target.beta, draws, g, "mixed", target.covariance())
        if len(self.prior.forms) == 1:
            return self.prior.score(target.beta, draws, g, *self.prior.forms)
        # A head through vmap has no curvature to step by: its first chains lag behind theta, and there
        # the right form, which is only zero in equilibrium, makes EM diverge.
        form = ("right" if target.linear else "left") if self.form == "auto" else self.form
        return self.prior.score(target.beta, draws, g, form)

    def _mixes(self, target: Target) -> bool:
        # Logits may shift together without changing a class probability: only the right form is
        # silent there. And a dense covariance is for small heads.
        small = target.linear and self.model.z_layout.size <= LARGEST_MIXED and "mixed" in self.prior.forms
        return small and self.model.likelihood.name != "categorical"

    @staticmethod
    def _good(target: Target, trace: Pass, scores: Tensor) -> Tensor:
        finite = torch.isfinite(trace.state.value).all(1) & torch.isfinite(trace.state.z).all(-1).all(1)
        if target.linear:  # a chain whose curvature overflows stands still: it says nothing
            finite = finite & torch.isfinite(target.block_precision.inverse_root).flatten(1).all(1)
        return finite & torch.isfinite(scores).all(1)

    def _info(
        self, cohort: Cohort, trace: Pass, target: Target, value: Tensor, good: Tensor, once: bool
    ) -> Info:
        examples = int(cohort.sizes.sum())
        # A forward and backward of one example is one pass, a forward alone a third.
        if self.phi_epochs:
            with_graph = self.phi_epochs * examples
        else:
            batch = self.phi_batch
            with_graph = examples if batch is None else int(cohort.sizes.clamp(max=batch).sum())
        passes = 0.0 if cohort.embedded else with_graph + (0.0 if once else examples / 3)
        size = self.markov_kernel.batch_size
        looked_at = examples if size is None else int(cohort.sizes.clamp(max=size).sum())
        steps = examples * (trace.gradient_evaluations - trace.batched) + looked_at * trace.batched
        return Info(
            {
                "log_likelihood": float(value[good].sum()),
                "examples": float(cohort.sizes[good].sum()),
                "acceptance": float(trace.acceptance[good].sum()),
                "divergences": float(trace.diverged.sum()),
                "gradient_evaluations": float(len(cohort) * self.chains * trace.gradient_evaluations),
                "head_steps": float(self.chains * steps),
                "backbone_passes": float(passes),
                "clients": float(good.sum()),
            },
            leave_out(good, cohort),
        )

    def _feature_size(self, phi: Tensor, cohort: Cohort, channel: Channel) -> Message:
        with torch.no_grad():
            features = self.model.features(phi, cohort)
        size = phi.new_zeros(len(cohort), dtype=torch.float64)
        for leaf in leaves(features):
            if leaf.is_floating_point():
                rows = leaf.double().square().unsqueeze(-1).flatten(1).sum(1)
                size = size.index_add(0, cohort.owner, rows)
        good = torch.isfinite(size.to(phi.dtype))  # one broken client must not set everyone's scale
        rows = torch.stack((size[good].sum(), cohort.sizes[good].sum().double()))
        return Message({"size": channel.fused("size", rows, len(cohort))}, len(cohort))

    # --- the server's step -------------------------------------------------------------------

    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        if phase == "moments":
            assert total is not None
            return server | {"whitener": self.spectral.whitener(total.sums)}
        if phase == "spectral":
            assert total is not None
            width = self.model.z_layout.size
            phi = self.spectral.phi(total.sums, server["whitener"], server["phi"], width)
            return self._server(phi, server["beta"], key)
        if phase == "scale":
            assert total is not None
            return self._scaled_start(server, total, key)
        k = key.round
        phi, beta = server["phi"], server["beta"]
        empty = total is None or total.count == 0
        if total is None or (empty and total.ratio):
            return server
        i, j, curvature = torch.zeros_like(beta), torch.zeros_like(phi), 0.0
        if not empty:
            i, j = total.scaled("I", facts.clients), total.scaled("J", facts.clients)
            if "curvature" in total.sums:
                curvature = float(total.scaled("curvature", facts.clients)) / facts.clients
        lacking, prior_state = self.prior.normaliser(beta, unprefixed("prior.", server), key)
        if "weight" in total.sums and not empty:  # as much of it as there is of the clients' scores
            i = i + lacking * total.scaled("weight", facts.clients)
        i = i + self.hyperprior.beta_grad(self.prior, beta)
        j = j + self.hyperprior.phi_grad(phi)
        if isinstance(self.phi_step, Average) and total.sums.get("examples") is not None:
            n = total.scaled("examples", facts.clients).clamp(min=1)
            j = j * server["phi_rate"] / n  # the clients' mean move
        new_beta, beta_state = self._beta_step(server, beta, i, curvature, facts, k)
        phi_state = unprefixed("phi.", server)
        new_phi, phi_state = self.phi_optimiser.step(phi, j, phi_state, server["unit"], k, facts.rounds)
        new_phi = new_phi * (self.phi_ball / new_phi.norm().clamp(min=self.phi_ball))
        new_beta = self.prior.project(new_beta)
        average = self.average.update(
            unprefixed("average.", server),
            torch.cat((new_phi, new_beta)),
            self.phi_optimiser.schedule.factor(k, facts.rounds),
            k,
            facts.rounds,
            aligner(self.model, self.prior),
        )
        if self.phi_epochs:
            server = server | {"phi_rate": self._phi_rate(k + 1, facts.rounds, phi)}
        return (
            server
            | {"phi": new_phi, "beta": new_beta}
            | prefixed("phi.", phi_state)
            | prefixed("beta.", beta_state)
            | prefixed("prior.", prior_state)
            | prefixed("average.", average)
        )

    def _beta_step(
        self, server: Tensors, beta: Tensor, i: Tensor, curvature: float, facts: Facts, k: int
    ) -> tuple[Tensor, Tensors]:
        if isinstance(self.beta_step, EM):
            rate = self.beta_step.at(k, facts.rounds)
            # Clients that are all alike leave a prior without width, and EM's step of mu with it: then
            # mu moves by gradient steps of one over the likelihood's mean curvature.
            floor = 1 / curvature if curvature > 0 else 0.0
            rate /= max(1.0, self.hyperprior.stiffness(self.prior, beta, floor) * rate / facts.clients)
            return self.prior.em_step(beta, i / facts.clients, rate, floor), {}
        grad = self.prior.gradient(beta, i)
        unit = self.prior.units(beta)
        assert self.beta_step is not None
        return self.beta_step.step(beta, grad, unprefixed("beta.", server), unit, k, facts.rounds)

    def _scaled_start(self, server: Tensors, total: Message, key: Key) -> Tensors:
        """The prior scale at which the head's outputs have variance one."""
        size, count = total.sums["size"].tolist()
        low, high = self.prior.bounds
        scale = math.sqrt(count / size) if size > 0 and math.isfinite(size) else 1.0
        beta = self.prior.rescaled(server["beta"], min(max(scale, low), high))
        return self._server(server["phi"], beta, key)

    # --- afterwards --------------------------------------------------------------------------

    def publish(self, server: Tensors) -> Tensors:
        theta = self.average.value(unprefixed("average.", server), torch.cat((server["phi"], server["beta"])))
        size = server["phi"].shape[0]
        states = self.prior.published(unprefixed("prior.", server))
        return {"phi": theta[:size], "beta": self.prior.project(theta[size:])} | states

    def phi_at_bound(self, phi: Tensor) -> list[str]:
        """A word about phi where it sits on the edge of its ball."""
        at_edge = phi.numel() > 0 and float(phi.norm()) >= 0.9999 * self.phi_ball
        return [f"phi is at the edge of its ball, {self.phi_ball:g}"] if at_edge else []

    def drift(self, server: Tensors) -> float | None:
        halves = self.average.halves(unprefixed("average.", server))
        if halves is None:
            return None
        return float((halves[1] - halves[0]).norm() / halves[1].norm().clamp(min=1e-30))

    def metrics(self, server: Tensors, info: Info) -> dict[str, float | None]:
        s = info.sums
        clients = s.get("clients", 0.0)
        mean, sd = self.prior.summary(server["beta"], unprefixed("prior.", server))
        return {
            "loss": mean_loss(info),
            "acceptance": s["acceptance"] / clients if clients else None,
            "divergences": s.get("divergences", 0.0),
            "gradient_evaluations": s.get("gradient_evaluations", 0.0),
            "prior_mean_norm": float(mean.norm()),
            "prior_sd": float(sd.square().mean().sqrt()),
        }

    def calibrated(self, trial: Trial) -> FedSOUK:
        """Plain steps with ``rate=None`` get the largest power of ten of whose 20 trial rounds none lowers
        the likelihood, by more than a hundredth of what was gained or (where it is not closed-form) by more
        than it fluctuates."""
        if not (isinstance(self.phi_step, SGD) and self.phi_step.rate is None):
            return self
        exact = self.exact
        for exponent in range(1, -13, -1):
            method = self.with_rate(10.0**exponent)
            path = trial(method, 20)
            moves = sorted(abs(new - old) for old, new in pairwise(path))
            noise = 0.0 if exact else 4 * moves[len(moves) // 2]
            gained = path[-1] - path[0]
            tolerance = max(0.01 * gained, noise)
            if gained >= -noise and all(new >= old - tolerance for old, new in pairwise(path)):
                return method
        raise EstimateError(
            "no step size from 10 down to 1e-12 kept the likelihood from falling over 20 trial rounds"
        )

    def with_rate(self, rate: float) -> FedSOUK:
        """The same plain steps on phi and beta, with this eta_0."""
        changes: dict[str, Any] = {
            name: replace(step, rate=rate)
            for name in ("phi_step", "beta_step")
            if isinstance(step := getattr(self, name), SGD)
        }
        return replace(self, **changes)

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        """Draws from p(z | D_i, theta) with theta frozen: several chains, burn-in, adaptation off."""
        phi, beta = published["phi"], published["beta"]
        key = key.at(purpose="final")
        kernel = self.markov_kernel if self.markov_kernel.adjusted else self._final_kernel()
        with torch.no_grad():
            target = self.target(phi, beta, self.model.features(phi, cohort), cohort)
            start = key.at(purpose="start")
            z = self.draw_prior(beta, cohort.ids, start, self.final.chains, published.get("states"))
            tuning = self._first_tuning(kernel, len(cohort), beta)
            if not (target.closed_form and isinstance(kernel, Exponential | MixtureDraw)):
                for part in range(self.final.burn_in // 10):
                    warm = key.at(purpose=f"warm-{part}")
                    trace = run(kernel, target, z, tuning, 10, warm, cohort.ids, adapt=True)
                    z, tuning = trace.state.z, trace.tuning
            trace = run(kernel, target, z, tuning, self.final.draws, key, cohort.ids, adapt=False)
        return {"draws": trace.draws.transpose(1, 2)}

    def _final_kernel(self) -> Kernel:
        # What users see should have the right law: the exact step or HMC, whatever training used.
        return resolve_kernel(None, self.model, self.prior)

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        """The posterior predictive: the average of p(y | x, z) over the draws of z."""
        phi = published["phi"]
        with torch.no_grad():
            draws = personal["draws"].reshape(-1, personal["draws"].shape[-1])
            eta = self.model.outputs_at(phi, draws, x)
        return Predictive(eta, self.model.likelihood, self.model.params(phi), key, plug_in=False)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> Tensors:
        phi, beta = published["phi"], published["beta"]
        key = key.at(purpose="score")
        with torch.no_grad():
            target = self.target(phi, beta, self.model.features(phi, cohort), cohort)
            tuning = Tuning.from_local(local)
            trace = run(self.markov_kernel, target, local["z"], tuning, 20, key, cohort.ids, adapt=False)
            draws = trace.draws[:, 5:].flatten(1, 2)
            features = self.model.features(phi, held_out)
            log_prob = per_example(self.model, phi, draws, features, held_out)
        total = torch.logsumexp(log_prob, 0) - math.log(log_prob.shape[0])
        return {"log_prob": total.sum().double(), "examples": held_out.sizes.sum().double()}
