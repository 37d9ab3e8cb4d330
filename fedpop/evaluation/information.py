"""Uncertainty about theta itself: draws from its asymptotic normal law.

The observed information is that of the marginal likelihood. By Louis' identity it is a sum over clients of
E_i[-hess log p(D_i, z)] - Cov_i[grad log p(D_i, z)], an additive message. With a linear head and a normal
likelihood both expectations are closed-form, and their difference is the Hessian of the closed-form
marginal, which is how it is computed there; elsewhere both are averages over draws of z. Directions that
the model cannot tell apart (a rotation of the features, say) carry no information and are projected out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.evaluation.louis import louis, require_double
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy
from fedpop.kernels.evidence import exact_target, rematerialised
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.priors.base import Sets
from fedpop.priors.normal import Normal
from fedpop.questions import Question, Units
from fedpop.server.averaging import Gauge
from fedpop.server.quasi_newton import rows_of_jacobian

LARGEST_EXACT_INFORMATION = 2000
"""Parameters up to which the information of closed-form posteriors is computed: 32 MB, once."""
LARGEST_SAMPLED_INFORMATION = 200
"""Parameters up to which Louis' identity is used with draws: it needs all scores and a Hessian."""
THETA_DRAWS = 100
"""Of theta's asymptotic law, for predictions that do not take it as known."""
NULL_DIRECTION = 1e-8
"""Singular values below this, of vectors of length one, are rounding: the vectors depend on each other."""
LEAST_INFORMATION = 1e-10
"""Of the largest eigenvalue: less, in units of each parameter's own information, is none."""


def information(hierarchy: Hierarchy, phi: Tensor, beta: Tensor, cohort: Cohort) -> Tensor:
    """A cohort's part of the observed information at theta = (phi, beta), in double precision."""
    return score_and_information(hierarchy, phi, beta, cohort)[1]


def score_and_information(
    hierarchy: Hierarchy, phi: Tensor, beta: Tensor, cohort: Cohort
) -> tuple[Tensor, Tensor]:
    """A cohort's part of the marginal likelihood's gradient ``[p]`` and of its information ``[p, p]``."""
    theta = torch.cat((phi, beta)).double().requires_grad_()
    require_double(hierarchy, theta)
    with torch.enable_grad():
        value = exact_target(hierarchy, theta, cohort).evidence().sum()
        (score,) = torch.autograd.grad(value, theta, create_graph=True)
        hessian = rows_of_jacobian(score, theta, batched=not rematerialised(hierarchy, cohort))
    return score.detach(), -0.5 * (hessian + hessian.mT)


def derivative(function: Callable[[Tensor], Tensor], at: Tensor, along: Tensor) -> Tensor:
    """The derivative of a function in one direction, by two backward passes over scalars."""
    at = at.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = function(at)
        weight = torch.zeros_like(value).requires_grad_()
        (back,) = torch.autograd.grad((value * weight).sum(), at, create_graph=True)
        (out,) = torch.autograd.grad((back * along).sum(), weight)
    return out


def sampled_information(
    hierarchy: Hierarchy, phi: Tensor, beta: Tensor, cohort: Cohort, draws: Tensor
) -> Tensor:
    """The same by Louis' identity, from posterior draws ``[C, S, d]``."""
    return louis(hierarchy, phi, beta, cohort, draws.unsqueeze(1)).information


