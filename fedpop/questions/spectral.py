"""The spectral start: phi from second moments of the data, in two additive questions before round one.

For y = x' phi z + noise with z of any law, and C = E[x x'], a unit's cross products

    S_i = v v' - sum_j y_j^2 x_j x_j',   v = sum_j x_j y_j,   x whitened by C^-1/2

have expectation N_i (N_i - 1) phi E[z z'] phi' (in whitened coordinates): the sum over pairs of *different*
examples, so that noise does not enter. The top d eigenvectors span phi. Those with a large z would
outweigh all others: the span is that of S_i over the unit's mean y^2 (an even weight for everyone), the
size within it that of S_i. A unit with fewer than two examples adds nothing; a minimum size keeps what two
examples would reveal from being sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedpop.checked import Range
from fedpop.errors import ModelError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.models.base import LinearLayout, Model
from fedpop.models.composition import Composition
from fedpop.questions.base import Question, Units
from fedpop.questions.features import moments_possible
from fedpop.settings import Setting

LEAST_MOMENT = 1e-8
"""Of the largest eigenvalue of x's moments: messages are in single precision, which has 6e-8, so less is
nothing but rounding and is not blown up by whitening."""
SHORTEST_DIRECTION = 1e-2
"""Of the largest eigenvalue of the cross products: negative or tiny ones are noise, and such a direction
still needs some length to move."""


def applies(model: Model) -> bool:
    """A linear backbone and a linear head with one output, both without bias."""
    return (
        isinstance(model, Composition)
        and model.fixed is None
        and type(model.backbone) is nn.Linear
        and model.backbone.bias is None
        and isinstance(model.z_layout, LinearLayout)
        and not model.z_layout.bias
        and model.outputs == 1
        and model.phi_layout.names[:1] == ("backbone.weight",)
    )


@dataclass(frozen=True)
class Spectral(Setting):
    """Start phi at the spectral estimate, from second moments of the data.

    It needs a linear backbone and a linear head with one output, both without bias.

    Args:
        minimum: Clients with fewer examples send zeros; 2 by default, the least. Raise it so that what
            is sent does not reveal a handful of examples.

    >>> Spectral(minimum=5)
    Spectral(minimum=5)
    """

    minimum: Annotated[int, Range(least=2)] = 2

    def questions(self, model: Model) -> Sequence[Question[Tensors]]:
        """Second moments for whitening, then cross products; they leave ``phi`` behind."""
        if not applies(model):
            raise SettingsError(
                "a spectral start needs a linear backbone and a linear head with one output, both "
                "without bias; use start='random'"
            )
        return SecondMoments(self.minimum), CrossProducts(model, self.minimum)


@dataclass(frozen=True)
class SecondMoments(Question[Tensors]):
    """C^-1/2 of everyone's x, to whiten by."""

    minimum: int
    name: ClassVar[str] = "second moments"

    @property
    def shows_rows(self) -> int:
        return self.minimum

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        cohort = units.cohort
        x = _padded(units)
        x, used, outliers = _used(x, units, self.minimum, x.square().sum((1, 2)))
        second = torch.einsum("cni,cnj->ij", x, x)
        return _summed(cohort, outliers, second=second, count=(used * cohort.sizes).sum())

    guarded: ClassVar[tuple[str, ...]] = ("second",)

    def possible(self, vectors: Tensors) -> Tensor | None:
        second, k = vectors["second"], math.isqrt(vectors["second"].shape[1])
        return (vectors["count"] >= 0).all(1) & moments_possible(second.unflatten(1, (k, k)))

    def finish(self, known: Tensors, total: Total) -> Tensors:
        second, count = (total.plain[n].double() for n in ("second", "count"))
        k = int(second.shape[0] ** 0.5 + 0.5)
        values, vectors = torch.linalg.eigh(second.reshape(k, k) / count.clamp(min=1))
        floor = values.max() * LEAST_MOMENT
        return {"whitener": vectors * values.clamp(min=floor).rsqrt() @ vectors.mT}


@dataclass(frozen=True)
class CrossProducts(Question[Tensors]):
    """phi with the spectral backbone, scaled so that E[z z'] = I; unchanged without any pairs."""

    model: Model
    minimum: int
    name: ClassVar[str] = "cross products"

    @property
    def shows_rows(self) -> int:
        return self.minimum

    def ask(self, known: Tensors) -> Tensors:
        return {"whitener": known["whitener"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        cohort = units.cohort
        x = _padded(units) @ asked["whitener"]
        y = cohort.pad(self.model.likelihood.working_response(cohort.y)).to(torch.float64)
        size = x.square().sum((1, 2)) * y.square().sum((1, 2))  # no entry of S_i is larger
        x, used, outliers = _used(x, units, self.minimum, size)
        y = torch.where(used[:, None, None] > 0, y, torch.zeros_like(y))
        pairs = (used * cohort.sizes * (cohort.sizes - 1)).sum()
        squares = y.square().sum((1, 2)) / cohort.sizes.clamp(min=1)
        unit = y * squares.clamp(min=torch.finfo(y.dtype).tiny).rsqrt()[:, None, None]
        return _summed(cohort, outliers, cross=_cross(x, y), even=_cross(x, unit), pairs=pairs)

    guarded: ClassVar[tuple[str, ...]] = ("cross", "even")

    def possible(self, vectors: Tensors) -> Tensor | None:
        return (vectors["pairs"] >= 0).all(1)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        phi, width = self.model.initial_phi(), self.model.z_layout.size
        cross, even, pairs = (total.plain[n].double() for n in ("cross", "even", "pairs"))
        if float(pairs) == 0:
            return {"phi": phi}
        whitener = known["whitener"]
        k = whitener.shape[0]
        span = torch.linalg.eigh(even.reshape(k, k))[1][:, -width:]
        values, vectors = torch.linalg.eigh(span.mT @ cross.reshape(k, k) @ span / pairs)
        top = values.clamp(min=SHORTEST_DIRECTION * float(values.abs().max()))
        weight = (span @ vectors * top.sqrt()).mT.flip(0) @ whitener  # the largest first
        return {"phi": torch.cat((weight.reshape(-1).to(phi.dtype), phi[weight.numel() :]))}


def _cross(x: Tensor, y: Tensor) -> Tensor:
    """The sum of S_i."""
    v = torch.einsum("cni,cno->ci", x, y)
    return v.mT @ v - torch.einsum("cni,cno,cnj->ij", x, y.square(), x)


def _padded(units: Units) -> Tensor:
    if not isinstance(units.cohort.x, Tensor):
        raise ModelError("a spectral start needs x as one tensor")
    return units.cohort.pad(units.cohort.x).to(torch.float64)


def _used(x: Tensor, units: Units, minimum: int, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Units that are large enough and whose message, of this size, is finite and in proportion to others';
    others' x is zero. And those that are out of all proportion."""
    cohort, guard = units.cohort, units.guard
    large = (cohort.sizes >= minimum) & torch.isfinite(size.float())
    outliers = torch.zeros_like(large) if guard is None else guard.far(size * large, cohort.sizes)
    used = large & ~outliers
    return torch.where(used[:, None, None], x, torch.zeros_like(x)), used.to(x.dtype), outliers


def _summed(cohort: Cohort, outliers: Tensor, **sums: Tensor) -> Answer:
    """Sums over the units, in single precision: second moments need no more, and bytes count."""
    return Answer(~outliers, sums={n: s.reshape(-1).float() for n, s in sums.items()}, outliers=outliers)
