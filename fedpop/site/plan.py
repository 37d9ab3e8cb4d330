"""Which clients are worked on together: a fixed plan that fits a memory budget.

The plan depends on the settings and the data only, never on free memory at run time, so that a resumed
run cuts its cohorts at the same places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from fedpop.federation.clients import Federation
from fedpop.federation.inputs import leaves, map_inputs
from fedpop.models.base import Model

CONVOLVED_AT_ONCE = 2**28
"""Bytes that a convolutional network keeps at a time on a CPU for its backward pass: with more a round takes
as long, since images go through it a few at a time anyway."""


@dataclass(frozen=True)
class Plan:
    """Bytes that a cohort needs per example, and per client."""

    per_row: float
    per_client: float
    budget: int
    per_draw: float = 0.0
    """Bytes that a head through vmap keeps of an example for each draw of z, to be differentiated."""

    def taking(self, memory: tuple[float, float] | None) -> Plan:
        """The same budget where a row and a unit take so many bytes."""
        return self if memory is None else replace(self, per_row=memory[0], per_client=memory[1])

    def cut(self, ids: Tensor, sizes: Tensor, sites: Tensor | None = None) -> list[Tensor]:
        """Consecutive units in groups whose padded blocks fit the budget, never fewer than one; each of units
        of one of the ``sites`` ``[b]``, and those of a site one after the other."""
        if sites is not None:
            ids = ids[sites[ids].argsort(stable=True)]
            starts = [0, *(sites[ids].diff().nonzero().squeeze(1) + 1).tolist(), len(ids)]
            each = [ids[a:b] for a, b in pairwise(starts) if b > a]
            return [group for units in each for group in self.cut(units, sizes)]
        mine = sizes.index_select(0, ids)
        if len(ids) == 0:
            return []
        longest = int(mine.max())
        if len(ids) * (longest * self.per_row + self.per_client) <= self.budget:
            return [ids]
        groups, start = [], 0
        most = max(1, int(self.budget // max(self.per_client, 1.0)))  # even of clients without data
        while start < len(ids):
            ahead = mine[start : start + most]
            widest = ahead.cummax(0).values.double()
            cost = torch.arange(1, len(ahead) + 1) * (widest * self.per_row + self.per_client)
            count = max(1, int((cost <= self.budget).sum()))  # costs rise along the way
            groups.append(ids[start : start + count])
            start += count
        return groups


def plan_for(model: Model, federation: Federation, budget: int, draws: int, phi_copies: int) -> Plan:
    """A plan from the bytes that autograd keeps for an example, measured on two; for so many draws of z, and
    vectors of phi's size, that a unit's round holds at once."""
    d = model.z_layout.size
    item = model.initial_phi().element_size()
    if model.convolutional and model.device.type == "cpu":
        budget = min(budget, CONVOLVED_AT_ONCE)
    (one, first), (two, second) = (_kept(model, federation, n) for n in (1, 2))
    per_draw = max(second - first, 0)
    per_row = max(two - one, 0) + 4 * item * (model.outputs * (draws + 4)) + per_draw * draws
    per_client = item * (d * (3 * draws + 12) + phi_copies * model.phi_layout.size)
    return Plan(per_row, float(per_client), budget, float(per_draw))


def final_plan(base: Plan, model: Model, draws: int) -> Plan:
    """The plan of a final pass with so many draws of z for each unit: draws with their gradients and
    proposals; head outputs of all draws, or what a head through vmap keeps of the eighth that is
    differentiated at a time."""
    item = model.initial_phi().element_size()
    per_row = base.per_row + max(item * draws * model.outputs, base.per_draw * draws / 8)
    return Plan(per_row, 10.0 * item * draws * model.z_layout.size, base.budget)


def _kept(model: Model, federation: Federation, rows: int) -> tuple[int, int]:
    """Bytes that autograd keeps for the backward pass of so many examples: of the backbone, and of one pass
    of a head that is not linear."""
    device = model.initial_phi().device
    x = map_inputs(lambda v: v[:rows].to(device), federation.train.x)
    given = sum(leaf.numel() * leaf.element_size() for leaf in leaves(x))
    if leaves(x)[0].shape[0] < rows:
        return given, 0
    phi, z = model.initial_phi().requires_grad_(), model.initial_z().requires_grad_()
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), torch.enable_grad():
        features = x if federation.embedded else model.embed(phi, x)
        backbone, total = total, 0
        if not model.linear:
            y = model.likelihood.encode(federation.train.y[:rows].to(device), model.outputs, phi.dtype)
            model.log_prob_at(phi, z, features, y)
    if not federation.embedded:
        backbone += sum(leaf.numel() * leaf.element_size() for leaf in leaves(features))
    return backbone + given, total


WHOLE = Plan(0.0, 0.0, 1)
"""All units together."""
