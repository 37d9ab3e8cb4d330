"""Mini-batch gradient descent on clients' own data, over a cohort: batched for small models, one client
after the other for large ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Count, Factor, NotNegative, Positive
from fedpop.client.losses import gradient
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key
from fedpop.models.local import LinearLikelihood
from fedpop.models.modules import RowKeys
from fedpop.models.probe import ANY_ROWS
from fedpop.settings import Setting

Loss = Callable[..., Tensor]
"""``loss(w, aux, x, y, mask, rows)``: one client's mean loss over the examples where mask is one, or over all
where it is None; ``rows`` name the examples, for layers that draw, such as dropout."""
Direction = Callable[..., tuple[Tensor, Tensor]]
"""The same arguments; what to step along in place of the loss's gradient, and the loss."""
Pull = Callable[[Tensor, Tensor], Tensor]
"""``pull(w, aux)``: a gradient beside the data's, of one client or of a stack of them."""
Stacked = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``direction(w, pick, there)`` of a stack of clients, on the examples that ``pick`` numbers and where
``there`` is one."""

LARGEST_BATCHED = 20_000
"""Parameters up to which clients are worked on side by side by vmap: above it a single client keeps the
processor busy."""


def side_by_side(most_rows: int, batch: int, parameters: int) -> bool:
    """Whether steps of several clients on so many examples and parameters each are worked on together."""
    return batch <= most_rows and parameters <= LARGEST_BATCHED


@dataclass(frozen=True)
class Trained:
    """Where clients ended, ``w`` ``[C, D]``, and their mean training loss ``[C]`` on the way there."""

    w: Tensor
    loss: Tensor


@dataclass(frozen=True)
class LocalSGD(Setting):
    """How clients train by themselves: epochs of plain SGD with momentum.

    Args:
        epochs: Passes over a client's examples in a round, 1 by default; more save rounds and drift apart.
        rate: The step size, 0.01 by default; the first thing to tune.
        batch: Examples of a step; None takes all of a client's at once.
        momentum: Of SGD, in [0, 1); 0 by default.
        decay: Weight decay: the gradient of decay/2 norm(w)^2 is added. 0 by default.

    >>> LocalSGD(epochs=5, rate=0.05, batch=50)
    LocalSGD(epochs=5, rate=0.05, batch=50, momentum=0.0, decay=0.0)
    """

    epochs: Count = 1
    rate: Positive = 0.01
    batch: Count | None = None
    momentum: Factor = 0.0
    decay: NotNegative = 0.0
    """Weight decay: the gradient of decay/2 norm(w)^2 is added."""

    def run(
        self,
        loss: Loss,
        w: Tensor,
        aux: Tensor,
        x: Inputs,
        cohort: Cohort,
        key: Key,
        rate: float | None = None,
        *,
        dropout: bool = True,
        most_rows: int = ANY_ROWS,
        direction: Direction | None = None,
        pull: Pull | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
        plain: int = 0,
        shuffle: bool = False,
    ) -> Trained:
        """New parameters ``[C, D]`` from w ``[C, D]``; ``aux`` ``[C, *]`` is handed to the loss.

        Above ``most_rows`` examples of a client in a step (``Model.rows_side_by_side``) clients go one after
        the other. ``direction`` takes the place of the loss's gradient, ``pull`` is added to it, ``project``
        follows every step. The last ``plain`` entries of w are not weights: they know no momentum and no
        decay. ``shuffle`` has the examples of a step of all of them in random order, too.
        """
        if cohort.longest == 0:
            return Trained(w, w.new_zeros(len(cohort)))
        together = side_by_side(most_rows, self._size(cohort), w.shape[1])
        work = self._batched if together else self._one_by_one
        rate = self.rate if rate is None else rate
        way = _Way(rate, loss, direction, pull or _no_pull, project or _anywhere, dropout, plain, shuffle)
        with torch.no_grad():
            return work(way, w, aux, x, cohort, key)

    def run_heads(
        self, local: LinearLikelihood, z: Tensor, cohort: Cohort, key: Key, rate: float | None = None
    ) -> Tensor:
        """``run`` for linear heads z ``[C, d]`` at features that do not change: the same steps, by the
        closed form of their gradient."""
        if cohort.longest == 0:
            return z
        rows = torch.arange(len(cohort), device=z.device).unsqueeze(1)

        def direction(now: Key) -> Stacked:
            def at(z: Tensor, pick: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
                value, slope = local.rows(rows, pick).value_and_grad(z.unsqueeze(1))
                n = there.sum(1).clamp(min=1)
                return -slope.squeeze(1) / n.unsqueeze(1), -value.squeeze(1) / n

            return at

        with torch.no_grad():
            way = _Way(self.rate if rate is None else rate)
            return self._side_by_side(way, direction, z, z[:, :0], cohort, key).w

    def _batched(self, way: _Way, w: Tensor, aux: Tensor, x: Inputs, cohort: Cohort, key: Key) -> Trained:
        # Padding repeats real rows, so that the loss is finite on it.
        block, y = map_inputs(cohort.fill, x), cohort.fill(cohort.y)
        rows = torch.arange(len(cohort), device=w.device).unsqueeze(1)

        def direction(now: Key) -> Stacked:
            each = way.stacked(now, aux)

            def at(w: Tensor, pick: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
                xb = map_inputs(lambda v: v[rows, pick], block)
                units = cohort.units.unsqueeze(1).expand_as(pick)
                return each(w, xb, y[rows, pick], there, units, pick)

            return at

        return self._side_by_side(way, direction, w, aux, cohort, key)

    def _side_by_side(
        self,
        way: _Way,
        direction: Callable[[Key], Stacked],
        w: Tensor,
        aux: Tensor,
        cohort: Cohort,
        key: Key,
    ) -> Trained:
        mask = (torch.arange(cohort.longest, device=w.device) < cohort.sizes.unsqueeze(1)).to(w.dtype)
        size = self._size(cohort)
        velocity, total = torch.zeros_like(w), w.new_zeros(len(cohort))
        rows = torch.arange(len(cohort), device=w.device).unsqueeze(1)
        for epoch in range(self.epochs):
            now = key.at(purpose=f"epoch-{epoch}")
            order, at = self._order(mask, cohort, now, way.shuffle), direction(now)
            for start in range(0, cohort.longest, size):
                pick = order[:, start : start + size]
                there = mask[rows, pick]
                g, value = at(w, pick, there)
                g = g + way.weights(self.decay * w) + way.pull(w, aux)
                busy = there.sum(1)  # clients that still have examples
                total = total + torch.where(busy > 0, value * busy, torch.zeros_like(value))
                gathered = way.weights(self.momentum * velocity) + g
                velocity = torch.where(busy.unsqueeze(1) > 0, gathered, velocity)
                moved = way.project(w - way.rate * velocity)
                w = torch.where(busy.unsqueeze(1) > 0, moved, w)
        return Trained(w, total / (self.epochs * cohort.sizes.clamp(min=1)))

    def _one_by_one(self, way: _Way, w: Tensor, aux: Tensor, x: Inputs, cohort: Cohort, key: Key) -> Trained:
        out, total = torch.empty_like(w), w.new_zeros(len(cohort))
        starts = torch.cumsum(cohort.sizes, 0) - cohort.sizes
        weights = w.shape[1] - way.plain
        # Vectors may be long and batches small: what is not asked for is not computed.
        pulled, held = way.pull is not _no_pull, way.project is not _anywhere
        for c, one in enumerate(cohort.one_by_one()):
            now_at = out[c].copy_(w[c])
            n, velocity = int(one.sizes[0]), torch.zeros_like(now_at)
            mine = slice(int(starts[c]), int(starts[c]) + n)
            own = map_inputs(lambda v, m=mine: v[m], x)
            every = velocity.new_ones((1, n))
            for epoch in range(self.epochs if n else 0):
                now = key.at(purpose=f"epoch-{epoch}")
                for pick in self._order(every, one, now, way.shuffle)[0].split(self._size(one)):
                    rows = RowKeys(now, one.units.expand(len(pick)), pick) if way.dropout else None
                    batch = map_inputs(lambda v, p=pick: v.index_select(0, p), own)
                    g, value = way.at(now_at, aux[c], batch, one.y[pick], every[0, : len(pick)], rows)
                    total[c] += value * len(pick)
                    if self.momentum:
                        g = way.weights(velocity.mul_(self.momentum)).add_(g)
                    elif pulled or self.decay:
                        g = velocity.copy_(g)
                    if pulled:
                        g.add_(way.pull(now_at, aux[c]))
                    if self.decay:
                        g[:weights].add_(now_at[:weights], alpha=self.decay)
                    now_at.sub_(g, alpha=way.rate)
                    if held:
                        now_at.copy_(way.project(now_at))
        return Trained(out, total / (self.epochs * cohort.sizes.clamp(min=1)))

    def _size(self, cohort: Cohort) -> int:
        return cohort.longest if self.batch is None else min(self.batch, max(cohort.longest, 1))

    def _order(self, mask: Tensor, cohort: Cohort, key: Key, shuffle: bool) -> Tensor:
        """Each client's examples in random order, padding last."""
        if self.batch is None and not shuffle:
            return torch.arange(cohort.longest, device=mask.device).expand(len(cohort), -1)
        u = key.uniform(cohort.units, (cohort.longest,))
        return torch.argsort(u + 2 * (1 - mask), dim=1)

    def updates(self, cohort: Cohort) -> Tensor:
        """How many steps each client takes, ``[C]``; none without data."""
        if self.batch is None:
            return self.epochs * (cohort.sizes > 0).long()
        return self.epochs * ((cohort.sizes + self.batch - 1) // self.batch)

    def steps(self, cohort: Cohort) -> int:
        """Example-steps: how many examples are passed forward and backward."""
        return cohort.examples * self.epochs


def _no_pull(w: Tensor, aux: Tensor) -> Tensor:
    return w.new_zeros(())


def _anywhere(w: Tensor) -> Tensor:
    return w


@dataclass(frozen=True)
class _Way:
    """How the steps of one run are made: along which direction, how far, and what follows each of them."""

    rate: float
    loss: Loss | None = None
    direction: Direction | None = None
    pull: Pull = _no_pull
    project: Callable[[Tensor], Tensor] = _anywhere
    dropout: bool = False
    plain: int = 0
    shuffle: bool = False

    def weights(self, change: Tensor) -> Tensor:
        """The change with nothing for the entries that are not weights; in place."""
        if self.plain:
            change[..., change.shape[-1] - self.plain :] = 0
        return change

    def stacked(self, key: Key, aux: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        """The direction for clients side by side, ``[C, D]``; their examples' names go as tensors, which vmap
        can cut."""

        def rows(client: Tensor, place: Tensor) -> RowKeys | None:
            return RowKeys(key, client, place) if self.dropout else None

        if self.direction is not None:
            own = self.direction
            each = torch.func.vmap(lambda w, aux, x, y, mask, c, p: own(w, aux, x, y, mask, rows(c, p)))
            return lambda w, *batch: each(w, aux, *batch)
        assert self.loss is not None
        loss = self.loss
        values = torch.func.vmap(lambda w, aux, x, y, mask, c, p: loss(w, aux, x, y, mask, rows(c, p)))

        def slopes(w: Tensor, *batch: Inputs) -> tuple[Tensor, Tensor]:
            # A client's loss depends on its own w alone: plain autograd on the sum has all gradients, and
            # torch.func's would import torch's compiler, for seconds in every new process of a site.
            leaf = w.detach().requires_grad_()
            with torch.enable_grad():
                value: Tensor = values(leaf, aux, *batch)
            return gradient([value], leaf, [torch.ones_like(value)]), value.detach()

        return slopes

    def at(
        self, w: Tensor, aux: Tensor, x: Inputs, y: Tensor, mask: Tensor, rows: RowKeys | None
    ) -> tuple[Tensor, Tensor]:
        """The direction for one client, without vmap."""
        if self.direction is not None:
            return self.direction(w.clone(), aux, x, y, mask, rows)
        assert self.loss is not None
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            value = self.loss(leaf, aux, x, y, None, rows)
        return gradient([value], leaf), value.detach()
