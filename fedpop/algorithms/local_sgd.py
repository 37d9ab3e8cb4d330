"""Mini-batch gradient descent on clients' own data, vectorised over a cohort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.models.modules import RowKeys
from fedpop.runtime.random import Key

Loss = Callable[..., Tensor]
"""``loss(w, aux, x, y, mask, rows)``: one client's mean loss over the examples where mask is one; ``rows``
name the examples, for dropout."""


@dataclass(frozen=True)
class LocalSGD:
    """``epochs`` of plain SGD with momentum; ``batch`` None takes all of a client's examples.

    >>> LocalSGD(epochs=5, rate=0.05, batch=32)
    LocalSGD(epochs=5, rate=0.05, batch=32, momentum=0.0)
    """

    epochs: int = 1
    rate: float = 0.01
    batch: int | None = None
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SettingsError(f"epochs must be at least 1, not {self.epochs}")
        if not self.rate > 0:
            raise SettingsError(f"a step size must be positive, not {self.rate}")
        if self.batch is not None and self.batch < 1:
            raise SettingsError(f"batch must be at least 1, not {self.batch}")
        if not 0 <= self.momentum < 1:
            raise SettingsError(f"momentum lies in [0, 1), not {self.momentum}")

    def run(
        self,
        loss: Loss,
        w: Tensor,
        aux: Tensor,
        x: Inputs,
        cohort: Cohort,
        key: Key,
        dropout: bool = True,
    ) -> Tensor:
        """New parameters ``[C, D]`` from w ``[C, D]``; ``aux`` ``[C, *]`` is handed to the loss."""
        # Padding repeats real rows, so that the loss is finite on it.
        block, y = map_inputs(cohort.fill, x), cohort.fill(cohort.y)
        mask = (torch.arange(cohort.longest, device=w.device) < cohort.sizes.unsqueeze(1)).to(w.dtype)
        size = cohort.longest if self.batch is None else min(self.batch, cohort.longest)
        if size == 0:
            return w
        velocity = torch.zeros_like(w)
        rows = torch.arange(len(cohort), device=w.device).unsqueeze(1)
        for epoch in range(self.epochs):
            now = key.at(purpose=f"epoch-{epoch}")
            order = self._order(mask, cohort, now)
            grad = torch.func.vmap(torch.func.grad(_named(loss, now if dropout else None)))
            for start in range(0, cohort.longest, size):
                pick = order[:, start : start + size]
                part = mask[rows, pick]
                xb = map_inputs(lambda v, p=pick: v[rows, p], block)
                g = grad(w, aux, xb, y[rows, pick], part, cohort.ids.unsqueeze(1).expand_as(pick), pick)
                busy = (part.sum(1) > 0).to(w.dtype).unsqueeze(1)  # clients that still have examples
                velocity = torch.where(busy > 0, self.momentum * velocity + g, velocity)
                w = w - self.rate * busy * velocity
        return w

    def _order(self, mask: Tensor, cohort: Cohort, key: Key) -> Tensor:
        """Each client's examples in random order, padding last."""
        if self.batch is None:
            return torch.arange(cohort.longest, device=mask.device).expand(len(cohort), -1)
        u = key.uniform(cohort.ids, (cohort.longest,))
        return torch.argsort(u + 2 * (1 - mask), dim=1)

    def steps(self, cohort: Cohort) -> int:
        """Example-steps: how many examples are passed forward and backward."""
        return int(cohort.sizes.sum()) * self.epochs


def _named(loss: Loss, key: Key | None) -> Loss:
    """The loss with its examples' names as tensors, which vmap can cut; dropout is off without a key."""

    def named(
        w: Tensor, aux: Tensor, x: Inputs, y: Tensor, mask: Tensor, client: Tensor, place: Tensor
    ) -> Tensor:
        rows = None if key is None else RowKeys(key, client, place)
        return loss(w, aux, x, y, mask, rows)

    return named
