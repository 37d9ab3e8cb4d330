"""log p(D_i | phi, z) of every client of a cohort, as a function of z, with phi and features fixed.

Two implementations: a native batched one for linear heads, and one through ``torch.func.vmap`` for
any other. Both take z as ``[C, K, d]``: K chains for each of C clients.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpop.blocks import ROWS_AT_ONCE
from fedpop.errors import ModelError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, leaves, map_inputs
from fedpop.models.likelihoods import Likelihood, Params
from fedpop.models.modules import inside_transform


class LocalLikelihood(ABC):
    """The likelihoods of a cohort's clients, side by side."""

    examples: int
    """Examples that one evaluation uses."""

    @property
    def sizes(self) -> Tensor:
        """Examples of each client, ``[C]``."""
        raise ModelError(f"{type(self).__name__} does not know its clients' examples")

    def subset(self, size: int, uniform: Callable[[int], Tensor]) -> LocalLikelihood:
        """The likelihood of ``size`` examples of each client, times n_i / size: unbiased, as is its gradient.

        They are drawn without replacement, those with the smallest of the uniform numbers ``[C, n]`` that
        ``uniform(n)`` gives; a client with no more of them keeps all.
        """
        raise ModelError(f"{type(self).__name__} has no examples to draw mini-batches from")

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """log p(D_i | z) as ``[C, K]``."""

    @abstractmethod
    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``[C, K]`` and its gradient in z, ``[C, K, d]``."""

    def grad(self, z: Tensor) -> Tensor:
        """The gradient alone, where that is cheaper."""
        return self.value_and_grad(z)[1]


class NoData(LocalLikelihood):
    """Clients without any example: what is left of the posterior is the prior."""

    examples = 0

    def value(self, z: Tensor) -> Tensor:
        return z.new_zeros(z.shape[:-1])

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.value(z), torch.zeros_like(z)


class LinearLikelihood(LocalLikelihood):
    """Head outputs F w_o for each output o; F is ``[C, N, q]`` with a column of ones for the bias. An offset
    ``[C, N, o]`` is added to them."""

    def __init__(
        self,
        features: Tensor,
        y: Tensor,
        mask: Tensor | None,
        likelihood: Likelihood,
        params: Params,
        offset: Tensor | None = None,
    ) -> None:
        self.features, self.y, self.mask, self.offset = features, y, mask, offset
        self.likelihood, self.params = likelihood, params
        self.outputs = y.shape[-1]
        self.examples = features.shape[0] * features.shape[1]

    @property
    def sizes(self) -> Tensor:
        return _sizes(self.mask, self.y)

    def subset(self, size: int, uniform: Callable[[int], Tensor]) -> LocalLikelihood:
        if size >= self.y.shape[1]:
            return self
        take, weight = _choose(self.mask, self.y, size, uniform)
        offset = None if self.offset is None else take(self.offset)
        return LinearLikelihood(
            take(self.features), take(self.y), weight, self.likelihood, self.params, offset
        )

    def rows(self, clients: Tensor, pick: Tensor) -> LinearLikelihood:
        """That of some rows of every client: ``clients`` ``[C, 1]`` counts them, ``pick`` is ``[C, B]``."""
        mask, offset = (None if block is None else block[clients, pick] for block in (self.mask, self.offset))
        features, y = self.features[clients, pick], self.y[clients, pick]
        return LinearLikelihood(features, y, mask, self.likelihood, self.params, offset)

    @property
    def short(self) -> bool:
        """Whether everyone's rows make one block."""
        return self.y.shape[1] <= ROWS_AT_ONCE

    def at_params(self, params: Params, rows: Tensor | slice) -> LinearLikelihood:
        """That of some clients at other parameters of the likelihood."""
        mask, offset = (None if block is None else block[rows] for block in (self.mask, self.offset))
        return LinearLikelihood(self.features[rows], self.y[rows], mask, self.likelihood, params, offset)

    @cached_property
    def pieces(self) -> list[LinearLikelihood]:
        """This one in blocks of rows, itself where one will do. They are split, not sliced: the backward pass
        of every slice fills a whole block."""
        if self.short:
            return [self]
        cut = [
            itertools.repeat(None) if block is None else block.split(ROWS_AT_ONCE, 1)
            for block in (self.features, self.y, self.mask, self.offset)
        ]
        return [
            LinearLikelihood(features, y, mask, self.likelihood, self.params, offset)
            for features, y, mask, offset in zip(*cut, strict=False)
            if features is not None and y is not None
        ]

    def eta(self, z: Tensor) -> Tensor:
        """Head outputs ``[C, N, K, o]``."""
        clients, chains, _ = z.shape
        q = self.features.shape[-1]
        weight = z.reshape(clients, chains * self.outputs, q)
        eta = torch.bmm(self.features, weight.mT)
        eta = eta.reshape(clients, -1, chains, self.outputs)
        return eta if self.offset is None else eta + self.offset.unsqueeze(2)

    def value(self, z: Tensor) -> Tensor:
        return sum_of(piece._value(z) for piece in self.pieces)

    def _value(self, z: Tensor) -> Tensor:
        value = self.likelihood.log_prob(self.eta(z), self.y.unsqueeze(2), self.params)
        return (value if self.mask is None else value * self.mask.unsqueeze(2)).sum(1)

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        parts = [piece._value_and_grad(z) for piece in self.pieces]
        return sum_of(v for v, _ in parts), sum_of(g for _, g in parts)

    def _value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = self.value_and_slope(z)
        return value, self.grad_of(slope).reshape(z.shape)

    def grad(self, z: Tensor) -> Tensor:
        return sum_of(piece._grad(z) for piece in self.pieces)

    def _grad(self, z: Tensor) -> Tensor:
        """With examples on the last axis, for the sake of speed: ``[C, K, o, N]``."""
        weight = z.reshape(z.shape[0], -1, self.features.shape[-1])
        eta = torch.bmm(weight, self.features.mT).unflatten(1, (-1, self.outputs))
        y, mask, offset = self._across
        if offset is not None:
            eta = eta + offset
        slope = self.likelihood.slope_across(eta, y, self.params)
        if mask is not None:
            slope = slope * mask
        return torch.bmm(slope.flatten(1, 2), self.features).reshape(z.shape)

    @cached_property
    def _across(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Targets ``[C, 1, o, N]``, mask ``[C, 1, 1, N]`` and offset ``[C, 1, o, N]``."""
        mask = None if self.mask is None else self.mask[:, None, None]
        offset = None if self.offset is None else self.offset.mT.unsqueeze(1)
        return self.y.mT.contiguous().unsqueeze(1), mask, offset

    def value_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``[C, K]``, and its derivative in the head's outputs, ``[C, N, K o]``."""
        value, slope = self.likelihood.value_and_grad(self.eta(z), self.y.unsqueeze(2), self.params)
        if self.mask is not None:
            value = value * self.mask.unsqueeze(2)
            slope = slope * self.mask[:, :, None, None]
        return value.sum(1), slope.flatten(2)

    def grad_of(self, slope: Tensor) -> Tensor:
        """The derivative in z, ``[C, K o, q]``, that belongs to one in the outputs."""
        return torch.bmm(slope.mT, self.features)

    def pulled_back(self, z: Tensor, slope: Tensor, width: int) -> Tensor:
        """The derivative, summed over z, in the first ``width`` columns of the features, and in the offset,
        that belongs to one in the outputs at z ``[C, K, d]``: ``[C, N, width]`` or ``[C, N, width + o]``."""
        weight = z.reshape(z.shape[0], -1, self.features.shape[-1])
        pulled = torch.bmm(slope, weight[..., :width])
        if self.offset is None:
            return pulled
        return torch.cat((pulled, slope.unflatten(2, (-1, self.outputs)).sum(2)), -1)

    def gram(self, weight: Tensor | float) -> Tensor:
        """F' diag(weight) F for each client; ``weight`` is a number or ``[C, N]``."""
        rows = self.features
        if isinstance(weight, Tensor) and weight.dim() > 0:
            return torch.bmm((rows * weight.unsqueeze(-1)).mT, rows)
        return torch.bmm(rows.mT, rows) * weight

    def curvature_at(self, z: Tensor) -> Tensor:
        """F' diag(-d2 log p / d eta2) F at z ``[C, d]``, for each output: ``[C, o, q, q]``."""
        return sum_of(piece._curvature_at(z) for piece in self.pieces)

    def _curvature_at(self, z: Tensor) -> Tensor:
        weight = self.likelihood.curvature(self.eta(z.unsqueeze(1)), self.params)[:, :, 0]
        if self.mask is not None:
            weight = weight * self.mask.unsqueeze(-1)
        return torch.einsum("cni,cno,cnj->coij", self.features, weight, self.features)


class Evaluated(NamedTuple):
    """The likelihood of linear heads at some z: ``LinearLikelihood.value_and_slope``, and of which one."""

    local: LinearLikelihood
    value: Tensor
    slope: Tensor


class GeneralLikelihood(LocalLikelihood):
    """Any likelihood, vectorised over clients and chains by vmap, or in a loop if not ``side_by_side``.

    ``log_prob(z, x, y, *extra)`` maps one client's flat z and its rows to a value per row, ``[N]``;
    ``extra`` are further ``[C, N]`` blocks that it wants to see. Padding repeats real rows.
    """

    def __init__(
        self,
        log_prob: Callable[..., Tensor],
        features: Inputs,
        y: Tensor,
        cohort: Cohort,
        extra: tuple[Tensor, ...] = (),
        side_by_side: bool = True,
    ) -> None:
        self.features, self.y = map_inputs(cohort.fill, features), cohort.fill(y)
        self.extra = tuple(cohort.fill(v) for v in extra)
        self.examples = len(cohort) * cohort.longest
        mask = cohort.mask
        dtype = self.y.dtype if self.y.is_floating_point() else torch.get_default_dtype()
        self.mask = self.y.new_ones(self.y.shape[:2], dtype=dtype) if mask is None else mask.to(dtype)
        self._empty, self._donor = cohort.empty, cohort.donor

        def total(z: Tensor, x: Inputs, y: Tensor, mask: Tensor, *extra: Tensor) -> Tensor:
            value = log_prob(z, x, y, *extra)
            return (torch.where(mask > 0, value, torch.zeros_like(value)) * mask).sum()

        self._total = total
        shared = (None,) * (3 + len(extra))
        self._side_by_side, over = side_by_side, torch.func.vmap if side_by_side else _looped
        self._one = over(total)
        self._many = over(over(total, in_dims=(0, *shared)))
        grad_and_value = torch.func.grad_and_value(total)
        self._both = over(over(grad_and_value, in_dims=(0, *shared)))

    @property
    def sizes(self) -> Tensor:
        return _sizes(self.mask, self.y)

    def subset(self, size: int, uniform: Callable[[int], Tensor]) -> LocalLikelihood:
        if size >= self.y.shape[1]:
            return self
        part = copy.copy(self)
        take, part.mask = _choose(self.mask, self.y, size, uniform)
        part.features, part.y = map_inputs(take, self.features), take(self.y)
        part.extra = tuple(take(block) for block in self.extra)
        part.examples = part.y.shape[0] * part.y.shape[1]
        return part

    def value(self, z: Tensor) -> Tensor:
        if not self.examples:
            return z.new_zeros(z.shape[:2])
        out = self._evaluate(self._lent(z))
        return out if self._empty is None else out.masked_fill(self._empty.unsqueeze(1), 0.0)

    def _evaluate(self, z: Tensor) -> Tensor:
        return sum_of(self._part(z, piece) for piece in self._pieces())

    def _part(self, z: Tensor, piece: tuple[Any, ...]) -> Tensor:
        out: Tensor
        if z.shape[1] == 1:  # one chain each: one level of vmap less to pay for
            out = self._one(z[:, 0], *piece)
            return out.unsqueeze(1)
        out = self._many(z, *piece)
        return out

    def _pieces(self) -> list[tuple[Any, ...]]:
        """Features, targets, masks and further blocks, of so many examples at a time."""
        parts = (*leaves(self.features), self.y, self.mask, *self.extra)
        pieces = []
        for piece in zip(*(v.split(ROWS_AT_ONCE, 1) for v in parts), strict=True):
            left = iter(piece)
            pieces.append((map_inputs(lambda _, left=left: next(left), self.features), *left))
        return pieces

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if not self.examples:
            return z.new_zeros(z.shape[:2]), torch.zeros_like(z)
        parts = [self._both_of(self._lent(z), piece) for piece in self._pieces()]
        value, grad = sum_of(v for v, _ in parts), sum_of(g for _, g in parts)
        if self._empty is None:
            return value, grad
        return (
            value.masked_fill(self._empty.unsqueeze(1), 0.0),
            grad.masked_fill(self._empty[:, None, None], 0.0),
        )

    def _both_of(self, z: Tensor, piece: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if inside_transform():  # of another one (a product with the Hessian, say)
            grad, value = self._both(z, *piece)
            return value, grad
        if not self._side_by_side:
            return self._each(z, piece)
        # A chain's value depends on its own z alone, so plain autograd on the sum has all gradients, at two
        # thirds of the price of a gradient under vmap.
        with torch.enable_grad():
            free = z.detach().requires_grad_()
            value = self._part(free, piece)
            (grad,) = torch.autograd.grad(value.sum(), free)
        return value.detach(), grad

    def _each(self, z: Tensor, piece: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """One after the other, so that one graph at a time is held."""
        value, grad = z.new_empty(z.shape[:2]), torch.empty_like(z)
        for c, k in itertools.product(*map(range, z.shape[:2])):
            free = z[c, k].detach().clone().requires_grad_()
            own: list[Any] = [map_inputs(lambda v, c=c: v[c], part) for part in piece]
            with torch.enable_grad():
                one = self._total(free, *own)
            value[c, k] = one.detach()
            (slope,) = torch.autograd.grad(one, free, materialize_grads=True, allow_unused=True)
            grad[c, k] = slope
        return value, grad

    def _lent(self, z: Tensor) -> Tensor:
        # A client without examples borrows another's rows, so it borrows the z that belongs to them.
        return z if self._empty is None else z[self._donor]


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """The sum of what blocks give, one after the other; the one block's own where there is one."""
    return reduce(torch.add, parts)


def _looped(function: Callable[..., Any], in_dims: tuple[int | None, ...] | int = 0) -> Callable[..., Any]:
    """What ``torch.func.vmap`` gives, one after the other."""

    def run(*args: Any) -> Any:
        over = (0,) * len(args) if isinstance(in_dims, int) else in_dims
        count = next(len(leaves(a)[0]) for a, d in zip(args, over, strict=True) if d == 0)
        each = [
            function(
                *(
                    a if d is None else map_inputs(lambda v, i=i: v[i], a)
                    for a, d in zip(args, over, strict=True)
                )
            )
            for i in range(count)
        ]
        if isinstance(each[0], tuple):
            return tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return torch.stack(each)

    return run


def _sizes(mask: Tensor | None, y: Tensor) -> Tensor:
    clients, rows = y.shape[:2]
    if mask is None:
        return torch.full((clients,), rows, device=y.device)
    return (mask > 0).sum(1)


def _choose(
    mask: Tensor | None, y: Tensor, size: int, uniform: Callable[[int], Tensor]
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """How to take a uniform subset of each client's rows from a block, and its weights ``[C, size]``."""
    number = uniform(y.shape[1])
    if mask is not None:
        number = number + 2 * (mask <= 0)  # padding last
    rows = torch.topk(number, size, largest=False).indices.sort().values
    client = torch.arange(y.shape[0], device=y.device).unsqueeze(1)
    n = _sizes(mask, y).unsqueeze(1)
    like = y if mask is None or not mask.is_floating_point() else mask
    weight = (n / n.clamp(min=1, max=size)).to(like.dtype).expand(rows.shape)
    if mask is not None:
        weight = weight * (mask[client, rows] > 0)
    return lambda block: block[client, rows], weight
