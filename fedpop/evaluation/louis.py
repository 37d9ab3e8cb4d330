"""Louis' identity: gradient and information of the marginal likelihood from posterior draws of z.

The information is E_i[-hess log p(D_i, w)] - Cov_i[grad log p(D_i, w)] summed over clients, for any w from
which z is made, and what it is made of decides about noise. With w = z scores of a scale near zero are all
noise, and the information with them; with z = mu + L w those of a client whose data say much are. So w is
between: z moves with theta by the prior's share K of the posterior's precision,

    z = w + K (mu + L L0^-1 (w - mu0) - w),        K = (Sigma^-1 + H)^-1 Sigma^-1 at theta0,

H the likelihood's curvature at the mean of the draws. Where a posterior is Gaussian, scores of mu are then
the same for all w and those of the scale hardly differ: the counterpart of the mixed form of I
(``fedpop.priors.normal``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import map_inputs
from fedpop.kernels import Hierarchy
from fedpop.priors import Prior
from fedpop.priors.normal import Normal

NOISE_PARTS = 8
"""Parts of all chains, about, from whose means the noise of an average is told."""
LEAST_PART = 25
"""Draws of such a part, at least: neighbours depend on each other, and means of few would, too."""


def in_double(cohort: Cohort) -> Cohort:
    def wide(v: Tensor) -> Tensor:
        return v.double() if v.is_floating_point() else v

    return replace(cohort, x=map_inputs(wide, cohort.x), y=wide(cohort.y))


def require_double(hierarchy: Hierarchy, theta: Tensor) -> None:
    if any(
        p.dtype != theta.dtype and not p.requires_grad
        for m in hierarchy.model.modules()
        for p in m.parameters()
    ):
        raise EstimateError(
            "theta_uncertainty computes in double precision, and this model's frozen weights do not"
        )


Following = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Louis:
    """From draws of z: the marginal likelihood's gradient ``[p]``, its Monte-Carlo covariance ``[p, p]``, the
    observed information ``[p, p]``, and what batches of draws say it errs by, ``[K, p, p]``."""

    score: Tensor
    noise: Tensor
    information: Tensor
    errors: Tensor


def louis(hierarchy: Hierarchy, phi: Tensor, beta: Tensor, cohort: Cohort, draws: Tensor) -> Louis:
    """Gradient and information from posterior draws ``[C, chains, S, d]``, client by client."""
    model, prior, size = hierarchy.model, hierarchy.prior, phi.shape[0]
    theta = torch.cat((phi, beta)).double()
    require_double(hierarchy, theta)
    score = torch.zeros_like(theta)
    noise, total = (theta.new_zeros((theta.shape[0], theta.shape[0])) for _ in range(2))
    errors = total.new_zeros(())
    for c, one in enumerate(in_double(cohort).one_by_one()):
        y = model.likelihood.encode(one.y, model.outputs, theta.dtype)
        z = draws[c].double().flatten(0, 1)

        def likelihood(phi: Tensor, z: Tensor, one: Cohort = one, y: Tensor = y) -> Tensor:
            if not one.longest:
                return z.new_zeros(())
            out: Tensor = model.log_prob_at(phi, z, model.features(phi, one), y).sum()
            return out

        along = _following(prior, theta[size:], z, partial(likelihood, theta[:size]))

        def joint(
            theta: Tensor,
            w: Tensor,
            likelihood: Callable[..., Tensor] = likelihood,
            along: Following = along,
        ) -> Tensor:
            phi, beta = theta[:size], theta[size:]
            z, volume = along(beta, w)
            return likelihood(phi, z) + prior.log_prob(beta, z) + volume

        both = torch.func.vmap(torch.func.grad(joint, argnums=(0, 1)), in_dims=(None, 0))
        scores, grads = both(theta, z)
        weight = zero_variance(z, grads)

        def mean(
            theta: Tensor, z: Tensor, joint: Callable[..., Tensor] = joint, weight: Tensor = weight
        ) -> Tensor:
            out: Tensor = torch.func.vmap(joint, in_dims=(None, 0))(theta, z) @ weight
            return out

        hessian = torch.func.jacrev(torch.func.grad(mean))(theta, z)
        own = weight @ scores
        away = scores - own
        total = total - hessian - away.mT @ (weight[:, None] * away)
        parts = batches(weight, z, grads, draws.shape[1])
        score, noise = score + own, noise + monte_carlo(parts, scores)
        # Second derivatives are quadratic in z or nearly so, and hardly err: it is the products of scores.
        errors = errors + away.mT @ (parts.unsqueeze(2) * away)
    return Louis(score, noise, total, errors)


def _following(prior: Prior, beta0: Tensor, z: Tensor, likelihood: Callable[[Tensor], Tensor]) -> Following:
    """How z is made of w at another beta, with the logarithm of what that does to volumes; here z = w."""
    if not isinstance(prior, Normal):
        return lambda beta, w: (w, w.new_zeros(()))
    mu0, identity = prior.mu(beta0), torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    factor = prior.factor(beta0)
    h = -torch.func.jacrev(torch.func.grad(likelihood))(z.mean(0))
    h = factor.mT @ (0.5 * (h + h.mT)) @ factor
    values, vectors = torch.linalg.eigh(torch.nan_to_num(h, 0.0, 0.0, 0.0))
    # In units of the prior, K = V (1 + a)^-1 V'; a curvature upwards counts as none.
    share = vectors / (1 + values.clamp(min=0)) @ vectors.mT
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    k = factor @ share @ inverse

    def along(beta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        matrix = prior.factor(beta) @ inverse - identity
        moved = prior.mu(beta) - mu0 + matrix @ (w - mu0)
        return w + k @ moved, torch.linalg.slogdet(identity + k @ matrix)[1]

    return along


def _known(z: Tensor, grads: Tensor) -> Tensor:
    """Functions ``[S, q]`` whose posterior means are zero, as many as draws allow: under p(z | D)
    E[g] = 0 and E[z_j g_k] = -1{j = k}."""
    s, d = z.shape
    none = z.new_zeros((s, 0))
    linear = grads if 4 * d <= s else none
    if 4 * (d + d * d) > s:
        return linear
    identity = torch.eye(d, dtype=z.dtype, device=z.device)
    products = (z - z.mean(0)).unsqueeze(2) * grads.unsqueeze(1) + identity
    return torch.cat((linear, products.flatten(1)), dim=1)


def zero_variance(z: Tensor, grads: Tensor) -> Tensor:
    """Weights ``[S]`` of draws ``[S, d]`` that take out of an average what the gradients of the log-posterior
    there explain: those of a regression on functions whose mean is known to be zero. Where the posterior is
    Gaussian the average of anything quadratic is exact."""
    known = _known(z, grads)
    spread = known - known.mean(0)
    inverse = torch.linalg.pinv(spread.mT @ spread, rtol=1e-12, hermitian=True)
    out: Tensor = 1 / len(z) - spread @ (inverse @ known.mean(0))
    return out


def batches(weight: Tensor, z: Tensor, grads: Tensor, chains: int) -> Tensor:
    """Weights ``[K, S]`` of means over parts of chains in turn, of what that regression leaves of a value.

    They are so scaled that the covariance of these K is that of the average: draws that follow one another
    are not independent, and batches of them are."""
    known = _known(z, grads)
    spread, s = known - known.mean(0), len(z)
    inverse = torch.linalg.pinv(spread.mT @ spread, rtol=1e-12, hermitian=True)
    parts = max(2, min(NOISE_PARTS // chains, s // chains // LEAST_PART))
    length = s // chains // parts
    if length == 0:
        raise EstimateError(
            "the noise of an average cannot be told from one draw per chain: final=Final(draws=...)"
        )
    one = torch.arange(s, device=z.device).unflatten(0, (chains, -1))[:, : parts * length]
    means = z.new_zeros((chains * parts, s)).scatter(1, one.reshape(chains * parts, length), 1 / length)
    means = means - means.mean(0)
    left = means - (means @ spread) @ inverse @ spread.mT
    # What is explained by chance looks too quiet, and weights that differ make an average noisier.
    more = s / (s - known.shape[1]) * float(weight.square().sum()) * s
    out: Tensor = left * math.sqrt(more / len(means))
    return out


def monte_carlo(parts: Tensor, values: Tensor) -> Tensor:
    """The covariance ``[p, p]`` of an average of values ``[S, p]`` over draws in such ``parts``."""
    return torch.cov((parts @ values).mT).reshape(values.shape[1], -1)
