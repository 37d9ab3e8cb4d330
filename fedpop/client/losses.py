"""What methods with a point estimate of z share: losses on the flat vector, plug-in predictions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.modules import RowKeys
from fedpop.models.predictive import Predictive

Loss = Callable[..., Tensor]


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


def mean_log_prob(model: Model, w: Tensor, cohort: Cohort) -> Tensor:
    """Mean log-likelihood per client at w ``[C, D]`` (phi the same for all)."""
    size = model.phi_layout.size
    phi, z = w[0, :size], w[:, size:]
    with torch.no_grad():
        local = model.bind(phi, model.features(phi, cohort), cohort)
        value = local.value(z.unsqueeze(1)).squeeze(1)
    return value / cohort.sizes.clamp(min=1)


def score_point(model: Model, phi: Tensor, z: Tensor, held_out: Cohort) -> tuple[Tensor, Tensor]:
    """Summed plug-in log-likelihood of each unit's held-out examples, z ``[C, d]``, and their number."""
    with torch.no_grad():
        local = model.bind(phi, model.features(phi, held_out), held_out)
        value = local.value(z.unsqueeze(1)).squeeze(1)
    return value.double(), held_out.sizes.double()
