"""Any module, some of whose parameters are private: a head, adapters, biases, anywhere in it."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedpop.checked import checked
from fedpop.errors import ModelError
from fedpop.federation.inputs import Inputs
from fedpop.models import likelihoods
from fedpop.models.base import (
    LinearLayout,
    Model,
    initial_params,
    likelihood_layout,
    name_of,
    trainable,
)
from fedpop.models.composition import _outputs_of
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
    require_together,
)
from fedpop.models.probe import ANY_ROWS

LARGEST_SHALLOW = 20_000
"""Parameters of a module up to which a pass through it costs no more than the calls that it is made of."""


def _end_of(module: nn.Module) -> str | None:
    """The name of the layer that a (nested) ``nn.Sequential`` ends with."""
    names = []
    while isinstance(module, nn.Sequential) and len(module):
        names.append(str(len(module) - 1))
        module = module[-1]
    return ".".join(names) or None


class Split(Model):
    """``likelihood(module(x))`` where the parameters whose names match ``personal`` are z.

    When they are exactly those of a linear layer that the module ends with, everything before it is
    the backbone, and the fast path of linear heads is used; otherwise the whole module runs at every
    step of the chain, through vmap, in the parameters' own type.

    Args:
        module: The whole network, from x to outputs.
        personal: Names of the parameters that each client has its own of, with * for any letters; one pattern
            or a list.
        likelihood: Of the targets given the outputs: "normal", "categorical", "bernoulli", "poisson", or one
            of ``fp.likelihoods``.
        precision: What the backbone runs in, where there is one: "float32", "bfloat16" or "auto".

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> Split(net, personal="2.*", likelihood="categorical")
    Split(phi: 40, z: 27, likelihood: categorical, personal: 2.*)
    """

    @checked
    def __init__(
        self,
        module: nn.Module,
        personal: str | Sequence[str],
        likelihood: Likelihood | str,
        *,
        precision: str = "auto",
    ) -> None:
        require_together(module)
        self.module = federated(module)
        self.likelihood = likelihoods.resolve(likelihood)
        self.personal = [personal] if isinstance(personal, str) else list(personal)
        tensors = trainable(self.module)
        chosen = [n for n in tensors if any(fnmatch.fnmatchcase(n, p) for p in self.personal)]
        if not self.personal:
            raise ModelError("personal names no parameter, so nothing would be personal; give one pattern")
        for pattern in self.personal:
            if not fnmatch.filter(tensors, pattern):
                raise ModelError(
                    f"no trainable parameter matches personal={pattern!r}; the module has "
                    f"{', '.join(list(tensors)[:8])}{', ...' if len(tensors) > 8 else ''}"
                )
        self._personal, self._shared = chosen, [n for n in tensors if n not in chosen]
        like = tensors[chosen[0]]
        self.device, self.dtype = like.device, like.dtype
        self.phi_layout = Layout.of(
            {n: tuple(tensors[n].shape) for n in self._shared} | likelihood_layout(self.likelihood)
        )
        self._last = self._linear_candidate()
        shapes = {n: tuple(tensors[n].shape) for n in chosen}
        self.z_layout = (LinearLayout if self._last else Layout).of(shapes)
        # The end of an nn.Sequential is known at once; of any other module, when it has seen an example.
        self.linear = self._last is not None and self._last == _end_of(self.module)
        # The last layer that was registered may not be the last one that is used: see prepared().
        self.outputs = shapes[f"{self._last}.weight"][0] if self._last else _outputs_of(self.module)
        self.precision = precision
        self._pass: NetworkPass = NetworkPass.of(self.module, self.phi_layout.size, self.dtype, precision)
        self.rows_side_by_side = 0 if self._pass.convolutional else ANY_ROWS  # until it has seen an example
        self.network = not isinstance(module, nn.Linear)
        self._tied = has_ties(self.module)

    def __repr__(self) -> str:
        return (
            f"Split(phi: {self.phi_layout.size}, z: {self.z_layout.size}, "
            f"likelihood: {self.likelihood.name}, personal: {', '.join(self.personal)})"
        )

    def chosen_precision(self) -> str:
        # Without a backbone nothing is ever rounded, so there is nothing to find out.
        return super().chosen_precision() if self._last else name_of(self.dtype)

    def _linear_candidate(self) -> str | None:
        """The linear layer whose parameters are exactly the personal ones, if there is one."""
        for name, sub in self.module.named_modules():
            if type(sub) is nn.Linear and name:
                own = {f"{name}.{n}" for n, _ in sub.named_parameters()}
                if own == set(self._personal):
                    out: str | None = name
                    return out
        return None

    def modules(self) -> list[nn.Module]:
        return [self.module]

    @property
    def deep(self) -> bool:
        size = sum(p.numel() for p in self.module.parameters())
        return not self.linear and size > LARGEST_SHALLOW

    @property
    def frozen(self) -> bool:
        return self.linear and not self._shared and not has_dropout(self.module)

    def initial_phi(self) -> Tensor:
        tensors = trainable(self.module)
        parts = [tensors[n].reshape(-1) for n in self._shared]
        like = self.initial_z()
        return torch.cat([*parts, *initial_params(self.likelihood, like), like.new_zeros(0)])

    def initial_z(self) -> Tensor:
        return self.z_layout.flatten(trainable(self.module))

    def _tensors(self, phi: Tensor, z: Tensor) -> dict[str, Tensor]:
        shared = self.phi_layout.views(phi)
        tensors = {n: shared[n] for n in self._shared} | self.z_layout.views(z)
        return tensors if phi.dtype == self.dtype else tensors | buffers_as(self.module, phi.dtype)

    def _look(self, x: Inputs, phi: Tensor) -> None:
        if self._last is not None:
            # Where x does not fit, the pass below says so.
            with torch.no_grad(), suppress(RuntimeError):
                inside, outside, calls = self._through_last(self._tensors(phi, self.initial_z()), x)
                # The very same tensor comes out of the layer and of the module: nothing follows it.
                self.linear = calls == 1 and inside[1] is outside
        super()._look(x, phi)

    def _through_last(self, tensors: dict[str, Tensor], x: Inputs) -> tuple[Any, Tensor, int]:
        assert self._last is not None
        seen: list[tuple[Tensor, Tensor]] = []
        layer = self.module.get_submodule(self._last)
        handle = layer.register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
        try:
            out = call(self.module, tensors, x)
        finally:
            handle.remove()
        return seen[-1], out, len(seen)

    def embed(self, phi: Tensor, x: Inputs, rows: RowKeys | None = None) -> Inputs:
        if not self.linear:
            return x
        tensors = self._tensors(phi, self.initial_z().to(phi.dtype))
        return self._pass(lambda t, part: self._through_last(t, part)[0][0], tensors, x, rows).to(phi.dtype)

    def head_at(self, phi: Tensor, z: Tensor, features: Inputs, rows: RowKeys | None = None) -> Tensor:
        with dropout_rows(self.module, rows):
            run, tensors = partial(call, self.module, tied=self._tied), self._tensors(phi, z)
            out: Tensor = self._pass.elsewhere(run, tensors, features)
        return out
