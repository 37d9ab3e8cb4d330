"""How well a score tells apart examples of the kind learned from and others: the area under the ROC curve."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that an example from outside scores higher than one from inside, ties counted half.

    That is Mann and Whitney's statistic: from the ranks of all scores together, without a threshold.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
    0.875
    """
    n, m = len(inside), len(outside)
    scores = torch.cat((inside, outside)).double()
    if not n or not m or not bool(torch.isfinite(scores).all()):
        return math.nan
    _, group, count = scores.unique(return_inverse=True, return_counts=True)
    # Equal scores share the mean of the ranks that they take up.
    rank = (count.cumsum(0) - (count - 1) / 2)[group]
    return (float(rank[n:].sum()) - m * (m + 1) / 2) / (n * m)


def histogram(values: Tensor, most: float, bins: int) -> Tensor:
    """How many values lie in each of so many equal parts of [0, most]; the last one has what is above, too.

    >>> histogram(torch.tensor([0.0, 0.4, 0.6, 1.0]), 1.0, 2)
    tensor([2, 2])
    """
    place = (values / most * bins).floor().long().clamp(0, bins - 1)
    return torch.bincount(place, minlength=bins)
