"""Internal coordinates of a model's columns, and a cohort's rows in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.mixed.design import INTERCEPT


@dataclass(frozen=True)
class Coordinates:
    """Columns are centred where that is the same model, and scaled; fixed effects that say nothing new are
    left out."""

    x_centre: Tensor
    x_scale: Tensor
    z_centre: Tensor
    z_scale: Tensor
    y_centre: float
    y_scale: float
    """Of chains: exact engines leave y in its units."""
    x_names: tuple[str, ...]
    z_names: tuple[str, ...]
    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    """How many random effects a group has at each level of nesting, the innermost first."""
    kept: tuple[int, ...] | None = None
    """Positions of the design's fixed effects that are in the model; None: all."""

    @property
    def intercept(self) -> bool:
        """There is a fixed intercept; it comes first."""
        return INTERCEPT in self.x_names

    def x(self, fixed: Tensor) -> Tensor:
        """The columns in the model, of all fixed ones of the design."""
        return fixed if self.kept is None else fixed[:, list(self.kept)]

    def fixed(self, b: Tensor) -> Tensor:
        """Coefficients on the user's scale ``[p]``."""
        return self.fixed_map @ b + self.fixed_shift

    @cached_property
    def fixed_map(self) -> Tensor:
        """Internal coefficients to the user's, ``[p, p]``."""
        out = torch.diag(1 / self.x_scale)
        if self.intercept:
            out[0] -= self.x_centre / self.x_scale
        return out

    @property
    def fixed_shift(self) -> Tensor:
        out = torch.zeros_like(self.x_scale)
        if self.intercept:
            out[0] = self.y_centre
        return out

    @cached_property
    def random_map(self) -> Tensor:
        """The same for random effects, ``[q, q]``: within a block its intercept takes what was
        centred."""
        out = torch.diag(1 / self.z_scale)
        for i, name in enumerate(self.z_names):
            if name == INTERCEPT:
                same = torch.tensor([b == self.blocks[i] for b in self.blocks])
                out[i] -= torch.where(same, self.z_centre / self.z_scale, 0.0)
        return out


def columns(cohort: Cohort) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All columns of the design X and Z ``[n, q]``, y, offset, weight and constant ``[n]``, as they are."""
    x = cohort.x
    assert isinstance(x, dict)
    offset, weight, constant = x["beside"].unbind(1)
    return x["fixed"], x["random"], cohort.y, offset, weight, constant


def coded(cohort: Cohort, units: Coordinates) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X ``[n, p]`` and Z ``[n, q]`` in internal coordinates, y, offset and weight ``[n]`` as they are."""
    x, z, y, offset, weight, _ = columns(cohort)
    x, z = (units.x(x) - units.x_centre) / units.x_scale, (z - units.z_centre) / units.z_scale
    return x, z, y, offset, weight


def everyone(cohort: Cohort) -> Tensor:
    return torch.ones(len(cohort), dtype=torch.bool)