def gauge_directions(hierarchy: Hierarchy, phi: Tensor, beta: Tensor) -> Tensor:
    """An orthonormal basis ``[p, g]`` of the directions in theta that change no prediction."""
    gauge, normal = Gauge.of(hierarchy.model, hierarchy.prior), hierarchy.prior.component
    theta = torch.cat((phi, beta)).double()
    if gauge is None or normal is None:
        return theta.new_zeros((theta.shape[0], 0))
    width = gauge.width
    identity = torch.eye(width, dtype=theta.dtype, device=theta.device)
    generators = []
    if hierarchy.prior.covariance == "full":
        for i in range(width):
            for j in range(width):
                generators.append(_unit(width, i, j, theta))
    else:
        for i in range(width):
            for j in range(i):
                generators.append(_unit(width, i, j, theta) - _unit(width, j, i, theta))
        if not gauge.layout.bias and normal.learn_scale:
            generators.append(identity)
    size = phi.shape[0]

    def moved(a: Tensor) -> Tensor:
        return torch.cat(gauge.transform(theta[:size], theta[size:], a))

    tangents = [derivative(moved, identity, g) for g in generators]
    if not tangents:
        return theta.new_zeros((theta.shape[0], 0))
    left, values, _ = torch.linalg.svd(torch.stack(tangents, dim=1), full_matrices=False)
    out: Tensor = left[:, values > NULL_DIRECTION * values.max().clamp(min=1e-30)]
    return out


def _normal(hierarchy: Hierarchy) -> Normal:
    if not isinstance(hierarchy.prior, Normal):
        raise EstimateError(
            f"theta_uncertainty is there for Normal priors, not {hierarchy.prior.name}; use intervals "
            "without it"
        )
    return hierarchy.prior


def _unit(width: int, i: int, j: int, like: Tensor) -> Tensor:
    out = like.new_zeros((width, width))
    out[i, j] = 1.0
    return out


def closed_form_information(hierarchy: Hierarchy) -> bool:
    """A linear head with a normal likelihood: no draws are needed."""
    return hierarchy.closed_form


def require_small(hierarchy: Hierarchy, beta: Tensor) -> None:
    """Raise when theta is too large for its information to be computed."""
    if not hierarchy.model.twice_in_double:
        raise EstimateError(
            "a layer has no second derivatives, or none in double precision: use intervals "
            "without theta_uncertainty"
        )
    p = hierarchy.model.phi_layout.size + beta.shape[0]
    exact = closed_form_information(hierarchy)
    largest = LARGEST_EXACT_INFORMATION if exact else LARGEST_SAMPLED_INFORMATION
    if p > largest:
        how = "" if exact else " for a model whose posterior of z is not closed-form"
        raise EstimateError(f"theta has {p} parameters; theta_uncertainty is limited to {largest}{how}")


@dataclass(frozen=True)
class Information(Question[Tensor]):
    """The observed information at theta, ``[p, p]``, summed over everyone in double precision."""

    hierarchy: Hierarchy
    name: ClassVar[str] = "information"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("phi", "beta")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        phi, beta, cohort = asked["phi"], asked["beta"], units.cohort
        if self.hierarchy.closed_form:
            own = information(self.hierarchy, phi, beta, cohort)
        else:
            draws = units.personal()["draws"].flatten(1, 2)
            own = sampled_information(self.hierarchy, phi, beta, cohort, draws)
        everyone = torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
        return Answer(everyone, sums={"information": own.flatten()})

    def finish(self, known: Tensors, total: Total) -> Tensor:
        p = known["phi"].shape[0] + known["beta"].shape[0]
        return total.weighted["information"].reshape(p, p)


def theta_draws(
    hierarchy: Hierarchy, published: Tensors, total: Tensor, key: Key
) -> list[tuple[Tensor, Tensor]]:
    """Draws of (phi, beta) around the returned theta, from everyone's information ``[p, p]``."""
    phi, beta = published["phi"], published["beta"]
    values, vectors = _directions(hierarchy, published, total)
    noise = key.at(purpose="theta").normal(
        torch.arange(THETA_DRAWS, device=phi.device), (len(values),), torch.float64
    )
    theta = torch.cat((phi, beta)).double() + (noise * values.rsqrt()) @ vectors.mT
    size, prior, sets = phi.shape[0], hierarchy.prior, Sets.of(published)
    return [(t[:size].to(phi.dtype), prior.project(t[size:].to(beta.dtype), sets)) for t in theta]


