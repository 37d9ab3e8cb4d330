"""The natural size of phi's coordinates, and other random starts of the same size."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpop.keys import Key
from fedpop.models.base import Model


def natural_units(model: Model, phi: Tensor) -> Tensor:
    """The natural size of a change of each coordinate of phi: its tensor's root mean square."""
    overall = float(phi.square().mean().sqrt()) if phi.numel() else 1.0
    unit = torch.ones_like(phi)
    for name, span in model.phi_layout.spans().items():
        size = float(phi[span].square().mean().sqrt())
        # log-variances live on a scale of one; a tensor of zeros says nothing of its own scale.
        known = 1.0 if name.startswith("likelihood.") else model.phi_layout.unit(name)
        unit[span] = known or size or overall or 1.0
    return unit


def redrawn(model: Model, phi: Tensor, key: Key) -> Tensor:
    """Another random start: every tensor drawn anew with its own mean and standard deviation."""
    noise = key.normal(key.server(phi.device), (phi.numel(),), phi.dtype)[0]
    out = phi.clone()
    for span in model.phi_layout.spans().values():
        part = phi[span]
        if part.numel() > 1:
            out[span] = part.mean() + part.std() * noise[span]
    return out
