"""Clients and a model of one's own, for functions.toml."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedpop as fp


def clients(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Whatever ``fp.fit`` takes as clients: here names with (x, y). It may take the seed, or nothing."""
    draw = torch.Generator().manual_seed(seed)
    out = {}
    for i in range(10):
        x = torch.randn(20, 3, generator=draw)
        slope = torch.tensor([1.0, -1.0, 0.5]) + torch.randn(3, generator=draw)
        out[f"machine-{i}"] = (x, torch.sin(x) @ slope + 0.1 * torch.randn(20, generator=draw))
    return out


def model(inputs: int) -> fp.Composition:
    """A function may take the number of inputs (of images the shape), or nothing. First weights that torch
    draws here are decided by the seed."""
    return fp.Composition(nn.Sequential(nn.Linear(inputs, 8), nn.Tanh()), nn.Linear(8, 1), "normal")
