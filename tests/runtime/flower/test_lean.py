"""A client's process imports no more than it must, and finds the same."""

from __future__ import annotations

import subprocess
import sys

from fedpop.runtime.flower.lean import without_compiler

CODE = """
import sys, torch
from fedpop.runtime.flower.lean import without_compiler

without_compiler()
x = torch.arange(3.0)
found = torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x.unsqueeze(1)).squeeze(1)
assert torch.equal(found, 3 * x**2), found
assert "torch._dynamo" not in sys.modules
assert torch._dynamo.is_compiling() is False  # the real one, once it is asked for
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch.equal(torch.func.grad(lambda v: (v**3).sum())(x), 3 * x**2)
"""


def test_gradients_without_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=300)


def test_a_compiler_that_is_there_stays() -> None:
    import torch._dynamo

    real = torch._dynamo
    without_compiler()
    assert torch._dynamo is real
