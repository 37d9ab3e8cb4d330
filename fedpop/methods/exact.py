"""The exact engine of FedSOUK: where conditional expectations are closed-form, nothing has to be sampled.

With a normal likelihood, a linear head and a Normal prior the marginal likelihood and its gradient are sums
over units. With everyone answering, uncompressed and in double precision, the server runs a quasi-Newton
method on theta = (phi, beta): the same optimum as Algorithm 1's, in tens of rounds, each of them one
evaluation. Units keep no chain and send value and gradient, twice or so the Hessian as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedpop.client.cost import finite
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy
from fedpop.kernels.evidence import Evidence, evidence, runs_in_double
from fedpop.message import Answer, Tensors, Total
from fedpop.models.modules import has_dropout
from fedpop.priors.base import into_ball
from fedpop.server.quasi_newton import SearchState, begun_again, tell
from fedpop.server.state import prefixed, unprefixed

TOLERANCE = 1e-7
"""Nats that a Newton step still promises where the search is over."""
LOOSE = 0.1
"""The same for a stage of annealing, which only has to find the next one's start."""
SMALL = 100
"""Parameters up to which each stage asks for the Hessian: a third of the rounds, for as many bytes."""
STAGES = 5
"""Variances of the noise that are gone through before its own, from half the variance of y, geometrically."""


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
    share = torch.arange(STAGES, dtype=none.dtype, device=none.device) / STAGES
    return none if first <= last else first ** (1 - share) * last**share


def obstacle(hierarchy: Hierarchy) -> str | None:
    """What keeps the exact engine from this model and prior, in words; None where nothing does."""
    model, prior = hierarchy.model, hierarchy.prior
    if not hierarchy.closed_form or prior.component is not prior:
        return "it needs closed-form posteriors: a normal likelihood, a linear head and a Normal prior"
    if any(has_dropout(m) for m in model.modules()):
        return "dropout and augmentation make the likelihood random"
    if not runs_in_double(hierarchy):
        return "it computes in double precision, and this model's frozen weights or precision do not"
    return None


KEPT = ("unit", "sets", "ball", "missing", "heard", "noises")
"""What the server keeps from trial to trial, beside the search itself."""


