"""Maximum marginal likelihood (empirical Bayes): where nothing has to be sampled.

With a normal likelihood, a linear head and a Normal prior the marginal likelihood

    log p(D | theta) = sum_i log N(y_i; F_i mu, F_i Sigma F_i' + s2 I),    F_i the features at phi,

its gradient and its Hessian are sums over units. With everyone answering, uncompressed and in double
precision, the server runs a quasi-Newton method on theta = (phi, beta):

    unit     log p(D_i | theta) at the trial theta, and its gradient; twice or so the Hessian as well
    server   BFGS with a line search: one evaluation a round, all of its state in the open

The same optimum as that of Algorithm 1 (``fedsouk``), in tens of rounds. Units keep nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Positive
from fedpop.client.losses import finite
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy
from fedpop.kernels.evidence import Evidence, evidence, runs_in_double
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.message.guard import MESSAGES_FOR_A_MEDIAN
from fedpop.message.message import prefixed, unprefixed
from fedpop.methods.base import About, EndsByItself, Facts, Round
from fedpop.methods.hierarchical import Hierarchical
from fedpop.models.modules import has_dropout
from fedpop.priors.base import Sets, into_ball
from fedpop.questions import Question
from fedpop.questions.contributions import Contributions
from fedpop.server.quasi_newton import SearchState, begun_again, tell

SEARCH_NATS = 1e-7
"""Nats that a Newton step still promises where the search is over."""
STAGE_NATS = 0.1
"""The same for a stage of annealing, which only has to find the next one's start."""
LARGEST_THETA_WITH_HESSIANS = 100
"""Parameters up to which each stage asks for the Hessian: a third of the rounds, for as many bytes."""
ANNEALING_STAGES = 5
"""Variances of the noise that are gone through before its own, from half the variance of y, geometrically."""
KEPT = ("unit", "sets", "ball", "missing", "received", "noises")
"""What the server keeps from trial to trial, beside the search itself."""


def obstacle(hierarchy: Hierarchy) -> str | None:
    """What keeps this method from a model and a prior, in words; None where nothing does."""
    model, prior = hierarchy.model, hierarchy.prior
    if not model.linear:
        return "posteriors are not closed-form: the head is not linear"
    if not model.likelihood.quadratic:
        return f"posteriors are not closed-form: the likelihood is {model.likelihood.name}"
    if prior.component is not prior:
        return f"posteriors are not closed-form: the prior is {prior.name}"
    if any(has_dropout(m) for m in model.modules()):
        return "dropout and augmentation make the likelihood random"
    if not model.twice_in_double:
        return "a layer has no second derivatives, or none in double precision"
    if not runs_in_double(hierarchy):
        return "frozen weights, or the model's precision, are not double"
    return None


def annealed(hierarchy: Hierarchy, left: Tensor | None) -> Tensor:
    """Variances of the noise, falling, for a backbone that has to find its features: where noise is small
    beside the spread of y (``left``, about the pooled fit) the likelihood has optima in wrong subspaces."""
    model = hierarchy.model
    none = model.initial_z().new_zeros(0, dtype=torch.float64)
    backbone = any(not name.startswith(("likelihood.", "fixed.")) for name in model.phi_layout.names)
    if left is None or not backbone:
        return none
    first, last = 0.5 * float(left), model.likelihood.given_noise
    if last is None:
        return none.new_tensor([first])
    share = torch.arange(ANNEALING_STAGES, dtype=none.dtype, device=none.device) / ANNEALING_STAGES
    return none if first <= last else first ** (1 - share) * last**share


