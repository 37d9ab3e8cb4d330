"""How many threads torch works with: small tensors do not profit from several, and threads that wait for a
core that others use cost many times what they give."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from fedpop.decisions import Decision

LEAST_SHARE = 2**19
"""Numbers of a step that each of several threads is given at least."""
WATCHED = 0.2
"""Seconds for which is watched how many cores are idle."""


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many inside; None leaves them. The same bits need the same split of sums over threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Cores that this process may use, by its affinity and the quota of its control group."""
    own = len(_affinity())
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        own = min(own, max(1, int(quota) // int(period)))
    return own


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def idle_cores() -> float:
    """How many of them nobody uses at present; all, where the system does not say."""
    before = _idle_ticks()
    time.sleep(WATCHED)
    after = _idle_ticks()
    shares = [
        (after[core][0] - idle) / max(after[core][1] - total, 1)
        for core, (idle, total) in before.items()
        if core in after
    ]
    return min(sum(shares), cores()) if shares else cores()


def _idle_ticks() -> dict[int, tuple[int, int]]:
    """Of each core of this process: ticks without work, and all of them."""
    ours, found = _affinity(), {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in ours:
                counts = [int(t) for t in ticks[:8]]
                found[int(name[3:])] = (counts[3] + counts[4], sum(counts))
    return found


def chosen(numbers: float, device: torch.device) -> Decision:
    """How many threads a run whose steps work on so many numbers takes: one unless each has enough to do, and
    never more than cores are idle, or than torch was told (``OMP_NUM_THREADS``, ``torch.set_num_threads``).

    >>> chosen(1e4, torch.device("cpu")).chosen
    '1'
    """
    if device.type != "cpu":
        return Decision("threads", "1", f"the work is done on {device}")
    most, share = min(torch.get_num_threads(), cores()), int(numbers / LEAST_SHARE)
    if most == 1:
        return Decision("threads", "1", "torch was given one, or there is one core")
    if share < 2:
        return Decision("threads", "1", "a step works on few numbers, which threads would only wait for")
    idle = max(1, round(idle_cores()))
    because = f"a step works on {numbers / 1e6:.2g} million numbers"
    if idle < most:
        because += f", and others use {most - idle} of {most} cores"
    return Decision("threads", str(min(share, most, idle)), because, unusual=idle < min(share, most))
