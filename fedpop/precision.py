"""Which floating-point type a network runs in: float32, or bfloat16 where a child process has tried it.

A processor may advertise bfloat16 and kill the process that multiplies in it, and neither torch nor the
operating system knows better. So nobody is asked: ``precision_probe.py`` does what networks do in a process
of its own, once per machine, and the answer is remembered in the user's cache folder. Its death or silence,
a result that is not float32's, or one that is not clearly faster, all mean float32.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedpop.errors import CheckpointError, SettingsError
from fedpop.files import cache_folder, read_json, write_json

PRECISIONS = ("auto", "float32", "bfloat16")
PROBE = Path(__file__).with_name("precision_probe.py")
LONGEST_PROBE = 60.0
"""Seconds after which a child that says nothing is given up."""
LEAST_SPEED_UP = 1.3
"""How many times faster than float32 rounding has to be for its loss of digits."""
VARIABLES = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""What changes which instructions torch executes, and with them the answer."""


def check(precision: str) -> None:
    """Raise unless this is one of the settings."""
    if precision not in PRECISIONS:
        raise SettingsError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")


def choose(precision: str, device: torch.device, worth: bool) -> str:
    """``float32`` or ``bfloat16``: what was asked for; for ``auto``, bfloat16 if the network is ``worth``
    rounding and the device is better at it. The first time on a machine this may take seconds."""
    check(precision)
    if precision != "auto":
        return precision
    return "bfloat16" if worth and _better(device) else "float32"


def reason(device: torch.device, worth: bool) -> str:
    """What ``auto`` goes by."""
    if not worth:
        return "nothing is large enough to be worth rounding"
    if device.type == "cuda":
        return f"the device {'has' if _better(device) else 'does not have'} bfloat16"
    return probed().why if device.type == "cpu" else "rounding was not tried on this kind of device"


def _better(device: torch.device) -> bool:
    if device.type == "cuda":
        out: bool = torch.cuda.is_bf16_supported(including_emulation=False)
        return out
    return device.type == "cpu" and probed().bfloat16


@dataclass(frozen=True)
class ProbeVerdict:
    """Whether bfloat16 is safe and faster here, and how that is known."""

    bfloat16: bool
    why: str


@dataclass(frozen=True)
class Machine:
    """What a verdict holds for."""

    host: str
    processor: str
    torch: str
    variables: tuple[str, ...]
    probe: str
    """Digest of the probe: another one may find what this one did not."""

    @classmethod
    def here(cls) -> Machine:
        given = tuple(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        digest = hashlib.sha256(PROBE.read_bytes()).hexdigest()
        return cls(platform.node(), processor(), torch.__version__, given, digest)

    def file(self, folder: Path) -> Path:
        """One for each machine, so that those that share a home do not overwrite each other's."""
        name = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return folder / f"precision-{name}.json"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, as far as the system tells."""
    with suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def probed() -> ProbeVerdict:
    """The verdict for this machine: remembered, or from a child process that is started now."""
    try:
        return _known(Machine.here(), cache_folder())
    except OSError as error:
        return ProbeVerdict(False, f"the probe cannot be read: {error.strerror or error}")


@functools.cache  # where nothing can be remembered in a file, at least one child per process is enough
def _known(machine: Machine, folder: Path | None) -> ProbeVerdict:
    remembered = None if folder is None else _recall(machine, folder)
    if remembered is not None:
        return remembered
    verdict = ask_child()
    if verdict is None:  # no fault of the processor's, so nothing to remember
        return ProbeVerdict(False, "the probe could not be started")
    if folder is not None:
        _remember(machine, folder, verdict)
    return verdict


def ask_child() -> ProbeVerdict | None:
    """Start the probe and wait for what it says, or for its end; None where there is no starting it."""
    if not sys.executable or getattr(sys, "frozen", False):  # an application, not an interpreter
        return None
    try:
        # -P: the folder of the probe is the package's, whose modules are not to be found by their bare names.
        command = [sys.executable, "-P", str(PROBE)]
        child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_PROBE)
    except subprocess.TimeoutExpired:
        return ProbeVerdict(False, f"the probe said nothing in {LONGEST_PROBE:g} seconds")
    except OSError:
        return None
    if child.returncode != 0:
        return ProbeVerdict(False, f"the probe died with exit status {child.returncode}")
    try:
        said = json.loads(child.stdout)
        agrees, times = said["agrees"], float(said["times_faster"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return ProbeVerdict(False, "the probe said nothing that can be read")
    if not times >= LEAST_SPEED_UP:
        gain = f"{times:.2g} times as fast as float32, not {LEAST_SPEED_UP:g}"
        return ProbeVerdict(False, f"bfloat16 is {gain}")
    if agrees is not True:
        return ProbeVerdict(False, "bfloat16 does not agree with float32")
    return ProbeVerdict(True, f"bfloat16 agrees with float32 and is {times:.2g} times as fast")


# --- what is remembered -----------------------------------------------------------------------------


def _recall(machine: Machine, folder: Path) -> ProbeVerdict | None:
    try:
        saved: Any = read_json(machine.file(folder))
    except CheckpointError:  # not there, not readable, half a file: all the same
        return None
    known = isinstance(saved, dict) and isinstance(saved.get("bfloat16"), bool)
    return ProbeVerdict(saved["bfloat16"], str(saved.get("why"))) if known else None


def _remember(machine: Machine, folder: Path, verdict: ProbeVerdict) -> None:
    """Each process writes under a name of its own, so that two at once leave one whole file."""
    path = machine.file(folder)
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    with suppress(OSError):  # a home that cannot be written to is no reason to fail
        folder.mkdir(parents=True, exist_ok=True)
        write_json(own, asdict(verdict) | {"machine": asdict(machine)})
        os.replace(own, path)
