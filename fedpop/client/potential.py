"""U_i(w) = -log p(D_i | w) of every client of a cohort, w = (phi, z) whole: what Langevin methods follow.

There is no prior in U_i; whoever moves w adds it. Dropout is off: the potential belongs to the network that
predicts, and a sampler of its posterior has noise enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from fedpop.client.local_sgd import side_by_side
from fedpop.client.losses import joint_loss
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.local import LocalLikelihood

POWER_STEPS = 30
"""Products with a Hessian that find its largest eigenvalue, to a few per cent."""
LARGEST_HESSIAN_BY_COLUMNS = 512
"""Parameters up to which a Hessian, or its diagonal, is computed column by column."""
HESSIAN_PROBES = 32
"""Random signs that estimate the diagonal of a larger one."""


class Potential:
    """The potentials of a cohort; with ``batch``, unbiased estimates on so many examples of each client.

    >>> import torch, fedpop as fp
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> clients = model.checked(fp.Federation.of([(torch.ones(3, 1), torch.ones(3))]))
    >>> cohort = clients.cohort(torch.tensor([0]), torch.device("cpu"))
    >>> Potential(model, cohort)(torch.zeros(1, 1), Key(0))[1]
    tensor([[-3.]])
    """

    def __init__(self, model: Model, cohort: Cohort, batch: int | None = None) -> None:
        self.model, self.cohort, self.batch = model, cohort, batch
        self.passes = 0
        """Example-passes so far; a product with a Hessian is two."""
        self._loss = joint_loss(model, cohort.embedded)

    @property
    def examples(self) -> int:
        """Examples that one evaluation looks at."""
        most = self.cohort.sizes if self.batch is None else self.cohort.sizes.clamp(max=self.batch)
        return int(most.sum())

    def count(self, passes: int) -> None:
        """Example-passes of the same clients that were made beside these."""
        self.passes += passes

    @property
    def cost(self) -> dict[str, float]:
        """What it cost so far, for questions that report nothing else."""
        passes = float(self.passes)
        return {"backbone_passes": 0.0 if self.cohort.embedded else passes, "head_steps": passes}

    def full(self) -> Potential:
        """The same on all examples."""
        return self if self.batch is None else Potential(self.model, self.cohort)

    def __call__(self, w: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """U_i ``[C]`` and its gradient ``[C, D]`` at w ``[C, D]``; the same key takes the same examples."""
        if self.cohort.longest == 0:
            return w.new_zeros(len(w)), torch.zeros_like(w)
        self.passes += self.examples
        uniform = key.at(purpose="batch").uniform
        with torch.no_grad():
            if self._linear is not None:
                local = self._linear
                if self.batch is not None:
                    local = local.subset(self.batch, lambda n: uniform(self.cohort.units, (n,)))
                value, grad = local.value_and_grad(w.unsqueeze(1))
                return -value[:, 0], -grad[:, 0]
            pick = self._pick(uniform)
            if not self._side_by_side(w):
                return self._one_by_one(w, pick)
            rows = torch.arange(len(w), device=w.device).unsqueeze(1)
            x, y, mask = self._block
            xb = map_inputs(lambda v: v[rows, pick], x)
            with torch.enable_grad():
                value, at = self._values(w, xb, y[rows, pick], mask[rows, pick])
                (grad,) = torch.autograd.grad(value.sum(), at)
            return value.detach(), grad

    def _values(self, w: Tensor, x: Inputs, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """U_i ``[C]`` side by side, and the leaf that they are functions of.

        U_i depends on its own w_i alone, so plain autograd on the sum has all gradients: for small models in
        half the time of gradients under vmap.
        """
        leaf = w.detach().requires_grad_()
        means: Tensor = torch.func.vmap(self._mean)(leaf, x, y, mask)
        return self.cohort.sizes.to(w.dtype) * means, leaf

    @cached_property
    def _linear(self) -> LocalLikelihood | None:
        """The native path of linear heads, where w is nothing but a head."""
        if not self.model.linear or self.model.phi_layout.size:
            return None
        phi = self.model.initial_phi()
        return self.model.bind(phi, self.model.features(phi, self.cohort), self.cohort)

    @cached_property
    def _block(self) -> tuple[Inputs, Tensor, Tensor]:
        # Padding repeats real rows, so that the loss is finite on it.
        cohort = self.cohort
        mask = torch.arange(cohort.longest, device=cohort.device) < cohort.sizes.unsqueeze(1)
        dtype = self.model.initial_z().dtype
        return map_inputs(cohort.fill, cohort.x), cohort.fill(cohort.y), mask.to(dtype)

    def _mean(self, w: Tensor, x: Inputs, y: Tensor, mask: Tensor) -> Tensor:
        return self._loss(w, w[:0], x, y, mask, None)

    def _side_by_side(self, w: Tensor) -> bool:
        batch = self.cohort.longest if self.batch is None else min(self.batch, self.cohort.longest)
        return side_by_side(self.model.rows_side_by_side, batch, w.shape[1])

    def _pick(self, uniform: Callable[..., Tensor]) -> Tensor:
        """Positions of a uniform subset of each client's examples, ``[C, size]``, padding last."""
        cohort, longest = self.cohort, self.cohort.longest
        places = torch.arange(longest, device=cohort.device)
        if self.batch is None or self.batch >= longest:
            return places.expand(len(cohort), -1)
        number = uniform(cohort.units, (longest,)) + 2 * (places >= cohort.sizes.unsqueeze(1))
        return torch.topk(number, self.batch, largest=False).indices.sort().values

    def _one_by_one(self, w: Tensor, pick: Tensor) -> tuple[Tensor, Tensor]:
        grad, value = torch.zeros_like(w), w.new_zeros(len(w))
        for c, one in enumerate(self.cohort.one_by_one()):
            mine = pick[c][pick[c] < one.sizes[0]]
            if len(mine):
                leaf = w[c].clone().requires_grad_()
                with torch.enable_grad():
                    x = map_inputs(lambda v, m=mine: v[m], one.x)
                    loss = int(one.sizes[0]) * self._mean(leaf, x, one.y[mine], w.new_ones(len(mine)))
                value[c], (grad[c],) = loss.detach(), torch.autograd.grad(loss, leaf)
        return value, grad

    # --- second derivatives, on all examples --------------------------------------------------

    def products(self, w: Tensor) -> Callable[[Tensor], Tensor]:
        """Hessians at w ``[C, D]`` as functions of what they are multiplied with."""
        if self.cohort.longest == 0:
            return torch.zeros_like
        by = self._side_by_side_products(w) if self._side_by_side(w) else partial(self._one_product, w)

        def counted(v: Tensor) -> Tensor:
            self.passes += 2 * self.cohort.examples
            return by(v)

        return counted

    def _side_by_side_products(self, w: Tensor) -> Callable[[Tensor], Tensor]:
        """The graph of the gradients is made once, whatever the number of products."""
        with torch.enable_grad():
            value, at = self._values(w, *self._block)
            (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
        if not slope.requires_grad:  # U_i is linear
            return torch.zeros_like

        def product(v: Tensor) -> Tensor:
            (out,) = torch.autograd.grad(slope, at, v, retain_graph=True, materialize_grads=True)
            return out

        return product

    def _one_product(self, w: Tensor, v: Tensor) -> Tensor:
        """Client by client, so that one graph at a time is held."""
        out = torch.zeros_like(w)
        for c, one in enumerate(self.cohort.one_by_one()):
            if int(one.sizes[0]):
                leaf = w[c].detach().clone().requires_grad_()
                with torch.enable_grad():
                    loss = self._mean(leaf, one.x, one.y, w.new_ones(int(one.sizes[0])))
                    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
                    (out[c],) = torch.autograd.grad(slope @ v[c], leaf)
        return self.cohort.sizes.to(w.dtype).unsqueeze(1) * out

    def largest(self, w: Tensor, key: Key) -> Tensor:
        """The largest curvature of each U_i at w, in absolute value, ``[C]``, by power iteration."""
        v = key.at(purpose="power").normal(self.cohort.units, (w.shape[1],), w.dtype)
        length, times = v.new_ones(len(v)), self.products(w)
        for _ in range(POWER_STEPS):
            v = times(v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny))
            length = v.norm(dim=1)
        return length

    def diagonal(self, w: Tensor, key: Key) -> Tensor:
        """The diagonals of the Hessians, ``[C, D]``: exact for small w, else from random signs."""
        d, times = w.shape[1], self.products(w)
        if d <= LARGEST_HESSIAN_BY_COLUMNS:
            eye = torch.eye(d, dtype=w.dtype, device=w.device)
            return torch.stack([times(e.expand_as(w))[:, j] for j, e in enumerate(eye)], 1)
        total = torch.zeros_like(w)
        for probe in range(HESSIAN_PROBES):
            u = key.at(purpose=f"probe-{probe}").uniform(self.cohort.units, (d,), w.dtype)
            signs = torch.where(u > 0.5, 1.0, -1.0).to(w.dtype)
            total = total + signs * times(signs)
        return total / HESSIAN_PROBES

    def hessian(self, w: Tensor) -> Tensor:
        """The Hessians ``[C, D, D]``, for small w."""
        eye = torch.eye(w.shape[1], dtype=w.dtype, device=w.device)
        times = self.products(w)
        columns = torch.stack([times(e.expand_as(w)) for e in eye], 2)
        return (columns + columns.mT) / 2
