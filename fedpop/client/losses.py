"""Losses on the flat vector, their gradient, what training by them costs, and plug-in predictions at a point
estimate of z."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.modules import RowKeys
from fedpop.models.predictive import Predictive

Loss = Callable[..., Tensor]
WORK = ("backbone_passes", "head_steps", "gradient_evaluations")
"""What a run counts of clients' work over its rounds."""


def mean_where(value: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over examples where ``mask`` is one; over all of them where there is none."""
    if mask is None:
        return value.mean()
    return torch.where(mask > 0, value, torch.zeros_like(value)).sum() / mask.sum().clamp(min=1)


def _mean_loss(
    model: Model,
    phi: Tensor,
    z: Tensor,
    features: Inputs,
    y: Tensor,
    mask: Tensor | None,
    rows: RowKeys | None,
) -> Tensor:
    """Mean over examples of -log p(y | z), averaged over values of z ``[S, d]``."""
    return -mean_where(model.log_prob(phi, z, features, y, rows).mean(0), mask)


def gradient(values: Sequence[Tensor], phi: Tensor, slopes: Sequence[Tensor] | None = None) -> Tensor:
    """The derivative in phi of what has these slopes in some values, or of numbers themselves; zero where phi
    does not matter."""
    with torch.enable_grad():
        # One number whose gradient it is: given slopes, torch would import sympy, half a second per process.
        given = [None] * len(values) if slopes is None else slopes
        pairs = [(v, s) for v, s in zip(values, given, strict=True) if v.requires_grad]
        parts = [v if s is None else (v * s).sum() for v, s in pairs]
    if not phi.requires_grad or not parts:
        return torch.zeros_like(phi, requires_grad=False)
    (grad,) = torch.autograd.grad(sum(parts[1:], parts[0]), phi, allow_unused=True)
    return torch.zeros_like(phi) if grad is None else grad


def joint_loss(model: Model, embedded: bool) -> Loss:
    """Mean loss of one client in w = (phi, z) together; ``embedded``: x already holds features."""
    sizes = [model.phi_layout.size, model.z_layout.size]

    def loss(
        w: Tensor, aux: Tensor, x: Inputs, y: Tensor, mask: Tensor | None, rows: RowKeys | None
    ) -> Tensor:
        phi, z = torch.split_with_sizes(w, sizes)  # the backward pass of every slice fills a whole w
        features = x if embedded else model.embed(phi, x, rows)
        return _mean_loss(model, phi, z.unsqueeze(0), features, y, mask, rows)

    return loss


def body_loss(model: Model, embedded: bool) -> Loss:
    """Mean loss of one client in phi, averaged over fixed heads z ``[S, d]``; ``embedded``: x already
    holds features."""

    def loss(
        phi: Tensor, z: Tensor, x: Inputs, y: Tensor, mask: Tensor | None, rows: RowKeys | None
    ) -> Tensor:
        features = x if embedded else model.embed(phi, x, rows)
        return _mean_loss(model, phi, z, features, y, mask, rows)

    return loss


def head_loss(model: Model, phi: Tensor) -> Loss:
    """Mean loss of one client in z, on features that do not change."""

    def loss(
        z: Tensor, aux: Tensor, features: Inputs, y: Tensor, mask: Tensor | None, rows: RowKeys | None
    ) -> Tensor:
        return _mean_loss(model, phi, z.unsqueeze(0), features, y, mask, rows)

    return loss


def plug_in(model: Model, phi: Tensor, z: Tensor, x: Inputs, key: Key) -> Predictive:
    """The predictive distribution at a point estimate: noise only, and flagged as such."""
    with torch.no_grad():
        eta = model.outputs_at(phi, z, x)
    return Predictive(eta, model.likelihood, model.params(phi), key, plug_in=True)


def score_point(model: Model, phi: Tensor, z: Tensor, held_out: Cohort) -> tuple[Tensor, Tensor]:
    """Summed plug-in log-likelihood of each unit's held-out examples, z ``[C, d]``, and their number."""
    with torch.no_grad():
        local = model.bind(phi, model.features(phi, held_out), held_out)
        value = local.value(z.unsqueeze(1)).squeeze(1)
    return value.double(), held_out.sizes.double()


def finite(*tensors: Tensor) -> Tensor:
    """Which units have nothing but finite numbers in all of these ``[C, ...]``."""
    good = torch.ones(tensors[0].shape[0], dtype=torch.bool, device=tensors[0].device)
    for t in tensors:
        good = good & torch.isfinite(t).flatten(1).all(1)
    return good


def training_cost(
    cohort: Cohort, loss: Tensor, good: Tensor, backbone: float, head: float
) -> dict[str, float]:
    """Mean training losses ``[C]``, and example-passes through backbone and head; none through a backbone
    that stands still, whose features were computed once. A forward and backward of one example is one pass.
    """
    n = cohort.sizes.to(loss.dtype)
    return {
        "log_likelihood": -float((loss * n)[good].sum()),
        "examples": float(n[good].sum()),
        "backbone_passes": 0.0 if cohort.embedded else float(backbone),
        "head_steps": float(head),
    }
