"""The paper's composition h_z o h_phi: a shared backbone, and a private head on its features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedpop.errors import ModelError
from fedpop.federation.inputs import Inputs
from fedpop.models import likelihoods
from fedpop.models.base import (
    LinearLayout,
    Model,
    initial_params,
    likelihood_layout,
    trainable,
)
from fedpop.models.flat import Layout
from fedpop.models.likelihoods import Likelihood
from fedpop.models.modules import RowKeys, call, dropout_rows, federated, has_dropout
from fedpop.models.network import NetworkPass


class Composition(Model):
    """``likelihood(head(backbone(x)))`` with the backbone shared (phi) and the head private (z).

    Parameters with ``requires_grad=False`` stay as they are; a backbone without any trainable
    parameter has its features computed once. ``precision`` is what the backbone runs in: ``float32``,
    ``bfloat16``, or ``auto``, which is float32 unless the network is large and a child process has shown
    that bfloat16 works and is faster on this machine.

    >>> from torch import nn
    >>> model = Composition(nn.Linear(20, 2, bias=False), nn.Linear(2, 1, bias=False), "normal")
    >>> model
    Composition(phi: 41, z: 2, likelihood: normal, linear head)
    """

    def __init__(
        self,
        backbone: nn.Module | None,
        head: nn.Module,
        likelihood: Likelihood | str,
        *,
        precision: str = "auto",
    ) -> None:
        self.backbone = federated(nn.Identity() if backbone is None else backbone)
        self.head = federated(head, "head.")
        self.likelihood = likelihoods.resolve(likelihood)
        personal = trainable(self.head)
        if not personal:
            raise ModelError("the head has no trainable parameter, so nothing would be personal")
        if len(personal) < sum(1 for _ in self.head.parameters()):
            raise ModelError("some parameters of the head are frozen; use Split to choose by name")
        like = next(iter(personal.values()))
        self.device, self.dtype = like.device, like.dtype
        shared = trainable(self.backbone)
        self._shared = list(shared)
        self.phi_layout = Layout.of(
            {f"backbone.{n}": tuple(p.shape) for n, p in shared.items()} | likelihood_layout(self.likelihood)
        )
        shapes = {n: tuple(p.shape) for n, p in personal.items()}
        self.linear = type(self.head) is nn.Linear
        self.z_layout = (LinearLayout if self.linear else Layout).of(shapes)
        self.outputs = _outputs_of(self.head)
        self.likelihood.check_head(self.outputs)
        self.precision = precision
        self._pass: NetworkPass = NetworkPass.of(self.backbone, self.phi_layout.size, self.dtype, precision)
        self.batchable = not self._pass.convolutional
        self.network = not isinstance(self.backbone, nn.Identity | nn.Linear)

    def __repr__(self) -> str:
        head = "linear head" if self.linear else "head through vmap"
        return (
            f"Composition(phi: {self.phi_layout.size}, z: {self.z_layout.size}, "
            f"likelihood: {self.likelihood.name}, {head})"
        )

    def modules(self) -> list[nn.Module]:
        return [self.backbone, self.head]

    @property
    def frozen(self) -> bool:
        return not self._shared and not has_dropout(self.backbone)

    def initial_phi(self) -> Tensor:
        like = self.initial_z()
        parts = [p.reshape(-1) for p in trainable(self.backbone).values()]
        return torch.cat([*parts, *initial_params(self.likelihood, like), like.new_zeros(0)])

    def initial_z(self) -> Tensor:
        return self.z_layout.flatten(trainable(self.head))

    def _backbone_views(self, phi: Tensor) -> dict[str, Tensor]:
        views = self.phi_layout.views(phi)
        return {name: views[f"backbone.{name}"] for name in self._shared}

    def embed(self, phi: Tensor, x: Inputs, rows: RowKeys | None = None) -> Tensor:
        views = self._backbone_views(phi)
        return self._pass(lambda part: call(self.backbone, views, part), x, rows).to(phi.dtype)

    def head_at(self, phi: Tensor, z: Tensor, features: Inputs, rows: RowKeys | None = None) -> Tensor:
        with dropout_rows(self.head, rows):
            return call(self.head, self.z_layout.views(z), features)


def _outputs_of(head: nn.Module) -> int:
    """Outputs of the last layer that has a width."""
    width = None
    for module in head.modules():
        if isinstance(module, nn.Linear):
            width = module.out_features
        elif isinstance(module, nn.Conv2d):
            width = module.out_channels
    if width is None:
        raise ModelError("cannot tell how many outputs the head has; end it with an nn.Linear layer")
    return width
