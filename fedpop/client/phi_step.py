"""The step on phi: what a unit makes of its draws of z, one gradient or epochs of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedpop.checked import Count, Positive
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import body_loss
from fedpop.client.phi_gradient import PhiGradient, embedded, finite_rows, vectorises
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.kernels import Target
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.local import Evaluated
from fedpop.models.modules import RowKeys
from fedpop.server.optimisers import Adam, NetworkAdam, Optimiser
from fedpop.server.schedules import Constant, Rounds, Schedule
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
        schedule: What the rate of local steps is multiplied by over the rounds; ``Constant()`` unless
            told.
        head: Local steps of a network whose head is larger, by the root mean square of z under the prior,
            are shorter: by the square of how much larger it is, as the loss curves in a layer's weights as
            the square of the weights after it, and full steps would kill the network. 0.5 unless told; None
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

    @property
    def steady(self) -> bool:
        """Every round costs as much per example."""
        return self.batch is None

    @property
    def whole(self) -> bool:
        """One gradient on all examples, which the server may have as one sum."""
        return self.batch is None and self.local is None

    def rate(self, k: int, rounds: Rounds, head: float = 0.0) -> float | None:
        """a of round k, which sites are told, for a network with a ``head`` of this size: a start where
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
"""Positions in the cohort, log-likelihoods, J (or D) of each, and who of them is fit to be heard."""


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
        x, batched = self.cohort.x, self.model.batchable
        plain = start.shape[1] - self.model.weights if local.decay else 0
        moved = local.run(loss, start, draws, x, self.cohort, key, rate, batched=batched, plain=plain).w
        n = self.cohort.sizes.to(start.dtype).unsqueeze(1)
        rows = torch.arange(len(self.cohort), device=start.device)
        return rows, value, n * (moved - start) / rate, torch.isfinite(moved).all(1)
