"""J of a cohort: the gradient in phi of the clients' log-likelihood, averaged over draws of z.

The average over draws is linear, so it is one backward pass through the backbone whatever their number; and
the server needs only the sum over clients, so one pass serves them all unless each must be looked at alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, leaves, map_inputs
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.local import Evaluated, LinearLikelihood
from fedpop.models.modules import RowKeys, is_convolutional

LARGEST_PHI_SIDE_BY_SIDE = 100_000
"""Entries of phi up to which clients' gradients are computed side by side."""
GRADIENT_NUMBERS_AT_ONCE = 2**22
"""Numbers that such a batch of clients may hold, about."""
LEAST_CLIENTS_FOR_VMAP = 3
"""Clients for each call of vmap from which that is faster than one after the other."""


@dataclass(frozen=True)
class PhiGradient:
    """J of a cohort: one backward pass of the log-likelihood averaged over the draws."""

    model: Model
    moments: tuple[Tensor, ...] | None
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
        self,
        phi: Tensor,
        features: Inputs,
        cohort: Cohort,
        keys: RowKeys | None,
        good: Tensor,
        coefficients: Tensor,
        evaluated: Evaluated | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One backward for all units: the server only ever needs the sum with these coefficients.

        Who is fit to be heard, log-likelihoods, and that sum. ``evaluated`` is the likelihood at the draws,
        of a linear head, where it is at hand.
        """
        if self.moments is None and self.model.linear and isinstance(features, Tensor):
            return self._through_head(phi, features, cohort, keys, good, coefficients, evaluated)
        with torch.enable_grad():
            value = self.value(phi, features, cohort, keys)
            found = value.detach()
            good = good & (found - found == 0)  # as isfinite, for half the price
            # A client with an infinite likelihood would poison everyone's gradient.
            kept = value if bool(good.all()) else torch.where(good, value, torch.zeros_like(value))
            return good, found, gradient([kept], phi, [coefficients.to(value.dtype)])

    def _through_head(
        self,
        phi: Tensor,
        features: Tensor,
        cohort: Cohort,
        keys: RowKeys | None,
        good: Tensor,
        coefficients: Tensor,
        evaluated: Evaluated | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same where the head is linear: its part of the chain rule is a product, and so is all of it
        where the backbone is a linear map."""
        model, draws = self.model, self.draws
        with torch.no_grad():
            if evaluated is None:
                local = model.bind(phi, features.detach(), cohort, keys)
                assert isinstance(local, LinearLikelihood)
                evaluated = Evaluated(local, *local.value_and_slope(draws))
            local, value = evaluated.local, evaluated.value.mean(1)
            good = good & (value - value == 0)  # as isfinite, for half the price
            share = coefficients.to(value.dtype) / draws.shape[1]
            slope = local.pulled_back(draws, evaluated.slope, features.shape[-1] - model.offsets)
            slope = slope * share[:, None, None]
            if not bool(good.all()):  # a client with an infinite likelihood would poison everyone's gradient
                slope = torch.where(good[:, None, None], slope, torch.zeros_like(slope))
            slope = cohort.packed(slope)
        own = self._params_gradient(local, good, share) if local.params else {}
        if model.pulls_back(cohort):
            return good, value, model.phi_layout.flatten(model.pulled_back(cohort, slope) | own)
        j = gradient([features], phi, [slope])
        for name, part in own.items():
            j[model.phi_layout.spans()[name]] = part
        return good, value, j

    def _params_gradient(self, local: LinearLikelihood, good: Tensor, share: Tensor) -> dict[str, Tensor]:
        """The derivative in the likelihood's own parameters, by their names in phi."""
        with torch.enable_grad():
            at = {name: v.detach().requires_grad_() for name, v in local.params.items()}
            rows = slice(None) if bool(good.all()) else good
            value = local.at_params(at, rows).value(self.draws[rows]).sum(1)
            grads = torch.autograd.grad(value @ share[rows], tuple(at.values()))
        return {f"likelihood.{name}": g for name, g in zip(at, grads, strict=True)}

    def each(
        self,
        phi: Tensor,
        cohort: Cohort,
        key: Key,
        batch: int | None = None,
        features: Sequence[Inputs] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """J_i of each unit, as it is ready: to be compressed, from mini-batches, or to find a culprit.

        Positions, values and J of one unit, or of many, at a time; ``features`` are those of ``embedded``,
        each with a graph of its own.
        """
        if batch is None and features is None and self._worth_batching(phi, cohort):
            blocks = self._side_by_side(phi, cohort, key)
            try:
                first = next(blocks)
            except RuntimeError:
                pass  # a layer that vmap does not know: client by client, then
            else:
                yield first
                yield from blocks
                return
        for c, one in enumerate(cohort.one_by_one()):
            part, factor = minibatch(one, batch, key)
            keys = self.model.dropout_keys(part, key)
            with torch.enable_grad():
                own = self.model.features(phi, part, keys) if features is None else features[c]
                value = factor * self.value(phi, own, part, keys, slice(c, c + 1))
                j = gradient([value], phi, [torch.ones_like(value)])
            yield torch.tensor([c], device=phi.device), value.detach(), j.unsqueeze(0)

    def _worth_batching(self, phi: Tensor, cohort: Cohort) -> bool:
        calls = len(equal_pieces(cohort.sizes, self.model.linear))
        return vectorises(self.model, phi) and len(cohort) >= LEAST_CLIENTS_FOR_VMAP * calls

    def _side_by_side(self, phi: Tensor, cohort: Cohort, key: Key) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Many clients at once, through vmap: each piece of its rows is a cohort of one."""
        phi, keys = phi.detach(), self.model.dropout_keys(cohort, key)
        starts = torch.cumsum(cohort.sizes, 0) - cohort.sizes
        width = sum(leaf[:1].numel() for leaf in leaves(cohort.x))
        block = max(1, GRADIENT_NUMBERS_AT_ONCE // (phi.shape[0] + 4 * cohort.longest * width))
        for some in torch.arange(len(cohort), device=phi.device).split(block):
            value, j = phi.new_zeros(len(some)), phi.new_zeros((len(some), phi.shape[0]))
            for n, index, offset in equal_pieces(cohort.sizes[some], self.model.linear):
                own = some[index]
                rows = (starts[own] + offset).unsqueeze(1) + torch.arange(n, device=phi.device)
                moments = () if self.moments is None else tuple(m[own] for m in self.moments)
                named = () if keys is None else (keys.clients[rows], keys.positions[rows])
                x = map_inputs(lambda v, r=rows: v[r], cohort.x)
                one = torch.func.grad_and_value(self._one_client(cohort, keys, n))
                many = torch.func.vmap(one, in_dims=(None, 0, 0, 0, 0, 0))
                gradients, values = many(phi, x, cohort.y[rows], self.draws[own], moments, named)
                j.index_add_(0, index, gradients)
                value.index_add_(0, index, values)
            yield some, value, j

    def _one_client(self, cohort: Cohort, keys: RowKeys | None, n: int) -> Callable[..., Tensor]:
        """E[log p(D_i | z, phi)] of one client as a function of phi and its own tensors."""
        sizes = cohort.sizes.new_full((1,), n)

        def value(
            phi: Tensor,
            x: Inputs,
            y: Tensor,
            draws: Tensor,
            moments: tuple[Tensor, ...],
            named: tuple[Tensor, ...],
        ) -> Tensor:
            alone = Cohort(sizes.new_zeros(1), sizes, x, y, n, cohort.embedded)
            rows = None if keys is None else RowKeys(keys.key, *named)
            own = tuple(m.unsqueeze(0) for m in moments) or None
            estimate = replace(self, moments=own, draws=draws.unsqueeze(0))
            return estimate.value(phi, self.model.features(phi, alone, rows), alone, rows).squeeze(0)

        return value


def embedded(
    model: Model, phi: Tensor, cohort: Cohort, keys: RowKeys | None, *, graph: bool, separate: bool
) -> tuple[Inputs, list[Inputs] | None]:
    """A cohort's features, with the graph to phi if asked for; ``separate``: each client's with its own
    graph, as parts, so that one forward pass serves a backward pass of each."""
    if not separate:
        with torch.set_grad_enabled(graph):
            return model.features(phi, cohort, keys), None
    parts, start = [], 0
    with torch.enable_grad():
        for one in cohort.one_by_one():
            end = start + one.y.shape[0]
            own = keys and RowKeys(keys.key, keys.clients[start:end], keys.positions[start:end])
            parts.append(model.features(phi, one, own))
            start = end
    with torch.no_grad():
        return map_inputs(lambda *leaf: torch.cat(leaf), *parts), parts


def equal_pieces(sizes: Tensor, divisible: bool) -> list[tuple[int, Tensor, Tensor]]:
    """Clients' rows in pieces of few different lengths: length, whose, and from which of its rows on.

    Rows of one client are one piece, unless there are many sizes and sums over rows may be cut: then pieces
    are powers of two, the largest first, and a client of 13 rows has pieces of 8, 4 and 1.

    >>> equal_pieces(torch.tensor([3, 0, 3]), True)
    [(3, tensor([0, 2]), tensor([0, 0]))]
    >>> [(n, index.tolist(), offset.tolist()) for n, index, offset in equal_pieces(torch.arange(1, 7), True)]
    [(1, [0, 2, 4], [0, 2, 4]), (2, [1, 2, 5], [0, 0, 4]), (4, [3, 4, 5], [0, 0, 0])]
    """
    different = [n for n in torch.unique(sizes).tolist() if n]
    bits = max(different, default=0).bit_length()
    if not divisible or len(different) <= bits:
        whose = [(sizes == n).nonzero().squeeze(1) for n in different]
        return [(n, index, torch.zeros_like(index)) for n, index in zip(different, whose, strict=True)]
    pieces = []
    for b in range(bits):
        index = (sizes >> b & 1).nonzero().squeeze(1)
        pieces.append((1 << b, index, sizes[index] >> (b + 1) << (b + 1)))
    return [piece for piece in pieces if len(piece[1])]


def vectorises(model: Model, phi: Tensor) -> bool:
    """A gradient per client is worth batching: small networks, where calls cost more than arithmetic."""
    return phi.numel() <= LARGEST_PHI_SIDE_BY_SIDE and not any(is_convolutional(m) for m in model.modules())


def finite_rows(v: Tensor) -> Tensor:
    """Which rows of ``[C, D]`` have only finite entries."""
    if v.shape[1] == 0:
        return torch.ones(len(v), dtype=torch.bool, device=v.device)
    return torch.isfinite(v.abs().amax(1))


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


def minibatch(cohort: Cohort, size: int | None, key: Key) -> tuple[Cohort, float]:
    """A uniform subset of one client's examples, and the factor that makes its sum unbiased."""
    n = int(cohort.sizes[0])
    if size is None or n <= size:
        return cohort, 1.0
    u = key.at(purpose="minibatch").uniform(cohort.units, (n,))[0]
    rows = torch.topk(u, size, largest=False).indices.sort().values
    sizes = cohort.sizes.new_full((1,), size)
    return cohort.take(rows, cohort.units, sizes), n / size
