"""Generalised linear mixed models with nested factors: Laplace's approximation of each unit's likelihood.

With u ~ N(0, I) the effects of all of a unit's groups, eta = X b + offset + Z Lambda u and u^ the mode of the
log-density l(eta) - u'u / 2,

    log L = l(eta^) - u^'u^ / 2 - log det(I + Lambda' Z' W Z Lambda) / 2,

W the curvature of l at u^: what lme4's ``glmer`` maximises (nAGQ = 1). A Newton step towards the mode is a
weighted least-squares problem with the structure of the normal model's, and is solved as that one is, from
the innermost groups outward (``nesting``). Gradient and Hessian in (b, theta) are exact: a step from the
mode, as a function of theta, has the mode's derivative, and two steps have its first three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors
from fedpop.mixed.design import Coordinates, everyone
from fedpop.mixed.engine import ThetaPoint
from fedpop.mixed.families import Family
from fedpop.mixed.nesting import Paths, Tree, paths, spans
from fedpop.mixed.quadrature import (
    GROUP_MODE_STEPS,
    GROUP_MODE_TOLERANCE,
    Local,
    Marginal,
    QuadratureEffects,
    QuadratureEngine,
)
from fedpop.questions import Units
from fedpop.server.quasi_newton import rows_of_jacobian

Effects = tuple[Tensor, ...]
"""For each level, of each group u of this level and of those around it, ``[K, Q]``."""


@dataclass(frozen=True)
class NestedRows:
    """A cohort's rows with the tree of its groups."""

    local: Local
    tree: Tree
    widths: Sequence[int]

    @classmethod
    def of(cls, cohort: Cohort, units: Coordinates, family: Family) -> NestedRows:
        return cls(Local.of(cohort, units, family), Tree.of(cohort), units.widths)

    def base(self, b: Tensor) -> Tensor:
        return (self.local.x @ b).unsqueeze(1) + self.local.offset

    def random(self, zl: Tensor, u: Effects) -> Tensor:
        """Z Lambda u of each row, ``[n, 1]``."""
        return (zl * u[0][self.tree.at[0]]).sum(1, keepdim=True)

    def squares(self, u: Effects, v: Effects) -> Tensor:
        """u'v of each unit, ``[C]``."""
        own = (self.tree.of_units(i, (a[:, :w] * c[:, :w]).sum(1)) for i, (a, c, w) in self._each(u, v))
        return torch.stack(list(own)).sum(0)

    def _each(self, u: Effects, v: Effects) -> enumerate[tuple[Tensor, Tensor, int]]:
        return enumerate(zip(u, v, self.widths, strict=True))

    def start(self) -> Effects:
        """Zeros."""
        count = sum(self.widths)
        return tuple(
            self.local.x.new_zeros((size, count - span.start))
            for size, span in zip(self.tree.sizes, spans(self.widths), strict=True)
        )

    def solved(
        self, base: Tensor, zl: Tensor, u: Effects, spread: bool = False, searching: bool = False
    ) -> Paths:
        """Where a Newton step from u leads, with the curvature at u; on the way to a mode rows that bend the
        wrong way count as straight."""
        fitted = self.random(zl, u)
        _, slope, bend = self.local.terms(base + fitted)
        if searching and not self.local.family.concave:
            bend = bend.clamp(min=0)
        both = torch.cat((zl * bend, bend * fitted + slope), dim=1)
        rows = (zl.unsqueeze(2) * both.unsqueeze(1)).flatten(1)
        shape = (self.tree.sizes[0], rows.shape[1])
        products = rows.new_zeros(shape).index_add(0, self.tree.at[0], rows).unflatten(1, (zl.shape[1], -1))
        return paths(self.tree, self.widths, products, torch.eye(zl.shape[1], dtype=zl.dtype), spread)

    def modes(self, base: Tensor, zl: Tensor) -> Effects:
        """By Newton's method with halved steps, each unit by itself."""
        u = self.start()

        def at(u: Effects) -> tuple[Tensor, Tensor]:
            value, slope, _ = self.local.terms(base + self.random(zl, u))
            return self.local.by_group(value)[:, 0] - 0.5 * self.squares(u, u), slope

        value, slope = at(u)
        for _ in range(GROUP_MODE_STEPS):
            step = tuple(
                new - old for new, old in zip(self.solved(base, zl, u, searching=True).mean, u, strict=True)
            )
            gain = self.local.by_group(self.random(zl, step) * slope)[:, 0] - self.squares(u, step)
            if bool((gain <= GROUP_MODE_TOLERANCE**2 + 1e-15 * value.abs()).all()):
                return tuple(old + move for old, move in zip(u, step, strict=True))
            share = torch.ones_like(value)
            for _ in range(40):
                shares = [share[units].unsqueeze(1) for units in self.tree.units]
                moved = tuple(old + s * move for old, s, move in zip(u, shares, step, strict=True))
                new, bent = at(moved)
                good = new >= value + 1e-4 * share * gain - 1e-12 * value.abs()
                if bool(good.all()):
                    break
                share = torch.where(good, share, 0.5 * share)
            if not bool(good.any()):
                return u
            kept = [good[units].unsqueeze(1) for units in self.tree.units]
            u = tuple(torch.where(k, new_u, old) for k, new_u, old in zip(kept, moved, u, strict=True))
            value, slope = (new, bent) if bool(good.all()) else at(u)
        return u

    def value(self, b: Tensor, factor: Tensor, u: Effects, steps: int) -> Tensor:
        """Of each unit, ``[C]``; u are modes, and it has so many derivatives in (b, Lambda) as Newton
        steps."""
        base, zl = self.base(b), self.local.z @ factor
        for _ in range(steps):
            u = self.solved(base, zl, u).mean
        value = self.local.terms(base + self.random(zl, u))[0]
        half_log_det = self.solved(base, zl, u).half_log_det
        return self.local.by_group(value)[:, 0] - 0.5 * self.squares(u, u) - half_log_det