@dataclass(frozen=True)
class ExactEngine:
    """Rounds of the exact engine on a hierarchy."""

    hierarchy: Hierarchy

    # --- what a round asks, and what units answer --------------------------------------------

    def first(
        self, phi: Tensor, beta: Tensor, unit: Tensor, sets: Tensor, ball: Tensor, left: Tensor | None = None
    ) -> Tensors:
        """The server's state before the first round: the first trial is the start itself."""
        x = torch.cat((phi, beta)).double()
        units = torch.cat((unit, self.hierarchy.prior.units(beta))).double()
        missing, noises = x.new_zeros(()), annealed(self.hierarchy, left)
        server = {"unit": units, "sets": sets, "ball": ball, "missing": missing, "noises": noises}
        return self._asking(server, SearchState.at(x))

    def _asking(self, server: Tensors, state: SearchState) -> Tensors:
        """The server's state with the next trial in it, as sites are told."""
        size = self.hierarchy.model.phi_layout.size
        server = {n: t for n, t in server.items() if n in KEPT}
        if len(server["noises"]):
            server["noise"] = server["noises"][0]
        if state.wants_curvature:
            server["curved"] = state.x.new_ones(())
        trial = {"phi": state.trial[:size], "beta": state.trial[size:]}
        return server | trial | prefixed("search.", state.tensors())

    def answer(self, told: Tensors, cohort: Cohort, summed: bool) -> Answer:
        """log p(D_i | theta), its gradient, and its Hessian where it is asked for: as one sum, or each."""
        theta, curved, hierarchy = torch.cat((told["phi"], told["beta"])), "curved" in told, self.hierarchy
        if "noise" in told:
            hierarchy = hierarchy.at_noise(float(told["noise"]))
        if summed:
            whole = evidence(hierarchy, theta, cohort, curved)
            good = self._fit(whole.values) & self._fit(whole.sizes)
            if bool(good.all()) and all(bool(self._fit(v).all()) for v in _sent(whole).values()):
                cost = self._cost(cohort, whole.values, curved)
                return Answer(good, sums=_sent(whole), cost=cost)
        # Somebody is not finite, or each message travels alone.
        each = [evidence(hierarchy, theta, one, curved) for one in cohort.one_by_one()]
        sent = [_sent(own) for own in each]
        vectors = {n: torch.stack([own[n] for own in sent]) for n in sent[0]}
        good = finite(*[v.to(self._own_type) for v in vectors.values()])
        good = good & self._fit(torch.cat([own.sizes for own in each]))
        values = vectors["evidence"].squeeze(1)
        return Answer(good, vectors, cost=self._cost(cohort, values[good], curved))

    @property
    def _own_type(self) -> torch.dtype:
        return self.hierarchy.model.initial_z().dtype

    def _fit(self, numbers: Tensor) -> Tensor:
        """What the model's own type could hold: a unit whose numbers overflow there is left out here too."""
        return torch.isfinite(numbers.to(self._own_type))

    def _cost(self, cohort: Cohort, values: Tensor, curved: bool) -> Mapping[str, float]:
        """A backward pass for each parameter beside the first one, where the Hessian is wanted."""
        p = self.hierarchy.model.phi_layout.size + self.hierarchy.prior.size(
            self.hierarchy.model.z_layout.size
        )
        times = 1.0 + p if curved else 1.0
        return {
            "log_likelihood": float(values.sum()),
            "examples": float(cohort.examples),
            "gradient_evaluations": times * len(cohort),
            "head_steps": times * cohort.examples,
            "backbone_passes": 0.0 if cohort.embedded else times * cohort.examples,
        }

    # --- what the server makes of it ---------------------------------------------------------

    def step(self, server: Tensors, total: Total) -> Tensors:
        """The next trial of the search."""
        state = SearchState.of(unprefixed("search.", server))
        heard = int(server.get("heard", torch.tensor(total.count)))
        if not total.count:
            return server
        if total.count < heard and not int(server["missing"]):
            # A message may have been lost: ask again, once, before the point counts as outside.
            return server | {"missing": torch.ones_like(server["missing"])}
        theta, hyper, prior = state.trial, self.hierarchy.hyperprior, self.hierarchy.prior
        size = self.hierarchy.model.phi_layout.size
        phi, beta = theta[:size], theta[size:]
        value = float(total.estimate("evidence", theta.new_zeros(1))) + hyper.value(prior, phi, beta)
        f = -value if total.count >= heard else float("inf")
        slope = total.estimate("gradient", theta)
        slope = slope + torch.cat((hyper.phi_grad(phi), hyper.beta_grad(prior, beta)))
        inside = partial(self._project, server)
        free = self._free(theta, slope, inside)
        curvature = None
        if state.wants_curvature:
            curvature = hyper.curvature(prior, phi, beta)
            triangle = _triangle(curvature)
            lower = torch.zeros_like(curvature)
            lower[triangle] = total.estimate("hessian", curvature[triangle])
            curvature = curvature - lower - lower.tril(-1).mT
            # What is fixed, or held at a bound, has no part in it.
            curvature = torch.where(free.unsqueeze(1) & free, curvature, torch.diag((~free).to(theta.dtype)))
        noises = server["noises"]
        tolerance = LOOSE if len(noises) else TOLERANCE
        state = tell(state, f, torch.where(free, -slope, 0.0), curvature, server["unit"], tolerance)
        if len(noises) and (state.over or state.wants_curvature):  # this stage is done
            state = begun_again(state, curved=len(theta) <= SMALL)
            server = server | {"noises": noises[1:]}
        server = server | {"missing": torch.zeros_like(server["missing"]), "heard": theta.new_tensor(heard)}
        return self._asking(server, state.moved(inside(state.x), inside(state.trial)))

    def _project(self, server: Tensors, theta: Tensor) -> Tensor:
        size, prior = self.hierarchy.model.phi_layout.size, self.hierarchy.within(server).prior
        return torch.cat((into_ball(theta[:size], float(server["ball"])), prior.boxed(theta[size:])))

    def _free(self, theta: Tensor, slope: Tensor, inside: Callable[[Tensor], Tensor]) -> Tensor:
        """Coordinates that are learned, and that a small step upwards does not carry across a bound."""
        size, prior = self.hierarchy.model.phi_layout.size, self.hierarchy.prior
        learned = torch.cat((torch.ones_like(theta[:size]), prior.mask(torch.ones_like(theta[size:])))) > 0
        step = 1e-9 * theta.abs().clamp(min=1.0) * slope.sign()
        held = (inside(theta + step) == theta) & (slope != 0)
        return learned & ~held

    # --- afterwards --------------------------------------------------------------------------

    def publish(self, server: Tensors) -> Tensors:
        """The best point so far, in the model's own type."""
        state = SearchState.of(unprefixed("search.", server))
        size, theta = self.hierarchy.model.phi_layout.size, state.x.to(self._own_type)
        prior = self.hierarchy.within(server).prior
        sets = {n: server[n] for n in ("sets", "ball")}
        return {"phi": theta[:size], "beta": prior.project(theta[size:])} | sets

    def metrics(self, server: Tensors) -> dict[str, float | None]:
        """Where the search stands: the objective at its best point, and what a Newton step promises there."""
        search = unprefixed("search.", server)
        f, gain = float(search["f"]), float(search["gain"])
        finite = abs(f) < float("inf") and not len(server["noises"])  # of annealed noise it says little
        return {"log_posterior": -f if finite else None, "promised": gain if gain < float("inf") else None}

    def over(self, server: Tensors) -> bool:
        return SearchState.of(unprefixed("search.", server)).over


def _triangle(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Where a symmetric matrix is told."""
    rows, cols = torch.tril_indices(*matrix.shape, device=matrix.device)
    return rows, cols


def _sent(own: Evidence) -> Tensors:
    sent = {"evidence": own.values.sum().reshape(1), "gradient": own.gradient}
    return sent if own.hessian is None else sent | {"hessian": own.hessian[_triangle(own.hessian)]}
