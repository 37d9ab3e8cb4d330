"""The exact marginal likelihood of a cohort in double precision: values, gradients and curvature in theta.

For hierarchies whose evidence is closed-form; see ``Target.evidence``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedpop.blocks import CLIENTS_AT_ONCE, ROWS_AT_ONCE
from fedpop.federation.cohort import Cohort, double
from fedpop.federation.inputs import map_inputs
from fedpop.kernels.target import Hierarchy, Target


def runs_in_double(hierarchy: Hierarchy) -> bool:
    """No weight of the model stays behind in a narrower type, and nothing is rounded or drawn on the way."""
    model = hierarchy.model
    frozen = (p for m in model.modules() for p in m.parameters() if not p.requires_grad)
    buffers = (v for m in model.modules() for v in m.buffers() if v.is_floating_point())
    narrow = any(v.dtype != torch.float64 for v in (*frozen, *buffers))
    return model.autocast is None and model.twice_in_double and (not narrow or model.frozen)


def exact_target(hierarchy: Hierarchy, theta: Tensor, cohort: Cohort, noise: float | None = None) -> Target:
    """The log-posteriors in double precision; what many rows keep for a backward pass is made again there,
    block by block."""
    phi, beta = hierarchy.split(theta)
    if not rematerialised(hierarchy, cohort):
        return hierarchy.target_at(phi, beta, cohort, noise)

    def embed(phi: Tensor, first: int) -> Tensor:
        part = map_inputs(lambda v: double(v[first : first + ROWS_AT_ONCE]), cohort.x)
        features = hierarchy.model.embed(phi, part)
        assert isinstance(features, Tensor)
        return features

    blocks = [
        checkpoint(embed, phi, first, use_reentrant=False, preserve_rng_state=False)
        for first in range(0, cohort.examples, ROWS_AT_ONCE)
    ]
    light = replace(cohort, x=cohort.y, y=double(cohort.y))  # x is in the features
    return hierarchy.target(phi, beta, torch.cat(blocks), light, noise=noise)


def rematerialised(hierarchy: Hierarchy, cohort: Cohort) -> bool:
    """Whether features are made again in a backward pass: then rows of a Hessian are not batched."""
    known = cohort.embedded or hierarchy.model.affine  # nothing but features is kept of these
    return not known and cohort.longest > ROWS_AT_ONCE


@dataclass(frozen=True)
class Evidence:
    """Values ``[C]`` of a cohort's units, the gradient ``[p]`` of their sum, and its Hessian where wanted."""

    values: Tensor
    sizes: Tensor
    """The trace of the curvature of each unit's log-likelihood in z, ``[C]``: how large its data are."""
    gradient: Tensor
    hessian: Tensor | None


def evidence(
    hierarchy: Hierarchy, theta: Tensor, cohort: Cohort, curved: bool, noise: float | None = None
) -> Evidence:
    """All of it in one backward pass, or one for each parameter where the Hessian is wanted too; with normal
    ``noise`` of this variance, whatever else is said of it."""
    theta = theta.detach().double()

    with torch.enable_grad():
        at = theta.clone().requires_grad_()
        target = exact_target(hierarchy, at, cohort, noise)
        values, sizes = target.evidence(), target.likelihood_curvature()
        (gradient,) = torch.autograd.grad(values.sum(), at)
    hessian = _hessian(hierarchy, theta, cohort, noise) if curved else None
    assert sizes is not None
    return Evidence(values.detach(), sizes.detach().squeeze(1), gradient, hessian)


def _hessian(hierarchy: Hierarchy, theta: Tensor, cohort: Cohort, noise: float | None) -> Tensor:
    """Of the sum, some clients at a time: what all its rows keep of everyone would fill any memory."""
    out = theta.new_zeros((len(theta), len(theta)))
    for part in cohort.parts(CLIENTS_AT_ONCE):

        def total(at: Tensor, part: Cohort = part) -> Tensor:
            return exact_target(hierarchy, at, part, noise).evidence().sum()

        at_once = not rematerialised(hierarchy, part)
        try:
            out += torch.autograd.functional.hessian(total, theta, vectorize=at_once)
        except RuntimeError:
            if not at_once:
                raise
            # A layer's second derivative that vmap does not know.
            out += torch.autograd.functional.hessian(total, theta)
    return out
