"""Sums that a few hostile messages cannot move far, where single messages are seen.

In the place of a sum over S rows comes S times a centre of them:

    TrimmedMean   of each coordinate the mean without the largest and the smallest (Yin et al., ICML 2018)
    Median        of each coordinate (the same paper)
    Krum          the mean of the rows that lie closest to their neighbours (Blanchard et al., NeurIPS 2017;
                  its form with several rows kept)

Moves that sites send times their numbers of examples are taken without them, and count as the median site's.
A centre is not the mean where clients differ: it is biased towards the majority. It needs single rows, which
secure sums hide and noise on a sum does not suit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from fedpop.checked import Range
from fedpop.message import Aggregate, Message, Tensors, Total
from fedpop.settings import Setting

Share = Annotated[float, Range(above=0, below=0.5)]


class Robust(Setting, ABC):
    """A centre of rows ``[S, D]``, or of several vectors of each row together."""

    @abstractmethod
    def centre(self, vectors: Tensors) -> Tensors:
        """Of each vector's rows one, ``[D]``."""


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """Of each coordinate the mean without the largest and smallest values.

    Args:
        share: Of the messages, how many are left out at either end, 0.2 by default: at least the share that
            may be hostile.

    >>> TrimmedMean(0.34).centre({"J": torch.tensor([[1.0], [2.0], [90.0]])})["J"]
    tensor([2.])
    """

    share: Share = 0.2

    def centre(self, vectors: Tensors) -> Tensors:
        out = Tensors()
        for name, v in vectors.items():
            cut = min(math.ceil(self.share * len(v)), (len(v) - 1) // 2)
            out[name] = v.sort(0).values[cut : len(v) - cut].mean(0)
        return out


@dataclass(frozen=True)
class Median(Robust):
    """Of each coordinate the median, the mean of the middle two where there are two.

    >>> Median().centre({"J": torch.tensor([[1.0], [2.0], [4.0], [90.0]])})["J"]
    tensor([3.])
    """

    def centre(self, vectors: Tensors) -> Tensors:
        middle = {n: (v.sort(0).values, (len(v) - 1) // 2) for n, v in vectors.items()}
        return {n: (v[i] + v[len(v) - 1 - i]) / 2 for n, (v, i) in middle.items()}


@dataclass(frozen=True)
class Krum(Robust):
    """The mean of the messages that lie closest to their neighbours.

    Args:
        hostile: The share of messages that may be hostile, 0.2 by default: of S messages with f hostile ones
            a message is judged by its S - f - 2 nearest, and the S - f - 2 best are kept.

    >>> Krum(0.2).centre({"J": torch.tensor([[1.0], [2.0], [2.5], [3.2], [90.0]])})["J"]
    tensor([2.2500])
    """

    hostile: Share = 0.2

    def centre(self, vectors: Tensors) -> Tensors:
        count = len(next(iter(vectors.values())))
        kept = max(1, count - math.ceil(self.hostile * count) - 2)
        far = torch.zeros((count, count), dtype=torch.float64)
        for v in vectors.values():  # in its own units: no vector is to be seen for another's size
            rows = v.double()
            distance = torch.cdist(rows, rows).square().cpu()
            far = far + distance / distance.median().clamp(min=1e-300)
        nearest = far.sort(1).values[:, 1 : kept + 1].sum(1)
        best = nearest.argsort(stable=True)[:kept]
        return {n: v[best.to(v.device)].mean(0) for n, v in vectors.items()}


class RobustAggregate(Aggregate):
    """Keeps rows to the end of the round."""

    def __init__(self, rule: Robust) -> None:
        super().__init__()
        self._rule, self._rows = rule, dict[str, list[Tensor]]()

    def add(self, message: Message, weights: Tensor, lost: Tensor | None = None) -> Tensor:
        received = super().add(message, weights, lost)
        for name, v in message.vectors.items():
            rows = v if message.weighted else v * weights.to(v.dtype).unsqueeze(1)
            self._rows.setdefault(name, []).append(rows[received])
        return received

    def total(self, of: int, ratio: bool, **more: Any) -> Total:
        total = super().total(of, ratio, **more)
        rows = {name: torch.cat(parts) for name, parts in self._rows.items()}
        if not rows or not len(next(iter(rows.values()))):
            return total
        found = _centres(self._rule, rows)
        sums = {name: len(rows[name]) * v for name, v in found.items()}
        return Total(
            sums, sums, {}, total.count, total.weight, of, ratio, total.numbers, total.bytes_up, **more
        )


def _centres(rule: Robust, rows: Tensors) -> Tensors:
    sizes = next((rows[n] for n in SIZES if n in rows), None)
    if sizes is None:
        return rule.centre(rows)
    middle = Median().centre({"n": sizes})["n"]
    moves = {n: v / sizes.clamp(min=1) for n, v in rows.items() if n not in SIZES}
    found = {n: v * middle for n, v in rule.centre(moves).items()} if moves else {}
    return found | {n: Median().centre({n: v})[n] for n, v in rows.items() if n in SIZES}


SIZES = ("n", "examples")
"""Numbers of examples, which moves are sent times."""
