"""Runs in a child process: does bfloat16 work on this processor, agree with float32, and is it faster?

Some processors advertise bfloat16 and die of it ("Illegal instruction"), from certain sizes of products on.
Only doing it tells, so this file does what networks do where a death costs nothing; ``precision.py`` starts
it and reads the one line of JSON that it writes. It is run by its path and imports nothing but torch:
importing all of fedpop would cost more than the probe.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PRODUCT_SIZES = (16, 33, 64, 100, 256)
"""Of products; from 64 on some processors die."""
PROBED_BATCH = 50
PROBED_CONVOLUTIONS = ((3, 64, 5, PROBED_BATCH), (64, 64, 3, 10), (64, 64, 5, 5), (64, 32, 1, PROBED_BATCH))
"""Channels in and out, width of the filter, images of 32 by 32."""
ROUNDING_TOLERANCE = 2.0**-6
"""Norm of the difference from float32 relative to float32's. Rounding factors and results to 8 bits costs
0.003 in a product; the gradients of a convolution, which are rounded between its passes, have 0.009."""
TIMED_LAPS = 3

Layer = tuple[Callable[..., Tensor], list[Tensor]]


def scrambled(*shape: int, inputs: int = 1, seed: int = 0) -> Tensor:
    """Numbers of mean zero and variance 1 / ``inputs``: a hash of their position, and of the shape."""
    h = torch.arange(math.prod(shape)) + 1_000_003 * sum(shape) + seed
    for factor in (0x7FEB352D, 0x846CA68B):
        h = (h ^ h >> 16) * factor & 0xFFFFFFFF
    return ((h * 2.0**-32 - 0.5) * math.sqrt(12 / inputs)).float().reshape(shape)


def pixels(count: int, channels: int) -> Tensor:
    """Images as the library lays them out."""
    return scrambled(count, channels, 32, 32).contiguous(memory_format=torch.channels_last)


def layers() -> Iterator[Layer]:
    """What networks are made of, with arguments and results of size one."""
    for n in PRODUCT_SIZES:
        square = scrambled(n, n, inputs=n, seed=1)
        yield torch.matmul, [scrambled(n, n), square]
        yield torch.matmul, [scrambled(4, PROBED_BATCH, n), square.expand(4, n, n)]  # clients side by side
        for rows, outputs in ((1, n), (PROBED_BATCH, 10), (PROBED_BATCH, 2 * n)):
            weight = scrambled(outputs, n, inputs=n, seed=1)
            yield functional.linear, [scrambled(rows, n), weight, scrambled(outputs)]
    for channels, outputs, width, images in PROBED_CONVOLUTIONS:
        weight = scrambled(outputs, channels, width, width, inputs=channels * width**2)
        yield functional.conv2d, [pixels(images, channels), weight, scrambled(outputs)]


def networks() -> Iterator[tuple[Layer, int]]:
    """The kinds of network that are worth rounding, the quick one first, and how often a lap runs each."""

    def wide(x: Tensor, *w: Tensor) -> Tensor:
        return functional.linear(functional.relu(functional.linear(x, w[0])), w[1])

    def convolutional(x: Tensor, *w: Tensor) -> Tensor:
        for filters in w[:2]:
            x = functional.max_pool2d(functional.relu(functional.conv2d(x, filters)), 2)
        return functional.linear(x.flatten(1), w[2])

    def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [scrambled(*shape, inputs=math.prod(shape[1:]), seed=1) for shape in shapes]

    yield (wide, [scrambled(PROBED_BATCH, 512), *weights((512, 512), (64, 512))]), 20
    yield (convolutional, [pixels(PROBED_BATCH, 3), *weights((64, 3, 5, 5), (64, 64, 5, 5), (64, 1600))]), 1


def passed(layer: Layer, kind: str) -> list[Tensor]:
    """The result and every gradient: in ``float32``, under ``autocast`` as the library rounds, or with
    arguments that are ``bfloat16`` themselves."""
    function, given = layer
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    arguments = [t.to(dtype, copy=True).requires_grad_() for t in given]
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        out = function(*arguments)
    weights = scrambled(*out.shape, seed=2).to(out.dtype)
    return [t.detach().float() for t in (out, *torch.autograd.grad(out, arguments, weights))]


def largest_error() -> float:
    """Over all layers, relative to float32; infinite where anything is not finite."""
    worst = 0.0
    for layer in layers():
        exact = passed(layer, "float32")
        for kind in ("autocast", "bfloat16"):
            for one, other in zip(passed(layer, kind), exact, strict=True):
                error = float((one - other).norm() / other.norm())
                worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def gain(layer: Layer, repeats: int) -> float:
    """How many times faster than float32 it is, forward and backward; 0 where the clock is too coarse."""
    best = {"float32": math.inf, "autocast": math.inf}
    for _ in range(TIMED_LAPS):
        for kind in best:  # in turns, so that others on the machine slow both down
            started = time.process_time()
            for _ in range(repeats):
                passed(layer, kind)
            best[kind] = min(best[kind], time.process_time() - started)
    return best["float32"] / best["autocast"] if best["autocast"] > 0 else 0.0


def main() -> dict[str, Any]:
    """The least gain over the networks, on one thread, and whether the layers agree on one and on all: not
    asked (None) where float32 is faster, since emulation takes long and is not chosen anyway."""
    threads, least = torch.get_num_threads(), math.inf
    torch.set_num_threads(1)
    for layer, repeats in networks():
        least = min(least, gain(layer, repeats))
        if least < 1:
            return {"agrees": None, "error": None, "times_faster": least}
    error = largest_error()
    if threads > 1:
        torch.set_num_threads(threads)
        error = max(error, largest_error())
    return {"agrees": error <= ROUNDING_TOLERANCE, "error": error, "times_faster": least}


if __name__ == "__main__":
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a death is an answer: it leaves no file
    sys.stdout.write(json.dumps(main()) + "\n")
