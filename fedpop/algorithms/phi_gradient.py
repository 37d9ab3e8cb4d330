"""J of a cohort: the gradient in phi of the clients' log-likelihood, averaged over draws of z.

The average over draws is linear, so it is one backward pass through the backbone whatever their number; and
the server needs only the sum over clients, so one pass serves them all unless each must be looked at alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.algorithms.base import split_cohort
from fedpop.channel import Channel
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.models.base import Model
from fedpop.models.local import LinearLikelihood
from fedpop.models.modules import RowKeys
from fedpop.runtime.random import Key


@dataclass(frozen=True)
class PhiGradient:
    """J of a cohort: one backward pass of the log-likelihood averaged over the draws."""

    model: Model
    moments: tuple[Tensor, Tensor] | None
    draws: Tensor

    def value(
        self,
        phi: Tensor,
        features: Inputs,
        cohort: Cohort,
        keys: RowKeys | None,
        index: Any = slice(None),
    ) -> Tensor:
        """E[log p(D_i | z, phi)] per client, differentiable in phi."""
        local = self.model.bind(phi, features, cohort, keys)
        if self.moments is None:
            return local.value(self.draws[index]).mean(1)
        assert isinstance(local, LinearLikelihood)
        return expected_normal(local, self.moments[0][index], self.moments[1][index])

    def fused(
        self, phi: Tensor, features: Inputs, cohort: Cohort, keys: RowKeys | None, good: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One backward for all clients: the server only ever needs the sum."""
        with torch.enable_grad():
            value = self.value(phi, features, cohort, keys)
            # A client with an infinite likelihood would poison everyone's gradient.
            kept = torch.where(good & torch.isfinite(value), value, torch.zeros_like(value))
            return value.detach(), gradient((cohort.weights.to(value.dtype) * kept).sum(), phi)

    def one_by_one(
        self,
        phi: Tensor,
        cohort: Cohort,
        key: Key,
        good: Tensor,
        channel: Channel | None,
        batch: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One backward per client: to compress each, to take mini-batches, or to find a culprit."""
        good, values, total = good.clone(), [], torch.zeros_like(phi)
        for c, one in enumerate(split_cohort(cohort)):
            part, factor = minibatch(one, batch, key)
            keys = self.model.dropout_keys(part, key)
            with torch.enable_grad():
                features = self.model.features(phi, part, keys)
                value = factor * self.value(phi, features, part, keys, slice(c, c + 1))
                j = gradient(value.sum(), phi)
            values.append(value.detach())
            good[c] &= bool(torch.isfinite(value).all()) and bool(torch.isfinite(j).all())
            if bool(good[c]):
                sent = j.unsqueeze(0) if channel is None else channel("J", j.unsqueeze(0))
                total = total + float(one.weights) * sent[0]
        return good, torch.cat(values), total.detach()


def expected_normal(local: LinearLikelihood, mean: Tensor, cov: Tensor) -> Tensor:
    """E[log p(D | z)] for z ~ N(mean, cov) in a Normal linear model: the residual plus tr(F cov F')."""
    at_mean = local.value(mean.unsqueeze(1)).squeeze(1)
    q = local.features.shape[-1]
    spread = torch.zeros_like(at_mean)
    for o in range(local.outputs):
        block = cov[:, o * q : (o + 1) * q, o * q : (o + 1) * q]
        spread = spread + torch.einsum("cni,cij,cnj->c", local.features, block, local.features)
    precision = local.likelihood.bound(local.params)
    assert precision is not None
    return at_mean - 0.5 * precision * spread


def gradient(value: Tensor, phi: Tensor) -> Tensor:
    """d value / d phi, zero where phi does not matter."""
    if not phi.requires_grad or not value.requires_grad:
        return torch.zeros_like(phi)
    (grad,) = torch.autograd.grad(value, phi, allow_unused=True)
    return torch.zeros_like(phi) if grad is None else grad


def minibatch(cohort: Cohort, size: int | None, key: Key) -> tuple[Cohort, float]:
    """A uniform subset of one client's examples, and the factor that makes its sum unbiased."""
    n = int(cohort.sizes[0])
    if size is None or n <= size:
        return cohort, 1.0
    u = key.at(purpose="minibatch").uniform(cohort.ids, (n,))[0]
    rows = torch.topk(u, size, largest=False).indices.sort().values
    sizes = cohort.sizes.new_full((1,), size)
    return cohort.take(rows, cohort.ids, sizes, cohort.weights), n / size
