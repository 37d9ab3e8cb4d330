"""Has theta converged? How many nats a local optimum lies above the returned theta, where that can be known.

For small models it is half of s' I^-1 s: s the gradient of the objective (marginal likelihood and
hyperprior) at the published theta, I its observed information by Louis' identity. That is what a Newton step
would gain, whatever the parameters' units. Gauge directions, fixed parameters and bounds that the gradient
pushes against are projected out. Where posteriors are closed-form it is exact. Elsewhere s is an average over
draws, and its noise adds tr(I^-1 Cov) / 2 on average: estimated from half-chains, and subtracted. An
information that is not positive definite belongs to no maximum.

It certifies a local optimum; whether there is a better one elsewhere it cannot tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.evaluation.information import (
    LARGEST_SAMPLED_INFORMATION,
    free_directions,
    gauge_directions,
    score_and_information,
)
from fedpop.evaluation.louis import louis
from fedpop.evaluation.verdict import CONVERGED_NATS, Distance
from fedpop.kernels import Hierarchy
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.priors.base import Prior, Sets
from fedpop.questions import Question, Units

LARGEST_EXACT_VERDICT = 500
"""Parameters up to which a model with closed-form posteriors is small: its information is a matrix of that
size, found at the end of each stage, and each client sends its own."""
FLAT_CURVATURE = 1e-9
"""Curvature below this, relative to the largest, is rounding: a direction that nothing depends on. Sums over
clients in double precision leave some 1e-13 of the largest, and a curved path has its gradient's too."""
UPWARD_CURVATURE = 1e-3
"""Curvature upwards, in units of each parameter's own information, from which theta is at no maximum whatever
the gradient: half of it is what a step of a standard error gains."""
AT_BOUND_SHARE = 0.01
"""A bound that lies within this share of a parameter's size is one that it has reached."""


def small(hierarchy: Hierarchy, phi: Tensor, beta: Tensor) -> bool:
    """Whether theta's distance from a local optimum can be computed."""
    return obstacle(hierarchy, phi, beta) is None


def obstacle(hierarchy: Hierarchy, phi: Tensor, beta: Tensor) -> str | None:
    """Why it cannot be, or None."""
    if not hierarchy.prior.normalised:  # its information is not an average over posteriors
        return f"the constant of {hierarchy.prior.name} priors is not known"
    if any(not q.requires_grad and q.dtype != torch.float64 for q in _weights(hierarchy)):
        return "frozen weights are in single precision"
    if not hierarchy.model.twice_in_double:
        return "a layer has no second derivatives, or none in double precision"
    most = LARGEST_EXACT_VERDICT if hierarchy.closed_form else LARGEST_SAMPLED_INFORMATION
    size = phi.numel() + beta.numel()
    return None if 0 < size <= most else f"theta has {size} parameters, more than {most}"


def _weights(hierarchy: Hierarchy) -> list[torch.nn.Parameter]:
    return [q for m in hierarchy.model.modules() for q in m.parameters()]


class Landing(NamedTuple):
    """How far theta is from a local optimum, and the inverse of the information there ``[p, p]`` off excluded
    directions: what a Newton step goes by. None where the information is not positive."""

    distance: Distance
    inverse: Tensor | None


@dataclass(frozen=True)
class ToTheOptimum(Question[Landing]):
    """The gradient, its noise and the information, summed over everyone; and what they say of theta."""

    hierarchy: Hierarchy
    name: ClassVar[str] = "distance from a local optimum"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("phi", "beta")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        phi, beta, cohort = asked["phi"], asked["beta"], units.cohort
        everyone = torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
        if self.hierarchy.closed_form:
            score, own = score_and_information(self.hierarchy, phi, beta, cohort)
            return Answer(everyone, sums={"score": score, "information": own.flatten()})
        found = louis(self.hierarchy, phi, beta, cohort, units.personal()["draws"])
        sums = {
            "score": found.score,
            "information": found.information.flatten(),
            "noise": found.noise.flatten(),
            "errors": found.errors.flatten(),
        }
        return Answer(everyone, sums=sums)

    def finish(self, known: Tensors, total: Total) -> Landing:
        phi, beta, sums = known["phi"].double(), known["beta"].double(), total.weighted
        if not all(bool(torch.isfinite(v).all()) for v in sums.values()):
            raise EstimateError("theta's distance from an optimum: some client's gradient is not finite")
        theta, size = torch.cat((phi, beta)), phi.shape[0]
        p = theta.shape[0]
        hyper, prior = self.hierarchy.hyperprior, self.hierarchy.prior

        def slope(theta: Tensor) -> Tensor:
            return torch.cat((hyper.phi_grad(theta[:size]), hyper.beta_grad(prior, theta[size:])))

        score = sums["score"].double() + slope(theta)
        # Hyperpriors are Normal in each coordinate: their curvature is a constant diagonal.
        bend = slope(theta) - slope(theta + 1)
        curvature = sums["information"].double().reshape(p, p) + torch.diag(bend)
        noise = sums["noise"].double().reshape(p, p) if "noise" in sums else torch.zeros_like(curvature)
        learned = torch.cat((torch.ones_like(phi), prior.mask(torch.ones_like(beta)))).bool()
        fixed = torch.eye(p, dtype=theta.dtype, device=theta.device)[:, ~learned]
        ball = float(known.get("ball", math.inf))
        at_bounds = directions_at_bounds(self.hierarchy.prior, phi, beta, score, ball, Sets.of(known))
        gauge = gauge_directions(self.hierarchy, phi, beta)
        errors = sums["errors"].double().reshape(-1, p, p) if "errors" in sums else None
        return landing(score, curvature, noise, torch.cat((fixed, at_bounds, gauge), dim=1), errors)


