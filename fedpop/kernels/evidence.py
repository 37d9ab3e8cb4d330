"""The exact marginal likelihood of a cohort in double precision: values, gradients and curvature in theta.

For hierarchies whose evidence is closed-form; see ``Target.evidence``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.kernels.target import Hierarchy, Target


def runs_in_double(hierarchy: Hierarchy) -> bool:
    """No weight of the model stays behind in a narrower type, and nothing is rounded or drawn on the way."""
    model = hierarchy.model
    frozen = (p for m in model.modules() for p in m.parameters() if not p.requires_grad)
    buffers = (v for m in model.modules() for v in m.buffers() if v.is_floating_point())
    narrow = any(v.dtype != torch.float64 for v in (*frozen, *buffers))
    return model.autocast is None and (not narrow or model.frozen)


def _target(hierarchy: Hierarchy, theta: Tensor, cohort: Cohort, noise: float | None) -> Target:
    size = hierarchy.model.phi_layout.size
    return hierarchy.target_at(theta[:size], theta[size:], cohort, noise)


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
    wide = cohort.wide
    theta = theta.detach().double()

    def total(at: Tensor) -> Tensor:
        return _target(hierarchy, at, wide, noise).evidence().sum()

    with torch.enable_grad():
        at = theta.clone().requires_grad_()
        target = _target(hierarchy, at, wide, noise)
        values, sizes = target.evidence(), target.likelihood_curvature()
        (gradient,) = torch.autograd.grad(values.sum(), at)
    hessian = torch.autograd.functional.hessian(total, theta, vectorize=True) if curved else None
    assert sizes is not None
    return Evidence(values.detach(), sizes.detach().squeeze(1), gradient, hessian)