def standard_errors(hierarchy: Hierarchy, published: Tensors, total: Tensor) -> dict[str, list[float]]:
    """Of phi, by the names of its parts, and of the prior's mean, from everyone's information; of what the
    data cannot tell apart (a rotation of the features, say) nothing is in them."""
    values, vectors = _directions(hierarchy, published, total)
    errors = (vectors.square() @ values.reciprocal()).sqrt()
    layout, d = hierarchy.model.phi_layout, hierarchy.prior.dimension(published["beta"])
    parts = errors[: layout.size + d].split([*layout.sizes, d])
    return {n: v.tolist() for n, v in zip((*layout.names, "the prior's mean"), parts, strict=True)}


def _directions(hierarchy: Hierarchy, published: Tensors, total: Tensor) -> tuple[Tensor, Tensor]:
    """Information along directions of theta ``[p, q]`` that are learned and can be told apart."""
    _normal(hierarchy)
    phi, beta = published["phi"], published["beta"]
    p = phi.shape[0] + beta.shape[0]
    learned = torch.cat((torch.ones_like(phi), hierarchy.prior.mask(torch.ones_like(beta)))).bool()
    names = [*_names(hierarchy), *["the prior's mean"] * hierarchy.prior.dimension(beta)]
    names += ["the prior's scale"] * (p - len(names))
    fixed = torch.eye(p, dtype=torch.float64, device=phi.device)[:, ~learned]
    gauge = gauge_directions(hierarchy, phi, beta)
    basis = free_directions(total, torch.cat((fixed, gauge), dim=1))
    values, vectors = torch.linalg.eigh(basis.mT @ total @ basis)
    vectors = basis @ vectors
    bad = values <= LEAST_INFORMATION * values.max()
    if bool(bad.any()):
        worst = vectors[:, int(values.argmin())]
        raise EstimateError(
            f"the data do not determine theta: {int(bad.sum())} direction(s) have no positive "
            f"information, the worst mostly in {names[int(worst.abs().argmax())]}; run more rounds, or "
            "use intervals without theta_uncertainty"
        )
    return values, vectors


def _names(hierarchy: Hierarchy) -> list[str]:
    layout = hierarchy.model.phi_layout
    return [n for n, s in zip(layout.names, layout.sizes, strict=True) for _ in range(s)]


def free_directions(information: Tensor, excluded: Tensor) -> Tensor:
    """A basis ``[p, q]`` of what is orthogonal to excluded directions ``[p, h]``.

    In units of each parameter's own information: it must not matter what data are counted in, and rounding
    is judged alike for all.
    """
    unit = information.diagonal().abs()
    unit = torch.where(unit > 0, unit, torch.ones_like(unit)).rsqrt()
    excluded = excluded * unit[:, None]
    return complement(excluded / torch.linalg.vector_norm(excluded, dim=0), len(unit)) * unit[:, None]


def complement(vectors: Tensor, p: int) -> Tensor:
    """An orthonormal basis of what is orthogonal to these columns."""
    if vectors.shape[1] == 0:
        return torch.eye(p, dtype=vectors.dtype, device=vectors.device)
    left, values, _ = torch.linalg.svd(vectors, full_matrices=True)
    rank = int((values > NULL_DIRECTION * values.max()).sum())
    out: Tensor = left[:, rank:]
    return out


def reweighted(
    hierarchy: Hierarchy,
    published: Tensors,
    theta: tuple[Tensor, Tensor],
    cohort: Cohort,
    draws: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draws ``[C, L, d]`` of z at another theta out of draws ``[C, S, d]`` at the returned one, by importance
    resampling with uniform numbers ``[C, L]``; and the effective number of draws behind them, ``[C]``."""

    def joint(phi: Tensor, beta: Tensor) -> Tensor:
        target = hierarchy.target(phi, beta, hierarchy.model.features(phi, cohort), cohort)
        return target.likelihood.value(draws) + hierarchy.prior.log_prob(beta, draws)

    log_weight = joint(*theta) - joint(published["phi"], published["beta"])
    weight = torch.softmax(log_weight.double(), dim=1)
    index = torch.searchsorted(weight.cumsum(1), uniform.double()).clamp(max=draws.shape[1] - 1)
    chosen = draws.gather(1, index.unsqueeze(-1).expand(-1, -1, draws.shape[-1]))
    return chosen, 1 / weight.square().sum(1)