@dataclass(frozen=True)
class Laplace(Marginal):
    """The same by Laplace's approximation, of units with groups in them."""

    name: ClassVar[str] = "marginal likelihood by Laplace's approximation"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        p, q = len(self.units.x_names), len(self.units.z_names)
        return 8.0 * (p + 16 * (q + 1) ** 2) * (8 if bool(asked["curved"]) else 2), 0.0

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        rows = NestedRows.of(units.cohort, self.units, self.family_at(asked))
        p, curved = len(asked["b"]), bool(asked["curved"])
        u = rows.modes(rows.base(asked["b"]), rows.local.z @ asked["factor"])
        with torch.enable_grad():
            entries = self.factor.entries(asked["factor"])
            x = torch.cat((asked["b"], entries, *[asked[n] for n in self.beside])).requires_grad_()
            family, theta = self.family.at_log(x[-1]), x[p : p + len(entries)]
            rows = replace(rows, local=replace(rows.local, family=family))
            value = rows.value(x[:p], self.factor.matrix(theta), u, 2 if curved else 1)
            (slope,) = torch.autograd.grad(value.sum(), x, create_graph=curved)
            sums = {"value": value.detach().sum().reshape(1), "slope": slope.detach()}
            if curved:
                sums["hessian"] = rows_of_jacobian(slope, x).flatten()
        return Answer(torch.isfinite(value.detach()), sums=sums)


@dataclass(frozen=True)
class LaplaceEngine(QuadratureEngine):
    """Value, gradient and posteriors by Laplace's approximation, in internal coordinates."""

    method: ClassVar[str] = "Laplace Approximation"

    @property
    def grid(self) -> bool:
        return True

    @property
    def wide(self) -> bool:
        """There are no nodes."""
        return False

    @property
    def words(self) -> str:
        return self.method

    @cached_property
    def marginal(self) -> Marginal:
        return Laplace(self.units, self.family, 1)

    def refined(self) -> None:
        """There is no better one: more nodes would be of all of a unit's effects at once."""

    def effects(self, point: ThetaPoint) -> None:
        self.groups.ask(LaplaceEffects(self.units, self.family, 1), self.known(point))

    def paths(self, cohort: Cohort, point: ThetaPoint) -> Paths:
        family = self.family.at(point.dispersion)
        return effect_paths(cohort, self.units, family, point.b, point.factor)


def effect_paths(cohort: Cohort, units: Coordinates, family: Family, b: Tensor, factor: Tensor) -> Paths:
    """Modes of effects, and the covariances that the curvature there says."""
    rows = NestedRows.of(cohort, units, family)
    base, zl = rows.base(b), rows.local.z @ factor
    found = rows.solved(base, zl, rows.modes(base, zl), spread=True)
    roots = [factor[span.start :, span.start :] for span in spans(units.widths)]
    means = tuple(mean @ root.mT for mean, root in zip(found.mean, roots, strict=True))
    covariances = tuple(root @ c @ root.mT for c, root in zip(found.covariance, roots, strict=True))
    return Paths(means, covariances, found.half_log_det)


@dataclass(frozen=True)
class LaplaceEffects(QuadratureEffects):
    """Mode and covariance of each unit's effects, which stay at its site."""

    name: ClassVar[str] = "modes of groups"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        p, q = len(self.units.x_names), len(self.units.z_names)
        return 8.0 * (p + 8 * (q + 1) ** 2), 0.0

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        family = self.family_at(asked)
        found = effect_paths(units.cohort, self.units, family, asked["b"], asked["factor"])
        local = {"mean": found.mean[-1], "cov": found.covariance[-1]}
        return Answer(everyone(units.cohort), local=local)
