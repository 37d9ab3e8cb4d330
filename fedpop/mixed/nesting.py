"""Nested grouping factors: the tree of a cohort's groups, and sums over it from the innermost outward.

Levels are counted from the innermost, 0, to the outermost, whose groups are the units. In a unit's rows

    y = X b + sum_l Z_l u_l + e,  u_l ~ N(0, s2 Sigma_l) independently for each group of level l,

and everything that is asked of it is a product A' V^-1 A of columns A = (Z, W), with V the covariance of y in
units of s2. Of an innermost group that is A'A; then each level in turn takes its effects out of the products
of its groups, by the identity of Woodbury,

    P = (Sigma^-1 + M)^-1,  M, R, T = the products Z'Z, Z'C, C'C with the columns C further out:
    T <- T - R' P R,        D <- D + log det(I + Sigma M),

and adds them up over the groups of the next. The work is linear in rows and groups; nothing is ever as large
as a unit's rows, or groups, squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.federation.clients import Packed
from fedpop.federation.cohort import Cohort
from fedpop.mixed.table import Rows, pandas
from fedpop.questions.schema import sorted_levels

BEGINS = "begins"
"""A column of x: whether a row is the first of a group of each level within units, ``[n, L - 1]``."""
CELLS = "cells"
"""The split of a federation that has a row for each innermost group: its products of columns."""
PRODUCT_ROWS_AT_ONCE = 2**17
"""Rows whose products are formed at once."""


@dataclass(frozen=True)
class RowOrder:
    """Rows of each group next to each other at every level of nesting."""

    rows: np.ndarray
    """Positions ``[n]`` of the rows in this order."""
    names: Sequence[list[str]]
    """Names of the groups of each level, in this order."""
    begins: np.ndarray
    sizes: np.ndarray
    """How many rows a unit has."""

    @classmethod
    def of(cls, rows: Rows) -> RowOrder:
        """Groups in the order of their names, within those that they are nested in."""
        assert rows.groups is not None
        codes, levels = [], []
        for found in (*rows.inner, rows.groups):
            place, distinct = pandas().factorize(found)
            names = sorted_levels(list(map(str, distinct)))
            rank = {name: i for i, name in enumerate(names)}
            codes.append(np.array([rank[str(name)] for name in distinct], dtype=np.int64)[place])
            levels.append(names)
        order = np.lexsort(codes) if len(codes) > 1 else np.argsort(codes[0], kind="stable")
        begins = np.zeros((len(order), len(codes) - 1), dtype=bool)
        new = np.diff(codes[-1][order], prepend=-1) != 0
        for level in reversed(range(len(codes) - 1)):
            new = new | (np.diff(codes[level][order], prepend=-1) != 0)
            begins[:, level] = new
        inner = [
            np.array(levels[i], dtype=object)[codes[i][order[begins[:, i]]]] for i in range(len(codes) - 1)
        ]
        sizes = np.bincount(codes[-1], minlength=len(levels[-1]))
        return cls(order, [*(names.tolist() for names in inner), levels[-1]], begins, sizes)

    def starts(self, level: int) -> np.ndarray:
        """Where each group of a level begins, in this order."""
        if level == self.begins.shape[1]:
            first: np.ndarray = np.cumsum(self.sizes) - self.sizes
            return first
        return np.flatnonzero(self.begins[:, level])


@dataclass(frozen=True)
class Tree:
    """Groups of a cohort, level by level, the innermost first."""

    at: tuple[Tensor, ...]
    """Of each row its group's position ``[n]``."""
    parents: tuple[Tensor, ...]
    """Of each group the position of the one around it; units have none."""
    units: tuple[Tensor, ...]
    """Of each group the position of its unit."""
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, cohort: Cohort) -> Tree:
        """Rows are examples, or cells."""
        assert isinstance(cohort.x, dict)
        owner = cohort.owner
        if BEGINS not in cohort.x:
            return cls((owner,), (), (torch.arange(len(cohort)),), (len(cohort),))
        begins = cohort.x[BEGINS]
        first = [begins[:, i] for i in range(begins.shape[1])]
        at = [*(new.cumsum(0) - 1 for new in first), owner]
        parents = tuple(at[i + 1][new] for i, new in enumerate(first))
        units = (*(owner[new] for new in first), torch.arange(len(cohort)))
        return cls(tuple(at), parents, units, tuple(len(u) for u in units))

    def parents_sum(self, level: int, values: Tensor, dim: int = 0) -> Tensor:
        """Values of a level's groups, counted in this dimension, added up over those of the next."""
        shape = (*values.shape[:dim], self.sizes[level + 1], *values.shape[dim + 1 :])
        return values.new_zeros(shape).index_add(dim, self.parents[level], values)

    def of_units(self, level: int, values: Tensor) -> Tensor:
        """Values of a level's groups ``[K, ...]``, added up over units."""
        if level + 1 == len(self.sizes):
            return values
        return values.new_zeros((self.sizes[-1], *values.shape[1:])).index_add(0, self.units[level], values)


