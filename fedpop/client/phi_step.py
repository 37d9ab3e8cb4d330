"""The step on phi: what a unit makes of its draws of z, one gradient or epochs of its own.

J is the gradient in phi of the clients' log-likelihood, averaged over draws of z. The average is linear, so
it is one backward pass through the backbone whatever their number; and the server needs only the sum over
clients, so one pass serves them all unless each is wanted by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedpop.checked import Count, Positive
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import body_loss, gradient
from fedpop.decisions import Decision
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, leaves, map_inputs
from fedpop.kernels import Target
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.local import Evaluated, LinearLikelihood
from fedpop.models.modules import RowKeys
from fedpop.server.optimisers import Adam, Constant, NetworkAdam, Optimiser, Rounds, Schedule
from fedpop.settings import Setting

LINEAR, NETWORK = Adam(), NetworkAdam()
"""What None stands for, by the backbone."""


@dataclass(frozen=True)
class PhiStep(Setting):
    """How phi, the shared parameters, moves.

    A client sends its gradient J_i, or D_i = n_i (phi_i - phi) / rate after steps on a copy of its own:
    one full-batch step gives J_i, more drift as FedAvg does.

    Args:
        optimiser: The server's step on the sum of J_i; None (the default) suits the backbone: ``Adam()``, or
            ``NetworkAdam()`` for networks.
        batch: How many of a client's examples J_i is made from; None (the default) is all of them. Fewer
            make rounds cheaper and noisier.
        local: ``LocalSGD(...)`` has clients take epochs of steps on their own copy of phi and send D_i
            in J_i's place, which saves rounds; None (the default) has them send J_i. It has a batch of
            its own.
        schedule: What the rate of local steps is multiplied by over the rounds; ``Constant()`` by
            default.
        head: Local steps of a network whose head is larger, by the root mean square of z under the prior,
            are shorter: by the square of how much larger it is, as the loss curves in a layer's weights as
            the square of the weights after it, and full steps would kill the network. 0.5 by default; None
            takes the rate as it is.
        ball: The largest norm of phi, onto which longer ones are projected; None is a million times that of
            its start, or of one.

    >>> PhiStep(Adam(0.01), batch=50).batch
    50
    """

    optimiser: Optimiser | None = None
    batch: Count | None = None
    local: LocalSGD | None = None
    schedule: Schedule = field(default_factory=Constant)
    head: Positive | None = 0.5
    ball: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local is not None and self.batch is not None:
            raise SettingsError("a batch of local epochs on phi is part of local, LocalSGD(batch=...)")
        if self.optimiser is not None and self.optimiser.averages and self.local is None:
            raise SettingsError(
                "fedpop.steps.MeanMove() averages clients' own steps on phi; it needs "
                "phi_step=PhiStep(MeanMove(), local=LocalSGD(...))"
            )

    def step(self, model: Model, examples: float = math.inf) -> Optimiser:
        """The server's optimiser on this model's phi, where everyone has so many examples together."""
        case = (model.network, model.weights, examples)
        if case not in self._made:
            chosen = self.optimiser or (NETWORK if model.network else LINEAR)
            self._made[case] = chosen.for_weights(model.weights, examples)
        return self._made[case]

    @cached_property
    def _made(self) -> dict[tuple[bool, int, float], Optimiser]:
        """Made once, and again where others have joined."""
        return {}

    def decisions(self, model: Model) -> Sequence[Decision]:
        """The server's optimiser, where it was left open."""
        if self.optimiser is not None or model.phi_layout.size == 0:
            return ()
        step, why = (NETWORK, "a network is shared") if model.network else (LINEAR, "no network is shared")
        return (Decision("step on phi", f"{type(step).__name__}, rate {step.rate:g}", why),)

    @property
    def steady(self) -> bool:
        """Every round costs as much per example."""
        return self.batch is None

    @property
    def whole(self) -> bool:
        """One gradient on all examples, which the server may have as one sum."""
        return self.batch is None and self.local is None

    def rate(self, k: int, rounds: Rounds, head: float = 0.0) -> float | None:
        """a of round k, which is broadcast, for a network with a ``head`` of this size: a start where
        outputs have variance one makes it large where features are small."""
        if self.local is None:
            return None
        shorter = 1.0 if self.head is None else min(1.0, self.head / max(head, self.head)) ** 2
        return self.local.rate * self.schedule.factor(k, rounds) * shorter

    def passes(self, cohort: Cohort, once: bool) -> float:
        """Example-passes through the backbone; a forward pass alone is a third of one."""
        examples = cohort.examples
        if self.local is not None:
            with_graph = self.local.epochs * examples
        else:
            with_graph = examples if self.batch is None else int(cohort.sizes.clamp(max=self.batch).sum())
        return 0.0 if cohort.embedded else with_graph + (0.0 if once else examples / 3)


