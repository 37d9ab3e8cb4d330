"""The covariance of random effects as a lower-triangular factor whose entries are free: smooth at zero,
where a logarithm is not, so that a singular covariance is a point like others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SINGULAR = 1e-4
"""An entry on the diagonal of the relative factor below which a covariance counts as singular, as in
lme4."""


@dataclass(frozen=True)
class Factor:
    """Lambda ``[q, q]``, Sigma = Lambda Lambda'; theta holds its entries inside blocks, row by row."""

    blocks: tuple[int, ...]

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        q = len(self.blocks)
        return [(i, j) for i in range(q) for j in range(i + 1) if self.blocks[i] == self.blocks[j]]

    @property
    def size(self) -> int:
        return len(self.places)

    def start(self, value: float) -> Tensor:
        """theta of a multiple of the identity."""
        return torch.tensor([value if i == j else 0.0 for i, j in self.places], dtype=torch.float64)

    def matrix(self, theta: Tensor) -> Tensor:
        q = len(self.blocks)
        rows, cols = (torch.tensor(v) for v in zip(*self.places, strict=True))
        return theta.new_zeros((q, q)).index_put((rows, cols), theta)

    def entries(self, matrix: Tensor) -> Tensor:
        """theta of a factor."""
        rows, cols = (torch.tensor(v) for v in zip(*self.places, strict=True))
        return matrix[rows, cols]

    def units(self) -> list[Tensor]:
        """d Lambda / d theta_j."""
        eye = torch.eye(self.size, dtype=torch.float64)
        return [self.matrix(row) for row in eye]


def canonical(sigma: Tensor, blocks: Sequence[int]) -> Tensor:
    """A lower-triangular factor of a covariance that may be singular, with a diagonal that is not
    negative."""
    root = torch.zeros_like(sigma)
    scale = sigma.diagonal().clamp(min=0)
    for j in range(len(sigma)):
        left = sigma[j, j] - root[j, :j].square().sum()
        if float(left) <= 1e-14 * float(scale[j]):
            continue
        root[j, j] = left.sqrt()
        root[j + 1 :, j] = (sigma[j + 1 :, j] - root[j + 1 :, :j] @ root[j, :j]) / root[j, j]
    return root
