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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedpop.blocks import ROWS_AT_ONCE
from fedpop.checked import Range
from fedpop.errors import ModelError, SettingsError
from fedpop.keys import Key
from fedpop.message import Answer, Guard, Tensors, Total
from fedpop.message.guard import MESSAGES_FOR_A_MEDIAN
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
        rows = _Rows.of(units)
        used, outliers = _used(units, self.minimum, rows.per_unit(lambda x, at: x.square().sum(1)))
        second = rows.of_units(used).summed(lambda x, at: x.mT @ x)
        return _summed(outliers, second=second, count=(used * units.cohort.sizes).sum())

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
        cohort, rows = units.cohort, _Rows.of(units, asked["whitener"])
        y = self.model.likelihood.working_response(cohort.y).to(torch.float64)
        squares = rows.per_unit(lambda x, at: y[at].square().sum(1))
        # No entry of S_i is larger.
        used, outliers = _used(units, self.minimum, rows.per_unit(lambda x, at: x.square().sum(1)) * squares)
        rows, y = rows.of_units(used), torch.where(used[rows.owner, None] > 0, y, 0.0)
        pairs = (used * cohort.sizes * (cohort.sizes - 1)).sum()
        squares = squares / cohort.sizes.clamp(min=1)
        unit = y * squares.clamp(min=torch.finfo(y.dtype).tiny).rsqrt()[rows.owner, None]
        return _summed(outliers, cross=_cross(rows, y), even=_cross(rows, unit), pairs=pairs)

    def guard(self, multiple: float, of: str = "") -> Guard:
        """Sums over pairs of examples grow with their number."""
        return Guard(multiple, self.guarded, {}, MESSAGES_FOR_A_MEDIAN, of=of, power=2)

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


@dataclass(frozen=True)
class _Rows:
    """Everyone's rows as they are packed, in double precision a block at a time: one long client costs no
    more than as many short ones."""

    x: Tensor
    owner: Tensor
    units: int
    whitener: Tensor | None
    used: Tensor | None = None

    @classmethod
    def of(cls, units: Units, whitener: Tensor | None = None) -> _Rows:
        if not isinstance(units.cohort.x, Tensor):
            raise ModelError("a spectral start needs x as one tensor")
        return cls(units.cohort.x, units.cohort.owner, len(units.cohort), whitener)

    def of_units(self, used: Tensor) -> _Rows:
        """The same with zeros for the others' rows."""
        return replace(self, used=used)

    def _blocks(self) -> Iterator[tuple[Tensor, slice]]:
        for first in range(0, max(len(self.x), 1), ROWS_AT_ONCE):  # one without rows, where there are none
            at = slice(first, first + ROWS_AT_ONCE)
            x = self.x[at].to(torch.float64)
            if self.used is not None:
                x = torch.where(self.used[self.owner[at], None] > 0, x, 0.0)
            yield (x if self.whitener is None else x @ self.whitener), at

    def summed(self, part: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """The sum over blocks."""
        return sum((part(x, at) for x, at in self._blocks()), self.x.new_zeros((), dtype=torch.float64))

    def per_unit(self, part: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Of what each row gives, the sum over a unit's rows, ``[C, ...]``."""
        sums: list[Tensor] = []
        for x, at in self._blocks():
            value = part(x, at)
            zeros = value.new_zeros((self.units, *value.shape[1:])) if not sums else sums.pop()
            sums.append(zeros.index_add_(0, self.owner[at], value))
        return sums[0]


def _cross(rows: _Rows, y: Tensor) -> Tensor:
    """The sum of S_i."""
    v = rows.per_unit(lambda x, at: x * y[at])
    return v.mT @ v - rows.summed(lambda x, at: (x * y[at].square()).mT @ x)


def _used(units: Units, minimum: int, size: Tensor) -> tuple[Tensor, Tensor]:
    """Ones for units that are large enough and whose message, of this size, is finite and in proportion to
    others'; and those that are out of all proportion."""
    cohort, guard = units.cohort, units.guard
    large = (cohort.sizes >= minimum) & torch.isfinite(size.float())
    outliers = torch.zeros_like(large) if guard is None else guard.far(size * large, cohort.sizes)
    return (large & ~outliers).to(torch.float64), outliers


def _summed(outliers: Tensor, **sums: Tensor) -> Answer:
    """Sums over the units, in single precision: second moments need no more, and bytes count."""
    return Answer(~outliers, sums={n: s.reshape(-1).float() for n, s in sums.items()}, outliers=outliers)
