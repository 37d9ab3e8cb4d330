"""Layers whose values come from elsewhere: a file, or a key."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def blank(kind: type[M], *args: Any, **settings: Any) -> M:
    """A layer of zeros: nothing is drawn from the global generator for it.

    ``nn.utils.skip_init`` does nearly the same, but imports sympy: half a second in every process of a site.

    >>> blank(nn.Linear, 2, 1, bias=False).weight
    Parameter containing:
    tensor([[0., 0.]], requires_grad=True)
    """
    layer = kind(*args, device="meta", **settings)
    for module in layer.modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros(empty.shape, dtype=empty.dtype)))
    return layer