@dataclass(frozen=True, kw_only=True)
class MaximumMarginalLikelihood(Hierarchical, EndsByItself):
    """theta by quasi-Newton steps on the marginal likelihood; every z by exact draws from its posterior.

    ``fp.FedSOUL(model)`` takes this method by itself where it applies; see its ``engine``.

    Args:
        model: What is fitted: a linear head with a normal likelihood, on any backbone without dropout.
        prior: The population's: a Normal one, of ``fp.priors`` or by name; "normal" by default.
        hyperprior: Of phi and the prior's parameters; flat by default.
        start: Where phi starts: "spectral", "random", or "auto" (the default) for what suits the data.
        final: The pass that gives the draws users see; ``fp.chains.Final()`` by default.
        ball: The largest norm of phi; None (the default) is a million times that of its start, or of one.
        compressor: Stays "identity": a search for an optimum wants sums as they are.
        clip: Stays None, for the same reason.
        guard: How many times the median of what a client adds to score and information, where theta starts,
            makes it absurd: it is named, and takes no part in the search; 1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
    >>> method = fp.MaximumMarginalLikelihood(model, prior="diagonal")
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])])
    >>> round(population.prior_mean[0].item(), 2), population.convergence.converged
    (3.0, True)
    """

    ball: Positive | None = None

    name: ClassVar[str] = "Marginal-ML"
    about: ClassVar[About] = About(
        "Lindstrom and Bates, JASA 1988",
        personalised=True,
        local_steps=False,
        bounds=False,
        memory="M d + d_phi",
        instance="itself, with posteriors in closed form",
    )
    participation: ClassVar[str] = "full"
    as_it_is: ClassVar[str] = "a search for an optimum wants sums as they are"

    def check(self, names: Sequence[str]) -> None:
        super().check(names)
        if (why := obstacle(self.hierarchy)) is not None:
            raise SettingsError(f"{self.label} cannot be used here: {why}; fedpop.FedSOUL samples instead")

    @property
    def size(self) -> int:
        """Parameters in all."""
        return self.model.phi_layout.size + self.hierarchy.prior.size(self.model.z_layout.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.initial_z().dtype

    # --- what a round asks -------------------------------------------------------------------

    def questions(self, facts: Facts, key: Key) -> tuple[Question[Tensors], ...]:
        phi = self.first_phi(facts, key)
        asked = tuple(self.start_questions(phi, facts.restart, anneals=True))
        if self.guard is None or facts.clients < MESSAGES_FOR_A_MEDIAN:
            return asked
        return (*asked, Contributions(self.hierarchy, phi))

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        """The server's state before the first round: the first trial is the start itself."""
        phi, beta = self.first_theta(facts, key, known)
        server, x = self.first_sets(phi, beta, self.ball), torch.cat((phi, beta)).double()
        units = torch.cat((server["unit"], self.hierarchy.prior.units(beta))).double()
        noises = annealed(self.hierarchy, known.get("left"))
        server |= {"unit": units, "missing": x.new_zeros(()), "noises": noises}
        return self._asking(server, SearchState.at(x))

    def _asking(self, server: Tensors, state: SearchState) -> Tensors:
        """The server's state with the next trial in it, as it is broadcast."""
        size = self.model.phi_layout.size
        server = {n: t for n, t in server.items() if n in KEPT}
        if len(server["noises"]):
            server["noise"] = server["noises"][0]
        if state.wants_curvature:
            server["curved"] = state.x.new_ones(())
        trial = {"phi": state.trial[:size], "beta": state.trial[size:]}
        return server | trial | prefixed("search.", state.tensors())

    def broadcast(self, server: Tensors) -> Tensors:
        return {n: server[n] for n in ("phi", "beta", "curved", "noise") if n in server}

    # --- what units answer -------------------------------------------------------------------

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        """log p(D_i | theta), its gradient, and its Hessian where it is asked for: as one sum, or each."""
        broadcast, hierarchy = round.broadcast, self.hierarchy
        theta, curved = torch.cat((broadcast["phi"], broadcast["beta"])), "curved" in broadcast
        noise = float(broadcast["noise"]) if "noise" in broadcast else None
        if round.coefficients is not None:
            whole = evidence(hierarchy, theta, cohort, curved, noise)
            good = self._fit(whole.values) & self._fit(whole.sizes)
            if bool(good.all()) and all(bool(self._fit(v).all()) for v in _sent(whole).values()):
                return Answer(good, sums=_sent(whole), cost=self._cost(cohort, whole.values, good, curved))
        # Somebody is not finite, or each message travels alone.
        each = [evidence(hierarchy, theta, one, curved, noise) for one in cohort.one_by_one()]
        sent = [_sent(own) for own in each]
        vectors = {n: torch.stack([own[n] for own in sent]) for n in sent[0]}
        good = finite(*[v.to(self.dtype) for v in vectors.values()])
        good = good & self._fit(torch.cat([own.sizes for own in each]))
        values = vectors["evidence"].squeeze(1)
        return Answer(good, vectors, cost=self._cost(cohort, values, good, curved))

    def _fit(self, numbers: Tensor) -> Tensor:
        """What the model's own type could hold: a unit whose numbers overflow there is left out here too."""
        return torch.isfinite(numbers.to(self.dtype))

    def _cost(self, cohort: Cohort, values: Tensor, good: Tensor, curved: bool) -> Mapping[str, float]:
        """A backward pass for each parameter beside the first one, where the Hessian is wanted."""
        times = 1.0 + self.size if curved else 1.0
        return {
            "log_likelihood": float(values[good].sum()),
            "examples": float(cohort.sizes[good].sum()),
            "gradient_evaluations": times * len(cohort),
            "head_steps": times * cohort.examples,
            "backbone_passes": 0.0 if cohort.embedded else times * cohort.examples,
        }

    # --- what the server makes of it ---------------------------------------------------------

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        """The next trial of the search."""
        state = SearchState.of(unprefixed("search.", server))
        received = int(server.get("received", torch.tensor(total.count)))
        if not total.count:
            return server
        if total.count < received and not int(server["missing"]):
            # A message may have been lost: ask again, once, before the point counts as outside.
            return server | {"missing": torch.ones_like(server["missing"])}
        theta, hyper, prior = state.trial, self.hyperprior, self.hierarchy.prior
        size = self.model.phi_layout.size
        phi, beta = theta[:size], theta[size:]
        value = float(total.plain_sum("evidence", theta.new_zeros(1))) + hyper.value(prior, phi, beta)
        f = -value if total.count >= received else float("inf")
        slope = total.plain_sum("gradient", theta)
        slope = slope + torch.cat((hyper.phi_grad(phi), hyper.beta_grad(prior, beta)))
        inside = partial(self._project, server)
        learned = torch.cat((torch.ones_like(phi), prior.mask(torch.ones_like(beta)))) > 0
        # What a small step upwards would carry across a bound is held there.
        step = 1e-9 * theta.abs().clamp(min=1.0) * slope.sign()
        free = learned & ~((inside(theta + step) == theta) & (slope != 0))
        curvature = None
        if state.wants_curvature:
            curvature = hyper.curvature(prior, phi, beta)
            triangle = _triangle(curvature)
            lower = torch.zeros_like(curvature)
            lower[triangle] = total.plain_sum("hessian", curvature[triangle])
            curvature = curvature - lower - lower.tril(-1).mT
            # What is fixed, or held at a bound, has no part in it.
            curvature = torch.where(free.unsqueeze(1) & free, curvature, torch.diag((~free).to(theta.dtype)))
        noises = server["noises"]
        tolerance = STAGE_NATS if len(noises) else SEARCH_NATS
        state = tell(state, f, torch.where(free, -slope, 0.0), curvature, server["unit"], tolerance)
        if len(noises) and (state.over or state.wants_curvature):  # this stage is done
            state = begun_again(state, curved=len(theta) <= LARGEST_THETA_WITH_HESSIANS)
            server = server | {"noises": noises[1:]}
        server = server | {
            "missing": torch.zeros_like(server["missing"]),
            "received": theta.new_tensor(received),
        }
        return self._asking(server, state.moved(inside(state.x), inside(state.trial)))

    def _project(self, server: Tensors, theta: Tensor) -> Tensor:
        size, prior, sets = self.model.phi_layout.size, self.hierarchy.prior.component, Sets.of(server)
        assert prior is not None
        return torch.cat((into_ball(theta[:size], float(server["ball"])), prior.boxed(theta[size:], sets)))

    def over(self, server: Tensors) -> bool:
        return SearchState.of(unprefixed("search.", server)).over

    # --- afterwards --------------------------------------------------------------------------

    def publish(self, server: Tensors) -> Tensors:
        """The best point so far, in the model's own type."""
        state = SearchState.of(unprefixed("search.", server))
        size, theta = self.model.phi_layout.size, state.x.to(self.dtype)
        beta = self.hierarchy.prior.project(theta[size:], Sets.of(server))
        return {"phi": theta[:size], "beta": beta} | {n: server[n] for n in ("sets", "ball")}

    def metrics(self, server: Tensors, cost: Mapping[str, float]) -> dict[str, float | None]:
        """And where the search stands: the objective at its best point, what a Newton step promises there."""
        search = unprefixed("search.", server)
        f, gain = float(search["f"]), float(search["gain"])
        known = abs(f) < float("inf") and not len(server["noises"])  # of annealed noise it says little
        return super().metrics(server, cost) | {
            "log_posterior": -f if known else None,
            "promised": gain if gain < float("inf") else None,
        }


def _triangle(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a symmetric matrix that are sent."""
    rows, cols = torch.tril_indices(*matrix.shape, device=matrix.device)
    return rows, cols


def _sent(own: Evidence) -> Tensors:
    sent = {"evidence": own.values.sum().reshape(1), "gradient": own.gradient}
    return sent if own.hessian is None else sent | {"hessian": own.hessian[_triangle(own.hessian)]}
