"""The units worked on together in one call: ragged data, packed, with padding only where needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key

T = TypeVar("T")
KEPT_BYTES = 2**27
"""Of what is made of units' data once and for all, up to which it is kept from one round to the next."""


class Shelf:
    """What was made of units' data, kept for as long as a run takes: cohorts come and go."""

    def __init__(self) -> None:
        self._made: dict[object, Any] = {}
        self._bytes = 0

    def found(self, how: object, units: Tensor) -> Any:
        """What was made of these units together, or None."""
        return self._made.get((how, _named(units)))

    def keep(self, how: object, units: Tensor, made: object, size: int) -> None:
        """For the next round; where it gets too much, what was there before goes."""
        if self._bytes + size > KEPT_BYTES:
            self._made, self._bytes = {}, 0
        if size <= KEPT_BYTES:
            self._made[how, _named(units)] = made
            self._bytes += size


def _named(units: Tensor) -> bytes:
    return units.cpu().numpy().tobytes()


@dataclass(frozen=True)
class Cohort:
    """C units and their n examples, rows of one unit next to each other.

    ``units`` are the hashes of their names (``keys.unit_of``), under which they draw; nothing here says
    where in a federation they stand, or with which weight they count.
    """

    units: Tensor
    sizes: Tensor
    x: Inputs
    y: Tensor
    longest: int
    embedded: bool = False
    """x already holds features (a frozen backbone's are computed once)."""
    shelf: Shelf | None = None
    """Where what is made of these units together is kept."""

    def __len__(self) -> int:
        return self.units.shape[0]

    @property
    def device(self) -> torch.device:
        return self.units.device

    @cached_property
    def owner(self) -> Tensor:
        """For each row, the position of its client in the cohort."""
        index = torch.arange(len(self), device=self.device)
        return torch.repeat_interleave(index, self.sizes, output_size=self.y.shape[0])

    @cached_property
    def position(self) -> Tensor:
        """For each row, its position among its client's rows."""
        starts = torch.cumsum(self.sizes, 0) - self.sizes
        return torch.arange(self.y.shape[0], device=self.device) - starts[self.owner]

    @property
    def examples(self) -> int:
        """Rows of all clients together."""
        return self.y.shape[0]

    @property
    def even(self) -> bool:
        """All clients have the same number of rows, so that packed rows are a padded block."""
        return self.y.shape[0] == len(self) * self.longest

    @cached_property
    def mask(self) -> Tensor | None:
        """``[C, N]``, true where there is an example; None when there is no padding."""
        if self.even:
            return None
        return torch.arange(self.longest, device=self.device) < self.sizes.unsqueeze(1)

    @cached_property
    def wide(self) -> Cohort:
        """The same in double precision."""
        return replace(self, x=map_inputs(double, self.x), y=double(self.y))

    def pad(self, rows: Tensor) -> Tensor:
        """``[n, ...]`` packed rows to a ``[C, N, ...]`` block, zeros where there is no example."""
        shape = (len(self), self.longest, *rows.shape[1:])
        if self.even:
            return rows.reshape(shape)
        block = rows.new_zeros((len(self) * self.longest, *rows.shape[1:]))
        return block.index_copy(0, self._places, rows).reshape(shape)

    def packed(self, block: Tensor) -> Tensor:
        """The inverse of ``pad``: the rows of a block that are examples, ``[n, ...]``."""
        rows = block.flatten(0, 1)
        return rows if self.even else rows[self._places]

    @cached_property
    def _places(self) -> Tensor:
        """For each row, its place in a padded block."""
        return self.owner * self.longest + self.position

    @cached_property
    def _made(self) -> dict[object, Any]:
        return {}

    def once(self, how: object, make: Callable[[], T]) -> T:
        """What is made of the data alone, which never change: once for each ``how``."""
        if how not in self._made:
            self._made[how] = make()
        found: T = self._made[how]
        return found

    def padded_targets(self, how: object, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """``pad`` of y in the form that ``encode`` gives."""
        return self.once(how, lambda: self.pad(encode(self.y)))

    @cached_property
    def empty(self) -> Tensor | None:
        """``[C]``, true where a client has no example; None when everyone has some."""
        none = self.sizes == 0
        return none if bool(none.any()) else None

    @cached_property
    def donor(self) -> Tensor:
        """For each client, the position of a client with examples: itself, unless it has none."""
        index = torch.arange(len(self), device=self.device)
        if self.empty is None or not self.longest:
            return index
        return torch.where(self.empty, (~self.empty).to(torch.uint8).argmax(), index)

    @cached_property
    def _filled(self) -> Tensor:
        starts = (torch.cumsum(self.sizes, 0) - self.sizes)[self.donor]
        last = (self.sizes[self.donor] - 1).clamp(min=0)
        place = torch.arange(self.longest, device=self.device)
        return starts.unsqueeze(1) + torch.minimum(place, last.unsqueeze(1))

    def fill(self, rows: Tensor) -> Tensor:
        """``pad`` with a real row, the client's last, in place of zeros: a function that is finite on the
        data is finite on the padding, and so are its derivatives."""
        if self.even:
            return self.pad(rows)
        return rows[self._filled]

    def select(self, index: Tensor) -> Cohort:
        """The sub-cohort of the clients at these positions."""
        sizes = self.sizes[index]
        starts = (torch.cumsum(self.sizes, 0) - self.sizes)[index]
        owner = torch.repeat_interleave(torch.arange(len(index), device=self.device), sizes)
        offset = torch.arange(owner.shape[0], device=self.device)
        rows = starts[owner] + offset - (torch.cumsum(sizes, 0) - sizes)[owner]
        return self.take(rows, self.units[index], sizes)

    def thinned(self, most: int) -> Cohort:
        """At most so many rows of each unit, evenly spaced."""
        if self.longest <= most:
            return self
        sizes = self.sizes.clamp(max=most)
        # floor(place m / n) takes m values as a unit's n rows go by: the first row of each is in.
        place, n, m = self.position, self.sizes[self.owner], sizes[self.owner]
        mask = place * m % n < m
        return self.take(mask.nonzero().squeeze(1), self.units, sizes)

    def drawn(self, most: int, key: Key) -> Cohort:
        """At most so many rows of each unit, drawn without replacement, in the order that they had; nobody's
        depend on who else is there."""
        if self.longest <= most:
            return self
        sizes = self.sizes.clamp(max=most)
        place = torch.arange(self.longest, device=self.device)
        u = key.uniform(self.units, (self.longest,), torch.float64)
        u = u.masked_fill(place >= self.sizes.unsqueeze(1), 2.0)  # beyond all that are there
        first = torch.argsort(u, 1)[:, :most]
        chosen = torch.zeros_like(u, dtype=torch.bool).scatter_(1, first, place[:most] < sizes.unsqueeze(1))
        return self.take(self.packed(chosen).nonzero().squeeze(1), self.units, sizes)

    def take(self, rows: Tensor | slice, units: Tensor, sizes: Tensor) -> Cohort:
        """A cohort of these rows, which must lie unit by unit."""
        return Cohort(
            units=units,
            sizes=sizes,
            x=map_inputs(lambda v: v[rows], self.x),
            y=self.y[rows],
            longest=int(sizes.max()) if len(sizes) else 0,
            embedded=self.embedded,
        )

    def parts(self, most: int) -> Iterator[Cohort]:
        """Cohorts of at most so many units each; itself where it has no more."""
        if len(self) <= most:
            yield self
            return
        ends = torch.cumsum(self.sizes, 0).tolist()
        for first in range(0, len(self), most):
            some = slice(first, first + most)
            last = min(first + most, len(self)) - 1
            rows = slice(ends[first - 1] if first else 0, ends[last])
            yield self.take(rows, self.units[some], self.sizes[some])

    def one_by_one(self) -> Iterator[Cohort]:
        """A cohort for each unit; its rows are views."""
        start = 0
        for i, size in enumerate(self.sizes.tolist()):
            one = slice(i, i + 1)
            yield self.take(slice(start, start + size), self.units[one], self.sizes[one])
            start += size


def double(v: Tensor) -> Tensor:
    """In double precision, where it is no whole number."""
    return v.double() if v.is_floating_point() else v