Block = tuple[Tensor, Tensor, Tensor, Tensor]
"""Positions in the cohort, log-likelihoods, J (or D) of each, and whose numbers may be sent."""


@dataclass(frozen=True)
class PhiWork:
    """A cohort's features at phi, made once, and J from draws of z on them."""

    model: Model
    step: PhiStep
    phi: Tensor
    cohort: Cohort
    key: Key
    fused: bool
    keys: RowKeys | None
    features: Inputs
    parts: list[Inputs] | None

    @classmethod
    def of(
        cls, model: Model, step: PhiStep, phi: Tensor, cohort: Cohort, key: Key, fused: bool, drawn: bool
    ) -> PhiWork:
        """``fused``: the server wants the sum only, so that one backward pass serves everyone; ``drawn``: it
        will be made from draws of z."""
        keys = model.dropout_keys(cohort, key)
        phi = phi.detach().requires_grad_(phi.numel() > 0)
        fused = fused and step.whole
        separate = step.whole and not fused and not vectorises(model, phi)
        graph = fused and not (drawn and model.pulls_back(cohort))
        features, parts = embedded(model, phi, cohort, keys, graph=graph, separate=separate)
        return cls(model, step, phi, cohort, key, fused, keys, features, parts)

    @property
    def once(self) -> bool:
        """The same forward pass served the chain and J."""
        return self.fused or self.parts is not None

    def summed(
        self,
        moments: tuple[Tensor, ...] | None,
        draws: Tensor,
        good: Tensor,
        coefficients: Tensor,
        evaluated: Evaluated | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Who is fit, log-likelihoods, and the sum of J: one backward pass, unless one of them breaks it."""
        estimate = PhiGradient(self.model, moments, draws)
        fit, value, j = estimate.fused(
            self.phi, self.features, self.cohort, self.keys, good, coefficients, evaluated
        )
        if math.isfinite(float(j.sum())):
            return fit, value, j
        j = torch.zeros_like(self.phi.detach())
        good = good.clone()
        for rows, own, each in estimate.each(self.phi, self.cohort, self.key):
            value[rows] = own
            good[rows] &= torch.isfinite(own) & finite_rows(each)
            kept = rows[good[rows]]
            j = j + coefficients[kept].to(j.dtype) @ each[good[rows]]
        return good, value, j

    def blocks(
        self, moments: tuple[Tensor, ...] | None, draws: Tensor, target: Target, rate: Tensor | None
    ) -> Iterator[Block]:
        """J_i, or D_i, of each unit as they are ready."""
        if self.step.local is not None:
            assert rate is not None
            yield self._moved(self.step.local, draws, target, float(rate))
            return
        estimate = PhiGradient(self.model, moments, draws)
        for rows, value, j in estimate.each(self.phi, self.cohort, self.key, self.step.batch, self.parts):
            yield rows, value, j, torch.isfinite(value) & finite_rows(j)

    def _moved(self, local: LocalSGD, draws: Tensor, target: Target, rate: float) -> Block:
        """D_i: phi_i is phi after epochs of steps on the mean log-likelihood per example, averaged over the
        draws of z, which stay as they are. The paper's theorem does not cover more than one step."""
        with torch.no_grad():
            value = target.likelihood.value(draws).mean(1)
        start = self.phi.detach().expand(len(self.cohort), -1)
        loss, key = body_loss(self.model, self.cohort.embedded), self.key.at(purpose="body")
        x, most = self.cohort.x, self.model.rows_side_by_side
        plain = start.shape[1] - self.model.weights if local.decay else 0
        moved = local.run(loss, start, draws, x, self.cohort, key, rate, most_rows=most, plain=plain).w
        n = self.cohort.sizes.to(start.dtype).unsqueeze(1)
        rows = torch.arange(len(self.cohort), device=start.device)
        return rows, value, n * (moved - start) / rate, torch.isfinite(moved).all(1)


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

        Whose numbers may be sent, log-likelihoods, and that sum. ``evaluated`` is the likelihood at the
        draws, of a linear head, where it is known already.
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
    known = model.rows_side_by_side > 0 and not model.convolutional
    return known and phi.numel() <= LARGEST_PHI_SIDE_BY_SIDE


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


def minibatch(cohort: Cohort, size: int | None, key: Key) -> tuple[Cohort, float]:
    """A uniform subset of one client's examples, and the factor that makes its sum unbiased."""
    n = int(cohort.sizes[0])
    if size is None or n <= size:
        return cohort, 1.0
    return cohort.drawn(size, key.at(purpose="minibatch")), n / size
