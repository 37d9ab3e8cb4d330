"""An ``nn.Module`` and the flat vector of its parameters: the vector's layout with named views, which is what
compressors, optimisers, checkpoints and transports see; what a module must be like to be federated, and the
small changes that make it so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedpop.checked import Count, checked
from fedpop.devices import tensors_on
from fedpop.errors import ModelError
from fedpop.federation.inputs import Inputs, leaves, map_inputs, rows_of
from fedpop.keys import Key
from fedpop.precision import check, choose, reason


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors that one flat vector holds, in order.

    >>> layout = Layout.of({"w": (2, 3), "b": (2,)})
    >>> layout.size
    8
    >>> {name: tuple(v.shape) for name, v in layout.views(torch.arange(8.0)).items()}
    {'w': (2, 3), 'b': (2,)}
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        return cls(tuple(shapes), tuple(tuple(s) for s in shapes.values()))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(s) for s in self.shapes)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views onto the last axis of ``flat``; leading axes are kept."""
        # One split: slicing tensor by tensor would make the backward pass quadratic.
        parts = torch.split_with_sizes(flat, list(self.sizes), dim=-1)
        lead = flat.shape[:-1]
        return {
            name: part.reshape((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The inverse of ``views`` for tensors without leading axes."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unit(self, name: str) -> float | None:
        """The natural size of a change of this tensor's entries, where its meaning says it."""
        return None

    def spans(self) -> dict[str, slice]:
        """Where each name lies in the flat vector."""
        out, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            out[name] = slice(start, start + size)
            start += size
        return out


@dataclass(frozen=True)
class RowKeys:
    """Names the rows of a batch: each example is (client, position in the client's data)."""

    key: Key
    clients: Tensor
    positions: Tensor


class KeyedLayer(nn.Module):
    """A layer that draws per example; it is on while ``rows`` names the examples of the batch."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
        self.rows: RowKeys | None = None

    @property
    def active(self) -> bool:
        """Whether it draws at all when it is on."""
        return True

    def words(self, count: int, device: torch.device) -> Tensor:
        """``count`` random 32-bit words for each example of the batch."""
        assert self.rows is not None
        rows = self.rows
        key = rows.key.at(purpose=self.label)
        return key.bits(rows.clients, count, rows.positions * ((count + 3) // 4)).to(device)


class KeyedDropout(KeyedLayer):
    """Dropout whose masks are keyed by (seed, round, client, example), not by global state."""

    def __init__(self, p: float, label: str, channels: bool = False) -> None:
        super().__init__(f"dropout.{label}")
        self.p, self.channels = p, channels

    @property
    def active(self) -> bool:
        return self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        if self.rows is None or self.p == 0:
            return x
        shape = x.shape[1:2] if self.channels else x.shape[1:]
        mask = (
            (self.words(math.prod(shape), x.device) >= int(self.p * 2**32))
            .to(x.dtype)
            .reshape(x.shape[0], *shape)
        )
        if self.channels:
            mask = mask.reshape(*mask.shape, *(1,) * (x.dim() - 2))
        return x * mask / (1 - self.p)


_ELEMENTWISE = (nn.Dropout,)
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_REFUSED = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, new)


def federated(module: nn.Module, prefix: str = "") -> nn.Module:
    """A private copy that is safe to federate: keyed dropout, no batch statistics.

    ``prefix`` keeps the masks of two modules apart.
    """
    for name, sub in module.named_modules():
        _require_plain(name, sub)
    try:
        module = copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"{type(module).__name__} cannot be copied: {error}") from error
    if isinstance(module, (*_ELEMENTWISE, *_CHANNELWISE)):
        module = nn.Sequential(module)
    for name, sub in list(module.named_modules()):
        label = f"{name or 'the module'} ({type(sub).__name__})"
        if isinstance(sub, nn.modules.batchnorm._BatchNorm) and (sub.training or not sub.track_running_stats):
            raise ModelError(
                f"{label} is in training mode: its statistics would mix the examples of a batch and "
                "leak between clients, and every client's would differ. Use "
                "fedpop.layers.replace_batchnorm(module), which puts GroupNorm in its place, or freeze "
                "the statistics with .eval()"
            )
        if isinstance(sub, _REFUSED):
            raise ModelError(f"{label} draws from the global generator; use nn.Dropout instead")
        if isinstance(sub, _ELEMENTWISE):
            _replace(module, name, KeyedDropout(_rate(sub), prefix + name))
        elif isinstance(sub, _CHANNELWISE):
            _replace(module, name, KeyedDropout(_rate(sub), prefix + name, channels=True))
    return module


def _rate(layer: nn.modules.dropout._DropoutNd) -> float:
    """Of a layer in evaluation mode it is zero, as torch has it."""
    return layer.p if layer.training else 0.0


def require_together(*modules: nn.Module) -> None:
    """Raise where modules of one model share a parameter, or have parameters of several types or devices."""
    whose: dict[int, int] = {}
    kinds: dict[tuple[torch.dtype, torch.device], str] = {}
    for k, module in enumerate(modules):
        for name, tensor in module.named_parameters():
            kinds.setdefault((tensor.dtype, tensor.device), name)
            if whose.setdefault(id(tensor), k) != k:
                raise ModelError(
                    f"{name} is a parameter of two modules: it would be shared and private; give each its own"
                )
    if len(kinds) > 1:
        present = ", ".join(f"{name} {dtype} on {device}" for (dtype, device), name in kinds.items())
        raise ModelError(
            f"a model's parameters are of one type on one device, not {present}; use module.to(...)"
        )


def _require_plain(name: str, sub: nn.Module) -> None:
    """Raise for layers whose parameters are not there yet, are made of others, or that draw by themselves."""
    label = f"{name or 'the module'} ({type(sub).__name__})"
    if isinstance(sub, torch.jit.ScriptModule):
        raise ModelError(
            f"{label} was made by torch.jit, which keeps its own weights where others are given; use the "
            "module that it was made from (torch.compile'd modules are taken)"
        )
    if isinstance(sub, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(f"{label} spreads over devices by itself; give what it wraps, its .module")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in sub.parameters(recurse=False)):
        raise ModelError(f"{label} is lazy: its weights come with the first example; run module(x)")
    if isinstance(sub, nn.Embedding | nn.EmbeddingBag) and sub.sparse:
        raise ModelError(f"{label} has sparse gradients, which cannot be sent; make it with sparse=False")
    for own, tensor in sub.named_parameters(recurse=False):
        if tensor.device.type == "meta" or tensor.dtype not in (torch.float32, torch.float64):
            kind = "no values (device meta)" if tensor.device.type == "meta" else f"type {tensor.dtype}"
            raise ModelError(
                f"{own} of {label} has {kind}: weights are float32 or float64, module.float(); for speed "
                "there is precision='bfloat16'"
            )
    hooks = {kind.__name__ for h in sub._forward_pre_hooks.values() for kind in type(h).__mro__}
    if "BasePruningMethod" in hooks:
        raise ModelError(
            f"{label} is being pruned: its weight is made of another one and a mask; make it a plain one "
            "first with torch.nn.utils.prune.remove(layer, 'weight')"
        )
    if hooks & {"WeightNorm", "SpectralNorm"} or nn.utils.parametrize.is_parametrized(sub):
        raise ModelError(
            f"{label} has a weight that is made of others (weight_norm, spectral_norm, parametrizations), so "
            "that it is none that could be shared or private; make it a plain one first with "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.remove_weight_norm, "
            "remove_spectral_norm"
        )
    if isinstance(sub, nn.MultiheadAttention | nn.RNNBase) and sub.training and sub.dropout > 0:
        raise ModelError(
            f"{label} has a dropout of {sub.dropout:g} inside, which torch draws from its global generator, "
            f"so runs could not be repeated or resumed; set {name or 'module'}.dropout = 0.0, and put an "
            "nn.Dropout, which fedpop keys, before or after it"
        )


@checked
def replace_batchnorm(module: nn.Module, groups: Count = 8) -> nn.Module:
    """A copy with GroupNorm instead of BatchNorm, which needs no statistics across examples.

    Args:
        module: The network, which stays as it is; weights and biases of its layers are copied.
        groups: Into how many groups channels are put (default: 8); where they do not come out even, the
            largest number that divides both.

    >>> from torch import nn
    >>> replace_batchnorm(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))[1]
    GroupNorm(8, 16, eps=1e-05, affine=True...)
    """
    module = copy.deepcopy(module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _group_norm(module, groups)
    for name, sub in list(module.named_modules()):
        if isinstance(sub, nn.modules.batchnorm._BatchNorm):
            _replace(module, name, _group_norm(sub, groups))
    return module


def _group_norm(norm: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    groups = math.gcd(groups, norm.num_features)
    new = nn.GroupNorm(groups, norm.num_features, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        new.load_state_dict({"weight": norm.weight.detach(), "bias": norm.bias.detach()})
    return new.to(norm.weight.device) if norm.affine else new


@contextmanager
def dropout_rows(module: nn.Module, rows: RowKeys | None) -> Iterator[None]:
    """Layers that draw are on, keyed by ``rows``, inside; off when ``rows`` is None."""
    layers = [] if rows is None else [m for m in module.modules() if isinstance(m, KeyedLayer)]
    for layer in layers:
        layer.rows = rows
    try:
        yield
    finally:
        for layer in layers:
            layer.rows = None


def has_dropout(module: nn.Module) -> bool:
    """Whether any layer draws per example: dropout, or augmentation."""
    return any(isinstance(m, KeyedLayer) and m.active for m in module.modules())


def is_convolutional(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def buffers_as(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """A module's constants in another type, for a pass with parameters of that type."""
    return {n: b.to(dtype) for n, b in module.named_buffers() if b.is_floating_point()}


def is_hooked(module: nn.Module) -> bool:
    """Whether calling it does more than its ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_ties(module: nn.Module) -> bool:
    """Whether a parameter or a buffer is there under two names."""
    parameters, buffers = (
        (len(list(named(remove_duplicate=False))), len(list(named())))
        for named in (module.named_parameters, module.named_buffers)
    )
    return parameters[0] != parameters[1] or buffers[0] != buffers[1]


def call(module: nn.Module, tensors: dict[str, Tensor], x: object, tied: bool = True) -> Tensor:
    """``module(x)`` with these parameters; a tuple becomes arguments, a dict keyword arguments. Looking for
    parameters that are ``tied`` takes a tenth of a small network's pass."""
    if type(module) is nn.Linear and isinstance(x, Tensor) and "weight" in tensors and not is_hooked(module):
        return linear(x, tensors["weight"], tensors.get("bias", module.bias))  # a tenth of the overhead
    if isinstance(x, dict):
        out = torch.func.functional_call(module, tensors, (), x, tie_weights=tied)
    elif isinstance(x, tuple):
        out = torch.func.functional_call(module, tensors, x, tie_weights=tied)
    else:
        out = torch.func.functional_call(module, tensors, (x,), tie_weights=tied)
    return out  # type: ignore[no-any-return]


Forward = Callable[[dict[str, Tensor], Inputs], Any]
IMAGES_PER_THREAD = 50
"""Images that go through a convolutional network at a time on a CPU, for each of its threads: the buffers of
a larger batch are handed back to the operating system after every use, and page faults cost up to a quarter
of the time; of a smaller one threads have too little each."""
LEAST_ROUNDED = 100_000
"""Parameters from which a network without convolutions is worth rounding."""


@dataclass(frozen=True)
class NetworkPass:
    """A forward pass of one module, the same for every model that is made of one."""

    module: nn.Module
    convolutional: bool
    worth: bool
    """Large enough to be worth rounding: 8 bits of a few statistical parameters buy nothing."""
    precision: str = "auto"
    """What it runs in; the parameters' own type unless this is ``bfloat16``, so also before ``auto`` was
    decided."""
    device: torch.device | None = None
    """Where it runs if that is not where everything else is: on a device without double precision."""

    @classmethod
    def of(cls, module: nn.Module, size: int, dtype: torch.dtype, precision: str) -> NetworkPass:
        """``size``: how many shared parameters of type ``dtype`` there are."""
        check(precision)
        convolutional = is_convolutional(module)
        # torch leaves double precision as it is.
        worth = (convolutional or size > LEAST_ROUNDED) and dtype == torch.float32
        return cls(module, convolutional, worth, precision)

    @property
    def autocast(self) -> torch.dtype | None:
        """bfloat16, or None to compute in the parameters' own type."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def chosen(self, device: torch.device) -> str:
        """``float32`` or ``bfloat16``, found out where it was left open."""
        return choose(self.precision, self.device or device, self.worth)

    def because(self, device: torch.device) -> str:
        """Why it runs in what it runs in, where that was left open."""
        device = self.device or device
        same = choose("auto", device, self.worth) == self.precision
        return reason(device, self.worth) if same else "as when the run began"

    def at(self, precision: str) -> NetworkPass:
        check(precision)
        return replace(self, precision=precision)

    @cached_property
    def _constants(self) -> dict[str, Tensor]:
        """On the device: what of the module stands still."""
        assert self.device is not None
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return tensors_on(self.device, {n: t for n, t in named.items() if not t.requires_grad})

    def elsewhere(self, forward: Forward, tensors: dict[str, Tensor], x: Inputs) -> Any:
        """``forward(tensors, x)``, on the device where that is another one; in double precision here."""
        single = all(t.dtype != torch.float64 for t in tensors.values())
        if self.device is None or not single:
            return forward(tensors, x)
        there = self.device
        out = forward(self._constants | tensors_on(there, tensors), map_inputs(lambda v: v.to(there), x))
        return out.to(leaves(x)[0].device) if isinstance(out, Tensor) else out

    def __call__(
        self, forward: Forward, tensors: dict[str, Tensor], x: Inputs, rows: RowKeys | None
    ) -> Tensor:
        """``forward(tensors, x)`` block by block; dropout is on when ``rows`` name the examples."""
        count = rows_of(x)
        cuts = self.convolutional and self.device is None and leaves(x)[0].device.type == "cpu"
        block = IMAGES_PER_THREAD * torch.get_num_threads() if cuts else max(count, 1)
        if count <= block:
            return self._block(forward, tensors, x, rows)
        parts = []
        for start in range(0, count, block):
            cut = slice(start, start + block)
            keys = rows and RowKeys(rows.key, rows.clients[cut], rows.positions[cut])
            parts.append(self._block(forward, tensors, map_inputs(lambda v, c=cut: v[c], x), keys))
        return torch.cat(parts)

    def _block(self, forward: Forward, tensors: dict[str, Tensor], x: Inputs, rows: RowKeys | None) -> Tensor:
        if self.convolutional and not inside_transform():  # vmap knows one memory format
            x = map_inputs(_channels_last, x)
        with dropout_rows(self.module, rows):
            if self.autocast is None:
                features = self.elsewhere(forward, tensors, x)
            else:
                with torch.autocast((self.device or leaves(x)[0].device).type, self.autocast):
                    features = self.elsewhere(forward, tensors, x)
        if not isinstance(features, Tensor):
            raise ModelError("the backbone must give one tensor of features per batch")
        return features


def inside_transform() -> bool:
    """Whether a transform of torch.func is running, whose tensors plain autograd must not cut off."""
    out: bool = torch._C._functorch.peek_interpreter_stack() is not None
    return out


def _channels_last(leaf: Tensor) -> Tensor:
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf


M = TypeVar("M", bound=nn.Module)


def blank(kind: type[M], *args: Any, **settings: Any) -> M:
    """A layer of zeros: nothing is drawn from the global generator for it.

    ``nn.utils.skip_init`` does nearly the same, but imports sympy: half a second in every process of a site.

    >>> blank(nn.Linear, 2, 1, bias=False).weight
    Parameter containing:
    tensor([[0., 0.]], requires_grad=True)
    """
    layer = kind(*args, device="meta", **settings)
    for module in layer.modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros(empty.shape, dtype=empty.dtype)))
    return layer
