"""Devices by name, and what one must be able to do."""

from __future__ import annotations

import torch

from fedpop.errors import SettingsError


def device_named(name: str | torch.device) -> torch.device:
    """The device of this name, if it is here.

    >>> device_named("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, ImportError) as error:
        why = str(error).splitlines()[0]
        raise SettingsError(
            f"device {str(name)!r} is not here ({why}); leave device out to compute where the model is"
        ) from error
    require_device(device)
    return device


def require_device(device: torch.device) -> None:
    """Raise for a device that holds no numbers, or none of double precision, in which factors of posteriors,
    sums and norms are computed whatever the model's own type is."""
    if device.type == "meta":
        raise SettingsError("device 'meta' holds no numbers; take 'cpu', or 'cuda' where there is one")
    try:
        torch.zeros(1, dtype=torch.float64, device=device).cpu()
    except (RuntimeError, TypeError) as error:
        raise SettingsError(
            f"device '{device}' has no double precision (float64), in which factors of posteriors, sums and "
            "norms are computed; use device='cpu', or 'cuda'"
        ) from error
