"""Less to import in a process that answers one message and ends.

The first gradient of ``torch.func`` imports the compiler of torch, half as much again as torch itself, to
make sure that it does not interfere. Where it has not been imported it cannot; whoever asks for anything else
of it gets the real one.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

COMPILER, AUTOGRAD = "torch._dynamo", "torch._dynamo.compiled_autograd"


class _Autograd:
    def _disable(self) -> AbstractContextManager[Any]:
        real = sys.modules.get(AUTOGRAD)
        return nullcontext() if real is None else real._disable()

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(AUTOGRAD), name)


class _Compiler:
    compiled_autograd = _Autograd()

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(COMPILER), name)


def without_compiler() -> None:
    """Let gradients do without the compiler, unless it is there already; importing it undoes this."""
    if COMPILER not in sys.modules:
        vars(torch)["_dynamo"] = _Compiler()
