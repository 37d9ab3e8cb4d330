"""The paper's composition h_z o h_phi: a shared backbone, and a private head on its features."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fedpop.checked import checked
from fedpop.errors import DataError, ModelError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.models import likelihoods
from fedpop.models.base import (
    LinearLayout,
    Model,
    initial_params,
    likelihood_layout,
    trainable,
    with_ones,
)
from fedpop.models.likelihoods import Likelihood
from fedpop.models.modules import (
    Layout,
    NetworkPass,
    RowKeys,
    buffers_as,
    call,
    dropout_rows,
    federated,
    has_dropout,
    has_ties,
    is_hooked,
    require_together,
)
from fedpop.models.probe import ANY_ROWS

LARGEST_FULL_COVARIANCE = 8
"""Dimensions of z up to which a head on fixed features has a full covariance by default."""


class Composition(Model):
    """``likelihood(head(backbone(x)))`` with the backbone shared (phi) and the head private (z).

    x may be a tuple of tensors, which reach the backbone's ``forward`` as its arguments, or a dict, which
    reaches it as keyword arguments: ``forward(self, image, age)`` takes ``{"image": ..., "age": ...}``.

    Parameters with ``requires_grad=False`` stay as they are; a backbone without any trainable parameter has
    its features computed once.

    Args:
        backbone: The module that all share, from x to features; None where the head takes x itself.
        head: The module that each client has its own parameters of, from features to outputs. A linear layer
            is fastest, and exact with normal targets.
        likelihood: Of the targets given the outputs: "normal", "categorical", "bernoulli", "poisson", or one
            of ``fp.likelihoods`` such as ``Normal(variance)``.
        fixed: A module of fixed effects: what it makes of its own part of x is added to the head's outputs,
            and its parameters are in phi. Each x is then ``{"fixed": X, "random": Z}`` (or the pair (X, Z);
            one tensor serves both). With a linear head and normal targets all stays closed-form: a random
            intercept beside a fixed slope has Z = 1, and the mean of the prior is the intercept.
        precision: What the backbone runs in: "float32", "bfloat16", or "auto" (the default), which is float32
            unless the network is large and a child process has shown that bfloat16 works and is faster on
            this machine.

    >>> from torch import nn
    >>> model = Composition(nn.Linear(20, 2, bias=False), nn.Linear(2, 1, bias=False), "normal")
    >>> model
    Composition(phi: 41, z: 2, likelihood: normal, linear head)
    >>> slope, intercept = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> Composition(None, intercept, "normal", fixed=slope)
    Composition(phi: 2, z: 1, likelihood: normal, linear head, fixed effects: 1)
    """

    @checked
    def __init__(
        self,
        backbone: nn.Module | None,
        head: nn.Module,
        likelihood: Likelihood | str,
        *,
        fixed: nn.Module | None = None,
        precision: str = "auto",
    ) -> None:
        require_together(*(m for m in (backbone, head, fixed) if m is not None))
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
        self.fixed = None if fixed is None else federated(fixed, "fixed.")
        added = {} if self.fixed is None else trainable(self.fixed)
        self._added = list(added)
        self.phi_layout = Layout.of(
            {f"backbone.{n}": tuple(p.shape) for n, p in shared.items()}
            | {f"fixed.{n}": tuple(p.shape) for n, p in added.items()}
            | likelihood_layout(self.likelihood)
        )
        shapes = {n: tuple(p.shape) for n, p in personal.items()}
        self.linear = type(self.head) is nn.Linear
        self.z_layout = (LinearLayout if self.linear else Layout).of(shapes)
        self.outputs = _outputs_of(self.head)
        self.likelihood.check_head(self.outputs)
        self.offsets = 0 if self.fixed is None else self.outputs
        self.precision = precision
        self._pass: NetworkPass = NetworkPass.of(self.backbone, self.phi_layout.size, self.dtype, precision)
        self.rows_side_by_side = 0 if self._pass.convolutional else ANY_ROWS  # until it has seen an example
        self.network = not isinstance(self.backbone, nn.Identity | nn.Linear)
        self._tied = has_ties(self.backbone) or has_ties(self.head)

    def __repr__(self) -> str:
        head = "linear head" if self.linear else "head through vmap"
        return (
            f"Composition(phi: {self.phi_layout.size}, z: {self.z_layout.size}, "
            f"likelihood: {self.likelihood.name}, {head}{self._fixed_words})"
        )

    @property
    def _fixed_words(self) -> str:
        count = sum(p.numel() for p in trainable(self.fixed).values()) if self.fixed is not None else 0
        return "" if self.fixed is None else f", fixed effects: {count}"

    def prior_covariance(self) -> str:
        """A head on the user's own columns has weights in as many units: their spreads are not one number,
        and where there are few of them all of their covariance can be learned."""
        own = not self._shared and self.linear and self.likelihood.quadratic and self.outputs == 1
        return "full" if own and self.z_layout.size <= LARGEST_FULL_COVARIANCE else "isotropic"

    def modules(self) -> list[nn.Module]:
        return [self.backbone, self.head, *([] if self.fixed is None else [self.fixed])]

    @property
    def frozen(self) -> bool:
        return not self._shared and not self._added and not any(has_dropout(m) for m in self.modules()[::2])

    def initial_phi(self) -> Tensor:
        like = self.initial_z()
        parts = [p.reshape(-1) for p in trainable(self.backbone).values()]
        parts += [] if self.fixed is None else [p.reshape(-1) for p in trainable(self.fixed).values()]
        return torch.cat([*parts, *initial_params(self.likelihood, like), like.new_zeros(0)])

    def initial_z(self) -> Tensor:
        return self.z_layout.flatten(trainable(self.head))

    def _backbone_views(self, phi: Tensor) -> dict[str, Tensor]:
        views = self.phi_layout.views(phi)
        shared = {name: views[f"backbone.{name}"] for name in self._shared}
        return shared if phi.dtype == self.dtype else shared | buffers_as(self.backbone, phi.dtype)

    def embed(self, phi: Tensor, x: Inputs, rows: RowKeys | None = None) -> Tensor:
        views, (random, fixed) = self._backbone_views(phi), self._parts(x)
        run = partial(call, self.backbone, tied=self._tied)
        features = self._pass(run, views, random, rows).to(phi.dtype)
        if self.fixed is None or fixed is None:
            return features
        every = self.phi_layout.views(phi)
        with dropout_rows(self.fixed, rows):
            offset = call(self.fixed, {n: every[f"fixed.{n}"] for n in self._added}, fixed).to(phi.dtype)
        if offset.shape != (*features.shape[:-1], self.outputs):
            raise ModelError(
                f"the fixed effects gave outputs of shape {tuple(offset.shape)} beside features of shape "
                f"{tuple(features.shape)}; expected {self.outputs} output(s) per example, as of the head"
            )
        return torch.cat((features, offset), dim=-1)

    def head_at(self, phi: Tensor, z: Tensor, features: Inputs, rows: RowKeys | None = None) -> Tensor:
        offset = None
        if isinstance(features, Tensor):
            features, offset = self.split_offset(features)
        with dropout_rows(self.head, rows):
            eta = call(self.head, self.z_layout.views(z), features, self._tied)
        return eta if offset is None else eta + offset

    @property
    def affine(self) -> bool:
        parts = [m for m in (self.backbone, self.fixed) if m is not None]
        known = all(type(m) in (nn.Identity, nn.Linear) and not is_hooked(m) for m in parts)
        return known and self.autocast is None

    def pulls_back(self, cohort: Cohort) -> bool:
        """Of a linear map of vectors, in the parameters' own type."""
        plain = type(self.backbone) is nn.Linear and not is_hooked(self.backbone)
        own = self.linear and self.fixed is None and self.autocast is None and "weight" in self._shared
        return plain and own and isinstance(cohort.x, Tensor) and cohort.x.dim() == 2 and not cohort.embedded

    def pulled_back(self, cohort: Cohort, slope: Tensor) -> dict[str, Tensor]:
        assert isinstance(cohort.x, Tensor)
        both = {"backbone.weight": slope.mT @ cohort.x}
        return both | {"backbone.bias": slope.sum(0)} if "bias" in self._shared else both

    # --- fixed effects -------------------------------------------------------------------------

    def _parts(self, x: Inputs) -> tuple[Inputs, Inputs | None]:
        """What the backbone sees, and what the fixed effects see."""
        if self.fixed is None:
            return x, None
        if isinstance(x, Tensor):
            return x, x
        wanted = ("fixed", "random") if isinstance(x, dict) else (0, 1)
        if (isinstance(x, dict) and set(x) != set(wanted)) or (isinstance(x, tuple) and len(x) != 2):
            raise DataError(
                "a model with fixed effects takes x as {'fixed': X, 'random': Z}, as the pair (X, Z), or as "
                f"one tensor for both; got {sorted(x) if isinstance(x, dict) else len(x)}"
            )
        return (x["random"], x["fixed"]) if isinstance(x, dict) else (x[1], x[0])

    def fixed_design(self, x: Inputs) -> Tensor | None:
        fixed = self._parts(x)[1]
        if type(self.fixed) is not nn.Linear or not isinstance(fixed, Tensor) or fixed.dim() != 2:
            return None
        if set(self._added) != {n for n, _ in self.fixed.named_parameters()}:
            return None  # a frozen weight is not to be fitted
        return fixed if self.fixed.bias is None else with_ones(fixed)

    def with_fixed(self, phi: Tensor, weight: Tensor) -> Tensor:
        spans, phi = self.phi_layout.spans(), phi.clone()
        if "fixed.bias" in spans:
            phi[spans["fixed.bias"]] = weight[:, -1].to(phi.dtype)
            weight = weight[:, :-1]
        phi[spans["fixed.weight"]] = weight.reshape(-1).to(phi.dtype)
        return phi


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
