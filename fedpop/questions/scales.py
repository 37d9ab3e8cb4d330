"""How large columns are at sites, by powers of two: whoever counts in another unit is found before it counts.

One site whose column is in grams where others have tonnes would change everyone's mean and deviation, and
nobody would be told. So each site adds a one, for each column of numbers, to a histogram of sites' median
sizes and to one of their spreads. Sums of histograms are all that is needed: the bin in the middle is the
median site's, whatever a few others have. It is sent to everyone, and a site that is far from it
(``federation.cells.require_alike``) stops itself and says so in its own log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.federation.cells import scale_of
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.questions.base import Question, Units

SCALE_BINS = 128
"""Powers of two from 2^-64 to 2^63; what is smaller or larger counts in the first bin or the last."""


@dataclass(frozen=True)
class ColumnScales(Question[Tensors]):
    """How many sites have a column of this median size and of this spread, ``[2, SCALE_BINS]`` by column.

    A site with fewer than ``minimum`` rows adds nothing, nor does one where the column holds names; one whose
    size or spread is zero adds nothing to that histogram.
    """

    columns: tuple[str, ...]
    minimum: int
    name: ClassVar[str] = "column scales"

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        sums = {column: torch.zeros(2, SCALE_BINS, dtype=torch.float64) for column in self.columns}
        for table in units.tables():
            for column, histograms in sums.items():
                if len(table[column]) >= self.minimum and not hasattr(table[column], "cat"):
                    for histogram, value in zip(histograms, scale_of(table[column]), strict=True):
                        if value > 0:
                            histogram[bin_of(value)] += 1
        everyone = torch.ones(len(units.cohort), dtype=torch.bool, device=units.cohort.device)
        return Answer(everyone, sums={_name(column): sums[column].flatten() for column in self.columns})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        nothing = torch.zeros(2 * SCALE_BINS, dtype=torch.float64)
        return {c: total.plain_sum(_name(c), nothing).reshape(2, SCALE_BINS) for c in self.columns}


def bin_of(value: float) -> int:
    """In which bin a positive number counts.

    >>> bin_of(1.0), bin_of(0.99), bin_of(1e300)
    (64, 63, 127)
    """
    return min(max(math.frexp(value)[1] - 1 + SCALE_BINS // 2, 0), SCALE_BINS - 1)


def power_of(bin: float) -> float:
    """The power of two in a bin's middle."""
    return bin - SCALE_BINS // 2 + 0.5


def median_powers(histograms: Tensor) -> list[float | None]:
    """The power of two of the median site, of size and of spread; between two sites it is half-way between
    them, and None where nobody counts.

    >>> one = torch.zeros(2, SCALE_BINS)
    >>> one[0, bin_of(1.0)], one[0, bin_of(1e4)] = 2, 1
    >>> median_powers(one)
    [0.5, None]
    """
    return [
        _median([k for k, count in enumerate(h.tolist()) for _ in range(round(count))]) for h in histograms
    ]


def counted_powers(histogram: Tensor) -> dict[int, float]:
    """How many count in each bin that is not empty, by its power of two.

    >>> histogram = torch.zeros(SCALE_BINS)
    >>> histogram[bin_of(9.0)] = 3
    >>> counted_powers(histogram)
    {3: 3.0}
    """
    return {k - SCALE_BINS // 2: count for k, count in enumerate(histogram.tolist()) if count}


def plain_scales(histograms: Mapping[str, Tensor]) -> dict[str, dict[str, dict[str, int]]]:
    """How many sites have which power of two, where there are any."""
    return {
        column: {
            what: {str(power): round(count) for power, count in counted_powers(one).items()}
            for what, one in zip(("size", "spread"), both, strict=True)
        }
        for column, both in histograms.items()
    }


def _median(bins: Sequence[int]) -> float | None:
    if not bins:
        return None
    return power_of((bins[(len(bins) - 1) // 2] + bins[len(bins) // 2]) / 2)


def _name(column: str) -> str:
    return json.dumps([column])
