"""Server states are flat dictionaries of tensors; parts of them live under a prefix."""

from __future__ import annotations

from fedpop.message import Tensors


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Tensors) -> Tensors:
    cut = len(prefix)
    return {n[cut:]: t for n, t in tensors.items() if n.startswith(prefix)}
