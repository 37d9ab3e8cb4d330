"""A client's rows by their sufficient statistics, where nothing else of them matters.

With a normal likelihood and head outputs that are affine in x, rows enter the likelihood by the products of
their columns A = (x, 1, y) alone, and so do those of the triangular factor R of A = Q R: p of them, however
many there were. R'R has F'F, F'y and y'y in it, and residuals of R twice their digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.blocks import CLIENTS_AT_ONCE, ROWS_AT_ONCE
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, leaves, map_inputs
from fedpop.models.base import LinearLayout, Model
from fedpop.models.likelihoods import Likelihood, Normal, Params
from fedpop.models.local import LinearLikelihood, LocalLikelihood

LEAST_CONDENSED = 4
"""Rows of the longest client, for each column of its data, from which their triangular factor takes their
place."""


class FewRows(LinearLikelihood):
    """That of clients whose rows are triangular factors; ``missing`` ``[C]`` more of each were there."""

    def __init__(
        self,
        features: Tensor,
        y: Tensor,
        likelihood: Likelihood,
        params: Params,
        offset: Tensor | None,
        missing: Tensor,
    ) -> None:
        super().__init__(features, y, None, likelihood, params, offset)
        self.missing = missing

    @property
    def sizes(self) -> Tensor:
        return (self.missing + self.y.shape[1]).round().long()

    def _value(self, z: Tensor) -> Tensor:
        # The density of a row that is not there is that of a residual of zero.
        none = self.y.new_zeros((1, self.outputs))
        constant = self.missing.to(z.dtype) * self.likelihood.log_prob(none, none, self.params)
        return super()._value(z) + constant.unsqueeze(1)

    def _value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._value(z), self.grad_of(self.value_and_slope(z)[1]).reshape(z.shape)

    def subset(self, size: int, uniform: object) -> LocalLikelihood:
        return self  # it costs no more than a mini-batch


@dataclass(frozen=True)
class Condensed:
    """A cohort's rows in this form."""

    rows: Tensor
    """``[C, p, p]``, in double precision."""
    basis: Inputs
    """Examples of zeros, and of a one in each column of x: an affine map is known by what it does to them."""
    missing: Tensor
    """Rows of each unit that are not there, ``[C]``."""
    embedded: bool

    @classmethod
    def of(cls, model: Model, cohort: Cohort) -> Condensed | None:
        """None where rows are few, or matter by themselves."""
        parts = leaves(cohort.x)
        if not (model.affine or cohort.embedded) or type(model.likelihood) is not Normal:
            return None
        if not model.linear or any(v.dim() != 2 or not v.is_floating_point() for v in parts):
            return None
        widths = [v.shape[1] for v in parts]
        size, width = sum(widths) + 1 + model.outputs, sum(widths)
        if cohort.longest <= LEAST_CONDENSED * size:
            return None
        eye = torch.eye(width, dtype=torch.float64, device=cohort.device)
        examples = iter(torch.cat((torch.zeros_like(eye[:1]), eye)).split(widths, 1))
        basis = map_inputs(lambda _: next(examples), cohort.x)
        missing = cohort.sizes.double() - size
        return cls(triangles(model, cohort, size), basis, missing, cohort.embedded)

    @classmethod
    def once(cls, model: Model, cohort: Cohort) -> Condensed | None:
        """Made once for these units, whose rows are not read again."""
        how = ("condensed", model.likelihood.name, model.outputs)
        shelf = cohort.shelf
        if shelf is None:
            return cohort.once(how, lambda: cls.of(model, cohort))
        kept: Condensed | None = shelf.found(how, cohort.units)
        if kept is None:
            kept = cohort.once(how, lambda: cls.of(model, cohort))
            if kept is not None:
                shelf.keep(how, cohort.units, kept, kept.rows.nbytes)
        return kept

    def bind(self, model: Model, phi: Tensor) -> LocalLikelihood:
        """The likelihood as a function of z."""
        basis, rows = map_inputs(lambda v: v.to(phi.dtype), self.basis), self.rows.to(phi.dtype)
        at = basis if self.embedded else model.embed(phi, basis)
        assert isinstance(at, Tensor)
        assert isinstance(model.z_layout, LinearLayout)
        known = at.shape[0]
        features = rows[..., :known] @ torch.cat((at[1:] - at[:1], at[:1]))
        features, offset = model.split_offset(features)
        if model.z_layout.bias:
            features = torch.cat((features, rows[..., known - 1 : known]), -1)
        return FewRows(features, rows[..., known:], model.likelihood, model.params(phi), offset, self.missing)


def triangles(model: Model, cohort: Cohort, size: int) -> Tensor:
    """R ``[C, p, p]`` of every unit's columns (x, 1, y), a block of rows after the other."""
    starts = torch.cumsum(cohort.sizes, 0) - cohort.sizes
    y = model.likelihood.encode(cohort.y, model.outputs, torch.float64)
    columns = [*leaves(cohort.x), y]
    found = y.new_zeros((len(cohort), size, size))
    for group in torch.arange(len(cohort), device=cohort.device).split(CLIENTS_AT_ONCE):
        first, longest = 0, int(cohort.sizes[group].max())
        while first < longest:
            group = group[cohort.sizes[group] > first]  # who has rows left
            sizes, step = cohort.sizes[group].unsqueeze(1), max(size, ROWS_AT_ONCE // len(group))
            place = first + torch.arange(min(step, longest - first), device=cohort.device)
            there = place < sizes
            rows = torch.where(there, starts[group].unsqueeze(1) + place, 0)
            x, last = torch.cat([v[rows].double() for v in columns[:-1]], -1), y[rows]
            block = torch.cat((x, x.new_ones((*rows.shape, 1)), last), -1) * there.unsqueeze(-1)
            found[group] = torch.linalg.qr(torch.cat((found[group], block), 1), mode="r")[1]
            first += step
    return found