def landing(
    score: Tensor, curvature: Tensor, noise: Tensor, excluded: Tensor, errors: Tensor | None = None
) -> Landing:
    """Half of s' I^-1 s off the excluded directions ``[p, h]``, its Monte-Carlo part subtracted.

    Along a scale that is all but zero scores are pure noise, and so is their curvature: one that is less than
    the ``errors`` of it ``[K, p, p]`` leave open bends neither way, and is taken to be as large as they are.

    >>> import torch
    >>> one = torch.eye(2, dtype=torch.float64)
    >>> found = landing(torch.tensor([2.0, 5.0]).double(), 4 * one, 0 * one, one[:, 1:])
    >>> found.distance.nats, found.inverse.abs().tolist()
    (0.5, [[0.25, 0.0], [0.0, 0.0]])
    """
    basis = free_directions(curvature, excluded)
    inner = basis.mT @ curvature @ basis
    values, vectors = torch.linalg.eigh(0.5 * (inner + inner.mT))
    if len(values) == 0:
        return Landing(Distance(0.0, 0.0, 0, exact=not bool(noise.any())), None)
    directions = basis @ vectors
    along, spread = directions.mT @ score, directions.mT @ noise @ directions
    exact, largest = not bool(noise.any()), values.abs().max()
    open_ = torch.zeros_like(values) if errors is None else _left_open(directions.mT @ errors @ directions)
    # Along a curved path on which nothing depends, straight lines seem to curve by the gradient's rounding.
    steep = (values < -UPWARD_CURVATURE) | (along.square() > 2 * CONVERGED_NATS * values.abs())
    upwards = int(((values < -FLAT_CURVATURE * largest) & (values < -open_) & steep).sum())
    curved = (values > FLAT_CURVATURE * largest) | (open_ > values.abs())
    s, v, c = along[curved], torch.maximum(values, open_)[curved], spread[curved][:, curved]
    ratio = c / v.sqrt()[:, None] / v.sqrt()
    white = s / v.sqrt()
    nats = 0.5 * float(white.square().sum() - ratio.diagonal().sum())
    # A slope where nothing curves, as on a plateau, gains no less than it would at the largest curvature.
    flat = ~curved & (values.abs() <= FLAT_CURVATURE * largest)
    idle = along[flat].square() - spread.diagonal()[flat]
    nats += 0.5 * float(idle.clamp(min=0).sum() / largest.clamp(min=1e-300))
    variance = float((white @ ratio @ white).clamp(min=0) + 0.5 * ratio.square().sum())
    ahead = directions[:, curved]
    inverse = None if upwards else ahead / v.clamp(min=UPWARD_CURVATURE * (1 - exact)) @ ahead.mT
    return Landing(Distance(max(nats, 0.0), variance**0.5, upwards, exact), inverse)


def _left_open(errors: Tensor) -> Tensor:
    """How large a curvature noise alone may make along each direction, from K errors ``[K, q, q]``: the
    largest eigenvalue of a matrix of noise is about twice the norm of a row."""
    rows = errors - errors.mean(0)
    return 2 * (rows.square().sum(2).sum(0) / (len(rows) - 1)).sqrt()


def directions_at_bounds(
    prior: Prior, phi: Tensor, beta: Tensor, score: Tensor, ball: float, sets: Sets | None = None
) -> Tensor:
    """Directions ``[p, h]`` in which theta would leave its projection sets if it followed the gradient."""
    size, p = phi.shape[0], score.shape[0]
    out = []
    if size and float(phi.norm()) >= (1 - AT_BOUND_SHARE) * ball and float(phi @ score[:size]) > 0:
        out.append(torch.cat((phi / phi.norm(), torch.zeros_like(beta))))
    reach = AT_BOUND_SHARE * beta.abs().clamp(min=1)
    pushed = score[size:].sign() * reach
    for j in range(len(beta)):
        step = torch.zeros_like(beta)
        step[j] = pushed[j]
        moved = prior.project(beta + step, sets) - prior.project(beta, sets)
        if float(step.norm()) > 0 and float(moved.norm()) < 0.5 * float(step.norm()):
            out.append(torch.cat((torch.zeros_like(phi), step / step.norm())))
    if not out:
        return score.new_zeros((p, 0))
    return torch.stack(out, dim=1)
