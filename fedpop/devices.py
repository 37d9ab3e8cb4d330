"""Devices by name, what they can do, and what fits onto them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from fedpop.errors import SettingsError

LARGEST_SHARE = 0.5
"""Of a device's free memory that data may take which stay there: rounds need the rest."""


def device_named(name: str | torch.device) -> torch.device:
    """The device of this name, if it is here.

    >>> device_named("cpu")
    device(type='cpu')
    """
    try:
        device = torch.zeros(1, device=torch.device(name)).device
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, ImportError) as error:
        why = str(error).splitlines()[0]
        raise SettingsError(
            f"device {str(name)!r} is not here ({why}); leave device out to compute where the model is"
        ) from error
    refuse_meta(device)
    return device


def refuse_meta(device: torch.device) -> None:
    """Raise for the device of tensors that are nothing but a shape."""
    if device.type == "meta":
        raise SettingsError("device 'meta' holds no numbers; take 'cpu', or 'cuda' where there is one")


def has_double(device: torch.device) -> bool:
    """Whether it computes in double precision, as factors of posteriors, sums and norms are computed whatever
    the model's own type is. Apple's does not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add(1)
    except (RuntimeError, TypeError):
        return False
    return True


def tensors_on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors there."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device that has memory of its own; None where it has none, or does not say."""
    with suppress(AttributeError, RuntimeError, AssertionError):
        ask: Callable[[torch.device], tuple[int, int]] = torch.get_device_module(device).mem_get_info
        return int(ask(device)[0])
    return None


def fits(size: int, device: torch.device) -> bool:
    """Whether data of so many bytes may stay on the device for as long as a run takes."""
    free = free_memory(device)
    return free is not None and size <= LARGEST_SHARE * free


def rows_on(device: torch.device, values: Tensor, rows: Tensor) -> Tensor:
    """Rows of a packed tensor, on a device: from main memory through pages that do not move, which are copied
    while the processor goes on."""
    rows = rows.to(values.device)
    if values.device.type == "cpu" and device.type == "cuda":
        pinned = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        return torch.index_select(values, 0, rows, out=pinned).to(device, non_blocking=True)
    return values.index_select(0, rows).to(device)
