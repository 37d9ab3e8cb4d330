"""Flat vectors with named views: what compressors, optimisers, checkpoints and transports see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors that one flat vector holds, in order.

    >>> layout = Layout.of({"w": (2, 3), "b": (2,)})
    >>> layout.size
    8
    >>> {name: tuple(v.shape) for name, v in layout.views(torch.arange(8.0)).items()}
    {'w': (2, 3), 'b': (2,)}
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        return cls(tuple(shapes), tuple(tuple(s) for s in shapes.values()))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(s) for s in self.shapes)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views onto the last axis of ``flat``; leading axes are kept."""
        # One split: slicing tensor by tensor would make the backward pass quadratic.
        parts = torch.split_with_sizes(flat, list(self.sizes), dim=-1)
        lead = flat.shape[:-1]
        return {
            name: part.reshape((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The inverse of ``views`` for tensors without leading axes."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unit(self, name: str) -> float | None:
        """The natural size of a change of this tensor's entries, where its meaning says it."""
        return None

    def spans(self) -> dict[str, slice]:
        """Where each name lies in the flat vector."""
        out, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            out[name] = slice(start, start + size)
            start += size
        return out
