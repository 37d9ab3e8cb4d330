"""Responses drawn from a fitted model, at whoever has the rows: what is sent is theta, and a seed.

Numbers are keyed by seed, replicate and the name of a group (of nested factors the outermost), so that the
same are drawn wherever a group is. A parametric bootstrap refits the formula to such draws: sites draw
their own responses and answer the questions of a fit about them; nothing else leaves than in any fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.keys import Key, units_of
from fedpop.message import Tensors
from fedpop.mixed.families import Family
from fedpop.mixed.nesting import RowOrder, spans
from fedpop.mixed.response import Response, ways
from fedpop.mixed.table import Rows


@dataclass(frozen=True)
class Drawing:
    """Theta on the user's scale, and which numbers are drawn: a site's responses follow from it and its
    rows."""

    b: Tensor
    root: Tensor
    """A factor of the random effects' covariance ``[q, q]``."""
    sigma: float
    dispersion: float
    seed: int
    replicate: int
    widths: tuple[int, ...]
    """Random effects of each level, the innermost first."""

    def description(self) -> tuple[dict[str, Any], Tensors]:
        plain: dict[str, Any] = {n: getattr(self, n) for n in ("sigma", "dispersion", "seed", "replicate")}
        plain["widths"] = list(self.widths)
        return plain, {"drawn_b": self.b, "drawn_root": self.root}

    @classmethod
    def from_description(cls, plain: Mapping[str, Any], tensors: Tensors) -> Drawing:
        widths = tuple(plain["widths"])
        return cls(tensors["drawn_b"], tensors["drawn_root"], **{**plain, "widths": widths})

    def response(
        self,
        fixed: np.ndarray,
        random: np.ndarray,
        offset: np.ndarray,
        rows: Rows,
        family: Family,
        known: Response,
    ) -> Response:
        """The responses of these rows, in their order, where ``known`` are the observed ones."""
        order, key = RowOrder.of(rows), Key(self.seed, round=self.replicate, purpose="simulated")
        at, units = order.rows, units_of(order.names[-1])
        sizes = torch.from_numpy(order.sizes)
        owner, start = torch.repeat_interleave(torch.arange(len(sizes)), sizes), sizes.cumsum(0) - sizes
        eta = torch.from_numpy(fixed[at] @ self.b.numpy() + offset[at])
        z = torch.from_numpy(np.ascontiguousarray(random[at]))
        for level, span in enumerate(spans(self.widths)):
            inside, most = _inside(order, level, owner, start)
            shape = (most, span.stop - span.start)
            effects = key.at(purpose=f"effects {level}").normal(units, shape, torch.float64)
            effects = effects @ self.root[span, span].mT
            eta = eta + (z[:, span] * effects[owner, inside]).sum(1)
        place = torch.arange(len(owner)) - start[owner]
        draw = key.at(purpose="rows")
        weight = torch.from_numpy(known.weight[at])
        if family.gaussian:
            noise = draw.normal(units, (int(sizes.max()),), torch.float64)[owner, place]
            y = (eta + self.sigma * noise / weight.sqrt()).numpy()
        else:
            uniform = draw.uniform(units, (int(sizes.max()),), torch.float64)[owner, place].numpy()
            family = family.at(self.dispersion)
            y = family.drawn(family.mean(eta).numpy(), weight.numpy(), uniform)
        out = np.empty(len(y))
        out[at] = y
        constant = known.constant
        if family.binomial:
            constant = ways((out * known.weight).round(), known.weight)
        return replace(known, y=out, constant=constant)


def _inside(order: RowOrder, level: int, owner: Tensor, start: Tensor) -> tuple[Tensor, int]:
    """Of each row the number of its group of this level within its unit, and how many there are at most."""
    if level == order.begins.shape[1]:
        return torch.zeros_like(owner), 1
    count = torch.from_numpy(order.begins[:, level]).long().cumsum(0)
    inside = count - count[start][owner]
    return inside, int(inside.max()) + 1
