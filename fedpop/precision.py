"""Which floating-point type the backbone runs in, asked of the processor."""

from __future__ import annotations

from pathlib import Path

import torch

from fedpop.errors import SettingsError

PRECISIONS = ("auto", "float32", "bfloat16")


def native_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bfloat16 matrices natively rather than by emulation."""
    if device.type == "cuda":
        out: bool = torch.cuda.is_bf16_supported(including_emulation=False)
        return out
    if device.type != "cpu":
        return False
    asked = [
        getattr(torch.cpu, name)()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if hasattr(torch.cpu, name)
    ]
    return any(asked) or _flags_have_bfloat16(Path("/proc/cpuinfo"))


def _flags_have_bfloat16(cpuinfo: Path) -> bool:
    # Older torch has no question to ask, so read what the kernel says of the processor.
    if not cpuinfo.exists():
        return False
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags.update(line.split(":", 1)[1].split())
            break
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 for autocast, or None to compute in the parameters' own type."""
    if precision not in PRECISIONS:
        raise SettingsError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    if precision == "bfloat16" or (precision == "auto" and native_bfloat16(device)):
        return torch.bfloat16
    return None


def check(precision: str) -> None:
    if precision not in PRECISIONS:
        raise SettingsError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