# --- products of columns ---------------------------------------------------------------------------


def cells(train: Packed) -> Packed:
    """Of each innermost group the sum of weights, weighted means of all columns (Z, X, y - offset), and
    products of Z with them about these means: sums about any centre follow, and nothing is lost where columns
    are far from zero."""
    x = train.x
    assert isinstance(x, dict)
    weight, q = x["beside"][:, 1], x["random"].shape[1]
    n, owner = len(weight), torch.repeat_interleave(torch.arange(len(train.sizes)), train.sizes)
    begins = x.get(BEGINS)
    first = torch.cat((owner.new_ones(1), owner.diff())) > 0 if begins is None else begins[:, 0]
    at = first.cumsum(0) - 1
    count, width = int(first.sum()), q + x["fixed"].shape[1] + 1
    parts = [slice(i, i + PRODUCT_ROWS_AT_ONCE) for i in range(0, n, PRODUCT_ROWS_AT_ONCE)]

    def columns(part: slice) -> Tensor:
        y = train.y[part] - x["beside"][part, 0]
        return torch.cat((x["random"][part], x["fixed"][part], y.unsqueeze(1)), dim=1)

    total = weight.new_zeros(count).index_add(0, at, weight)
    mean = weight.new_zeros((count, width))
    for part in parts:
        mean.index_add_(0, at[part], columns(part) * weight[part].unsqueeze(1))
    mean /= total.unsqueeze(1)
    products = weight.new_zeros((count, q * width))
    for part in parts:
        apart = columns(part) - mean[at[part]]
        outer = apart[:, :q].unsqueeze(2) * (apart * weight[part].unsqueeze(1)).unsqueeze(1)
        products.index_add_(0, at[part], outer.flatten(1))
    beside = {"mean": mean, "products": products.unflatten(1, (q, width))}
    if begins is not None:
        beside[BEGINS] = begins[first]
    sizes = torch.bincount(owner[first], minlength=len(train.sizes))
    return Packed(beside, total, torch.cumsum(sizes, 0) - sizes, sizes)


# --- from the innermost level outward --------------------------------------------------------------


def shrunk(m: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """P ``[..., K, q, q]`` and log det(I + Lambda' M Lambda) ``[..., K]``."""
    inner = factor.mT @ m @ factor + torch.eye(m.shape[-1], dtype=m.dtype)
    root, info = torch.linalg.cholesky_ex(inner)
    if bool((info != 0).any()):
        raise EstimateError("a group's covariance is not positive definite: its numbers are too far apart")
    # The matrix is one and more in every direction: for few effects this is the fastest way that is exact.
    p = factor @ torch.linalg.solve(inner, factor.mT.expand(inner.shape))
    return 0.5 * (p + p.mT), 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def spans(widths: Sequence[int]) -> list[slice]:
    """Where each level's effects are among all of them."""
    ends = np.cumsum(widths).tolist()
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]


@dataclass(frozen=True)
class Paths:
    """Of each group of a level mean and covariance of its effects and of those further out, given the rows;
    and half the log-determinants of units."""

    mean: tuple[Tensor, ...]
    """``[K, Q]`` for each level, Q effects from this level outward."""
    covariance: tuple[Tensor, ...]
    """``[K, Q, Q]``; where it was asked for."""
    half_log_det: Tensor
    """``[C]``, of I + Lambda' Z'Z Lambda."""


def paths(tree: Tree, widths: Sequence[int], products: Tensor, factor: Tensor, spread: bool = True) -> Paths:
    """From products ``[K, q, q + 1]`` of Z with Z and with what is left of y, of each innermost group."""
    count, steps, g = len(widths), list[tuple[Tensor, Tensor]](), products
    half_log_det = products.new_zeros(tree.sizes[-1])
    for level, span in enumerate(spans(widths)):
        width = widths[level]
        p, log_det = shrunk(g[:, :width, :width], factor[span, span])
        half_log_det = half_log_det + 0.5 * tree.of_units(level, log_det)
        turned = p @ g[:, :width, width:]
        steps.append((p, turned))
        if level + 1 < count:
            rest = g[:, width:, width:] - g[:, :width, width:-1].mT @ turned
            g = tree.parents_sum(level, rest)
    p, turned = steps[-1]
    means, covariances = [turned[:, :, 0]], [p]
    for level in reversed(range(count - 1)):
        (p, turned), around = steps[level], tree.parents[level]
        h, outer = turned[:, :, :-1], means[0][around]
        own = turned[:, :, -1] - (h @ outer.unsqueeze(2)).squeeze(2)
        means.insert(0, torch.cat((own, outer), dim=1))
        if spread:
            wide = covariances[0][around]
            across = h @ wide
            top = torch.cat((p + across @ h.mT, -across), dim=2)
            covariances.insert(0, torch.cat((top, torch.cat((-across.mT, wide), dim=2)), dim=1))
    return Paths(tuple(means), tuple(covariances) if spread else (), half_log_det)
