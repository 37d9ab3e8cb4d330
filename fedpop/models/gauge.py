"""Directions in theta that the model cannot tell apart, and how to move along them.

With a backbone that ends in a linear layer W and a linear head, features A W x and heads A^-T z give
the same outputs. What A leaves the prior's family alone depends on the prior: rotations (and, without a
bias, a scale) for an isotropic one, any invertible A for a full covariance, none for a diagonal one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpop.models.base import LinearLayout, Model
from fedpop.models.composition import Composition
from fedpop.priors.normal import Normal


@dataclass(frozen=True)
class Gauge:
    """Where W (and the bias beside it) lies in phi, for a model that has this freedom."""

    weight: slice
    bias: slice | None
    width: int
    layout: LinearLayout
    prior: Normal

    @classmethod
    def of(cls, model: Model, prior: Normal) -> Gauge | None:
        """The gauge of a model, or None when it has none that we know of."""
        if not isinstance(model, Composition) or not isinstance(model.z_layout, LinearLayout):
            return None
        last, name = model.backbone, "backbone"
        while isinstance(last, nn.Sequential) and len(last):
            name, last = f"{name}.{len(last) - 1}", last[-1]
        spans = model.phi_layout.spans()
        weight = spans.get(f"{name}.weight")
        if type(last) is not nn.Linear or weight is None or prior.covariance == "diagonal":
            return None
        if last.bias is not None and f"{name}.bias" not in spans:
            return None  # a frozen bias cannot follow
        if not prior.learn_mean and prior.mean != 0:
            return None
        layout = model.z_layout
        if prior.covariance == "full" and (layout.bias or layout.outputs > 1):
            return None
        return cls(weight, spans.get(f"{name}.bias"), last.out_features, layout, prior)

    def matrix(self, phi: Tensor) -> Tensor:
        """W with its bias as a further column."""
        weight = phi[self.weight].reshape(self.width, -1)
        if self.bias is None:
            return weight
        return torch.cat((weight, phi[self.bias].unsqueeze(1)), dim=1)

    def transform(self, phi: Tensor, beta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """theta after features have become A times themselves."""
        moved = a @ self.matrix(phi)
        phi = phi.clone()
        if self.bias is not None:
            phi[self.bias] = moved[:, -1]
            moved = moved[:, :-1]
        phi[self.weight] = moved.reshape(-1)
        inverse = torch.linalg.inv(a)
        mu = self.prior.mu(beta).reshape(self.layout.outputs, -1)
        rows = mu[:, : self.width] @ inverse
        mu = torch.cat((rows, mu[:, self.width :]), dim=1).reshape(-1)
        if self.prior.covariance == "full":
            sigma = inverse.mT @ self.prior.sigma(beta) @ inverse
            return phi, self.prior.pack(mu, torch.linalg.cholesky(sigma))
        scale = torch.linalg.matrix_norm(a) / self.width**0.5  # a is a multiple of a rotation
        return phi, torch.cat((mu, beta[-1:] - scale.log()))

    def align(self, phi: Tensor, beta: Tensor, phi_to: Tensor, beta_to: Tensor) -> tuple[Tensor, Tensor]:
        """The equivalent of theta that is nearest to another one."""
        here, there = self.matrix(phi), self.matrix(phi_to)
        if self.prior.covariance == "full":
            a = torch.linalg.lstsq(here.mT, there.mT).solution.mT
            return self.transform(phi, beta, a)
        left, _, right = torch.linalg.svd(there @ here.mT)
        a = left @ right
        if not self.layout.bias and self.prior.learn_scale:
            a = a * (beta[-1] - beta_to[-1]).exp()
        return self.transform(phi, beta, a)


def aligner(model: Model, prior: Normal) -> Callable[[Tensor, Tensor], Tensor]:
    """``align(theta, reference)`` on theta = (phi, beta); the identity where there is no gauge."""
    gauge = Gauge.of(model, prior)
    size = model.phi_layout.size

    def align(theta: Tensor, reference: Tensor) -> Tensor:
        if gauge is None:
            return theta
        return torch.cat(gauge.align(theta[:size], theta[size:], reference[:size], reference[size:]))

    return align
