"""log p(D_i | phi, z) of every client of a cohort, as a function of z, with phi and features fixed.

Two implementations: a native batched one for linear heads, and one through ``torch.func.vmap`` for
any other. Both take z as ``[C, K, d]``: K chains for each of C clients.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fedpop.errors import ModelError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, leaves, map_inputs
from fedpop.models.likelihoods import Likelihood, Params


class LocalLikelihood(ABC):
    """The likelihoods of a cohort's clients, side by side."""

    examples: int
    """Examples that one evaluation looks at."""

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


class LinearLikelihood(LocalLikelihood):
    """Head outputs F w_o for each output o; F is ``[C, N, q]`` with a column of ones for the bias."""

    def __init__(
        self,
        features: Tensor,
        y: Tensor,
        mask: Tensor | None,
        likelihood: Likelihood,
        params: Params,
    ) -> None:
        self.features, self.y, self.mask = features, y, mask
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
        return LinearLikelihood(take(self.features), take(self.y), weight, self.likelihood, self.params)

    def eta(self, z: Tensor) -> Tensor:
        """Head outputs ``[C, N, K, o]``."""
        clients, chains, _ = z.shape
        q = self.features.shape[-1]
        weight = z.reshape(clients, chains * self.outputs, q)
        eta = torch.bmm(self.features, weight.mT)
        return eta.reshape(clients, -1, chains, self.outputs)

    def value(self, z: Tensor) -> Tensor:
        value = self.likelihood.log_prob(self.eta(z), self.y.unsqueeze(2), self.params)
        return (value if self.mask is None else value * self.mask.unsqueeze(2)).sum(1)

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = self.likelihood.value_and_grad(self.eta(z), self.y.unsqueeze(2), self.params)
        if self.mask is not None:
            value = value * self.mask.unsqueeze(2)
            grad = grad * self.mask[:, :, None, None]
        return value.sum(1), torch.bmm(grad.flatten(2).mT, self.features).reshape(z.shape)

    def gram(self, weight: Tensor | float) -> Tensor:
        """F' diag(weight) F for each client; ``weight`` is a number or ``[C, N]``."""
        rows = self.features
        if isinstance(weight, Tensor) and weight.dim() > 0:
            return torch.bmm((rows * weight.unsqueeze(-1)).mT, rows)
        return torch.bmm(rows.mT, rows) * weight

    def curvature_at(self, z: Tensor) -> Tensor:
        """F' diag(-d2 log p / d eta2) F at z ``[C, d]``, for each output: ``[C, o, q, q]``."""
        weight = self.likelihood.curvature(self.eta(z.unsqueeze(1)), self.params)[:, :, 0]
        if self.mask is not None:
            weight = weight * self.mask.unsqueeze(-1)
        return torch.einsum("cni,cno,cnj->coij", self.features, weight, self.features)


class GeneralLikelihood(LocalLikelihood):
    """Any head, vectorised over clients and chains by vmap.

    ``head(z, features, *extra)`` maps one client's flat z and its padded rows to outputs ``[N, o]``;
    ``extra`` are further ``[C, N]`` blocks that it wants to see.
    """

    def __init__(
        self,
        head: Callable[..., Tensor],
        features: Inputs,
        y: Tensor,
        mask: Tensor | None,
        likelihood: Likelihood,
        params: Params,
        extra: tuple[Tensor, ...] = (),
    ) -> None:
        self.features, self.y, self.extra = features, y, extra
        self.examples = y.shape[0] * y.shape[1]
        block = leaves(features)[0]
        self.mask = block.new_ones(block.shape[:2]) if mask is None else mask.to(y.dtype)

        def log_prob(z: Tensor, x: Inputs, y: Tensor, mask: Tensor, *extra: Tensor) -> Tensor:
            value = likelihood.log_prob(head(z, x, *extra), y, params)
            return (torch.where(mask > 0, value, torch.zeros_like(value)) * mask).sum()

        shared = (None,) * (3 + len(extra))
        self._value = torch.func.vmap(torch.func.vmap(log_prob, in_dims=(0, *shared)))
        grad_and_value = torch.func.grad_and_value(log_prob)
        self._both = torch.func.vmap(torch.func.vmap(grad_and_value, in_dims=(0, *shared)))

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
        out: Tensor = self._value(z, self.features, self.y, self.mask, *self.extra)
        return out

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        grad, value = self._both(z, self.features, self.y, self.mask, *self.extra)
        return value, grad


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
    weight = (n / n.clamp(min=1, max=size)).to(y.dtype).expand(rows.shape)
    if mask is not None:
        weight = weight * (mask[client, rows] > 0)
    return lambda block: block[client, rows], weight


def pad_inputs(cohort: Cohort, features: Inputs) -> Inputs:
    return map_inputs(cohort.pad, features)
