"""Where theta starts in units of the data: pooled least squares on the features at phi, from moments.

Of features F (with a column of ones for a bias) and targets y each unit sends F'F, F'y, y'y and its number
of examples, in double precision. The sums give the mean of z that fits everyone best, and what is left of y:
half of it starts as noise, half as spread of z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.models.base import LinearLayout, Model
from fedpop.questions.base import Question, Units
from fedpop.questions.features import (
    LEAST_EXAMPLES,
    SCHWARZ_SLACK,
    head_features,
    head_layout,
    moments_possible,
    shapes,
)

RIDGE = 1e-6
"""Of a feature's mean square: features that are multiples of each other share a coefficient. A fit leaves as
much of y's at least: no start may have a variance of zero."""
SPREAD_SHARE, LEAST_SPREAD_SHARE = 0.5, 0.1
"""Of what a fit leaves of y: where z starts with it while the noise is learned too, and at least, where the
noise that was given explains all of it."""


def applies(model: Model) -> bool:
    """Normal targets of a linear head."""
    return model.linear and model.likelihood.quadratic and isinstance(model.z_layout, LinearLayout)


def columns_of(sent: int, outputs: int) -> int:
    """How many columns there are, where c (c + outputs) moments and two sums were sent."""
    return int(((outputs**2 + 4 * (sent - 2)) ** 0.5 - outputs) / 2 + 0.5)


def spread_of(left: float, noise: float | None) -> float:
    """The variance of outputs by z, where a fit of one z for everyone leaves this much of y; ``noise`` is
    the part of it that was given."""
    return SPREAD_SHARE * left if noise is None else max(left - noise, LEAST_SPREAD_SHARE * left)


@dataclass(frozen=True)
class LeastSquares(Question[Tensors]):
    """Known are ``centre``, ``spread`` and ``shape`` of z, ``left``, the variance of y about the fit, and
    ``fixed``, the map of fixed effects where there are any; nothing where too few examples were received."""

    model: Model
    phi: Tensor
    name: ClassVar[str] = "least squares"
    quorum: ClassVar[float] = 0.0  # a start can be made without those who are not finite

    guarded: ClassVar[tuple[str, ...]] = ("moments",)

    def possible(self, vectors: Tensors) -> Tensor | None:
        sent, outputs = vectors["moments"], head_layout(self.model)[0]
        c = columns_of(sent.shape[1], outputs)
        second, cross = sent[:, : c * c].unflatten(1, (c, c)), sent[:, c * c : -2].unflatten(1, (c, outputs))
        sizes = second.diagonal(dim1=1, dim2=2)
        explained = (
            (cross.square() <= SCHWARZ_SLACK * sizes.unsqueeze(2) * sent[:, -2, None, None]).all(2).all(1)
        )
        possible: Tensor = (sent[:, -2:] >= 0).all(1) & explained & moments_possible(second)
        return possible

    @property
    def shows_rows(self) -> int:
        return LEAST_EXAMPLES

    def ask(self, known: Tensors) -> Tensors:
        return {"phi": known.get("phi", self.phi)}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        cohort, phi = units.cohort, asked["phi"]
        f, offset = head_features(self.model, phi, cohort)
        y = self.model.likelihood.encode(cohort.y, head_layout(self.model)[0], torch.float64)
        design = None if cohort.embedded else self.model.fixed_design(cohort.x)
        if design is not None:
            f = torch.cat((f, design.double()), dim=1)
        elif offset is not None:
            y = y - offset
        f, y = cohort.pad(f), cohort.pad(y)
        large = cohort.sizes >= LEAST_EXAMPLES
        moments = torch.cat(
            (
                torch.einsum("cni,cnj->cij", f, f).flatten(1),
                torch.einsum("cni,cno->cio", f, y).flatten(1),
                y.square().sum((1, 2)).unsqueeze(1),
                cohort.sizes.double().unsqueeze(1),
            ),
            dim=1,
        )
        # One whose numbers the model's type cannot hold is left out of rounds: it must not set the start.
        good = torch.isfinite(moments.to(phi.dtype)).all(1)
        return Answer(good, {"moments": moments * large.unsqueeze(1)})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        outputs, columns = head_layout(self.model)
        sent = total.plain.get("moments", self.phi.new_zeros(2, dtype=torch.float64))
        square, n = sent[-2:].tolist()
        if not n or not square > 0:
            return {}
        # Of c columns there were c (c + outputs) moments: those of z come first, then those of fixed effects.
        c = columns_of(len(sent), outputs)
        second, cross = sent[: c * c].reshape(c, c), sent[c * c : -2].reshape(c, outputs)
        size = second.diagonal() / n
        size = size.clamp(min=1e-12 * float(size.max()))  # a column of zeros has a ridge as well
        weight = torch.linalg.solve(second + torch.diag(RIDGE * n * size), cross)
        explained = float((2 * weight * cross).sum() - (weight * (second @ weight)).sum())
        left = max(square - explained, RIDGE * square) / (n * outputs)
        spread = spread_of(left, self.model.likelihood.given_noise)
        fixed = {"fixed": weight[columns:].mT} if c > columns else {}
        found = shapes(second[:columns, :columns] / n, spread, outputs)
        return fixed | found | {"centre": weight[:columns].mT.reshape(-1), "left": second.new_tensor(left)}
