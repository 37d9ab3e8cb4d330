"""Where theta starts for a user's function: one z for everyone, by least squares.

The prior's mean would otherwise start at the values that the user wrote down, and EM moves it slowly along
directions of which a client's few rows say little: an intercept and a slope of x that is far from zero. So
each unit sends, at a z that all of them share, the sums that Levenberg's and Marquardt's step needs: G'G and
G'r of the outputs' derivatives G and residuals r, r'r and the number of examples, in double precision. Steps
with several dampings are tried together, and the best is taken where it lowers r'r. Outputs that are linear
in z are fitted by the first one.

What is left of y starts as noise and as spread of z, half each. The spread is that of (G'G)^-1, whatever z is
counted in and from: EM shrinks a spread that is too wide in a few rounds, but one that is too narrow grows as
slowly as data say little of z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.models.base import Model
from fedpop.questions.base import Question, Units
from fedpop.questions.features import LEAST_EXAMPLES, SCHWARZ_SLACK, moments_possible
from fedpop.questions.least_squares import RIDGE, spread_of

POOLED_STEPS = 8
"""Times that everyone is asked."""
LARGEST_POOLED_FIT = 30
"""Dimensions of z up to which it is asked: a unit sends their square."""
DAMPING = (0.0, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Of G'G's diagonal: a step with each is tried, all of them in one question."""


def questions(model: Model, phi: Tensor) -> Sequence[Question[Tensors]]:
    """For a function of z whose targets are normal about it; none for other models."""
    applies = not model.linear and not model.scale_from_features and model.likelihood.quadratic
    small = model.z_layout.size <= LARGEST_POOLED_FIT
    return (PooledFit(model, phi),) * POOLED_STEPS if applies and small else ()


@dataclass(frozen=True)
class PooledFit(Question[Tensors]):
    """Known are ``centre`` and ``spread`` of z, ``[d]`` each, and ``left``, the variance of y about the fit;
    and for the next question ``trials`` of z, ``[K, d]``."""

    model: Model
    phi: Tensor
    name: ClassVar[str] = "pooled fit"
    quorum: ClassVar[float] = 0.0  # a start can be made without those who are not finite
    starts_noise: ClassVar[bool] = True

    guarded: ClassVar[tuple[str, ...]] = ("sums",)

    def possible(self, vectors: Tensors) -> Tensor | None:
        d = self.model.z_layout.size
        sums = vectors["sums"].unflatten(1, (-1, d * d + d + 3))
        second, cross = sums[..., : d * d].unflatten(2, (d, d)), sums[..., d * d : -3]
        sizes = second.diagonal(dim1=2, dim2=3)
        explained = (cross.square() <= SCHWARZ_SLACK * sizes * sums[..., -3:-2]).flatten(1).all(1)
        whole = moments_possible(second.flatten(0, 1)).unflatten(0, sums.shape[:2]).all(1)
        possible: Tensor = (sums[..., -3:] >= 0).flatten(1).all(1) & explained & whole
        return possible

    @property
    def shows_rows(self) -> int:
        return LEAST_EXAMPLES

    def ask(self, known: Tensors) -> Tensors:
        return {"phi": self.phi, "z": known.get("trials", self.model.prior_centre().unsqueeze(0))}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        sums = torch.stack([self._sums(asked["phi"], z, units.cohort) for z in asked["z"]], 1)
        # Where a trial leads out of what this unit can compute, it says so, and counts in the others.
        lost = ~torch.isfinite(sums).all(2, keepdim=True)
        sums = torch.cat((torch.where(lost, torch.zeros_like(sums), sums), lost.double()), 2)
        small = (units.cohort.sizes < LEAST_EXAMPLES)[:, None, None]
        return Answer(~lost.all(1).squeeze(1), {"sums": torch.where(small, 0.0, sums).flatten(1)})

    def _sums(self, phi: Tensor, z: Tensor, cohort: Cohort) -> Tensor:
        """G'G, G'r, r'r and the number of examples of every unit at one z, ``[C, d d + d + 2]``."""
        model, x = self.model, map_inputs(cohort.fill, cohort.x)
        y = cohort.fill(model.likelihood.encode(cohort.y, model.outputs, torch.float64))

        def at(rows: Inputs) -> tuple[Tensor, Tensor]:
            """Outputs of one unit, and their derivatives: u -> G'u is linear, and has only d entries."""
            eta, pull, *_ = torch.func.vjp(lambda one: model.head_at(phi, one, rows), z)
            return eta, torch.func.jacrev(lambda u: pull(u)[0])(torch.zeros_like(eta)).movedim(0, -1)

        with torch.no_grad():
            eta, slopes = torch.func.vmap(at)(x)
        eta, slopes = eta.double(), slopes.double()
        rows = torch.arange(y.shape[1], device=y.device) < cohort.sizes.unsqueeze(1)
        left = torch.where(rows.unsqueeze(-1), y - eta, 0.0).flatten(1).unsqueeze(-1)
        slopes = torch.where(rows[..., None, None], slopes, 0.0).flatten(1, 2)
        square, count = left.square().sum(1), cohort.sizes.double().unsqueeze(1)
        return torch.cat(((slopes.mT @ slopes).flatten(1), (slopes.mT @ left).flatten(1), square, count), 1)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        d, z = self.model.z_layout.size, self.ask(known)["z"].double()
        sums = total.plain.get("sums", z.new_zeros(len(z) * (d * d + d + 3))).reshape(len(z), -1)
        good = (sums[:, -1] == 0) & (sums[:, -2] > 0) & (sums[:, -3] > 0)
        # Per example, since not everyone's answer need have arrived both times.
        tried = torch.where(good, sums[:, -3] / sums[:, -2], torch.inf)
        best = int(tried.argmin())
        if not float(tried[best]) < float(known.get("square", z.new_tensor(torch.inf))):
            return {}
        second, cross = sums[best, : d * d].reshape(d, d), sums[best, d * d : -3]
        size = torch.diag(second.diagonal().clamp(min=1e-12 * float(second.diagonal().max())))
        steps = [torch.linalg.solve(second + (RIDGE + damping) * size, cross) for damping in DAMPING]
        left = float(tried[best]) / self.model.outputs
        spread = spread_of(left, self.model.likelihood.given_noise)
        variance = spread * sums[best, -2] / d * torch.linalg.inv(second + RIDGE * size).diagonal()
        return {
            "centre": z[best],
            "spread": variance.sqrt().minimum(self._widest()),
            "left": z.new_tensor(left),
            "square": tried[best],
            "trials": (z[best] + torch.stack(steps)).to(self.model.initial_z()),
        }

    def _widest(self) -> Tensor:
        """A logarithm or a logit that data say nothing of is not spread over more than its unit."""
        layout = self.model.z_layout
        widest = torch.full((layout.size,), torch.inf, dtype=torch.float64)
        for name, span in layout.spans().items():
            widest[span] = layout.unit(name) or torch.inf
        return widest
