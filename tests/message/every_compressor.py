"""A compressor of each kind, and what goes through it."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fedpop as fp
from fedpop.keys import Key
from tests.oracles import DOUBLE

KEY = Key(3, round=5, purpose="compress/J")

COMPRESSORS = {
    "identity": fp.compressors.Identity(),
    "qsgd-1": fp.compressors.QSGD(levels=1),
    "qsgd-7": fp.compressors.QSGD(levels=7),
    "qsgd-127": fp.compressors.QSGD(),
    "qsgd-128": fp.compressors.QSGD(levels=128),
    "qsgd-32767": fp.compressors.QSGD(levels=32767),
    "rand-k": fp.compressors.RandK(share=0.3),
    "rand-k-all": fp.compressors.RandK(share=1.0),
    "natural": fp.compressors.Natural(),
}
every = pytest.mark.parametrize("name", COMPRESSORS)
LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-149

vectors = arrays.arrays(
    np.float32,
    st.integers(0, 70),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
).map(torch.from_numpy)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a.view(torch.int32) == b.view(torch.int32)).all())


def one(compressor: fp.compressors.Compressor, v: torch.Tensor, client: int = 9) -> torch.Tensor:
    return compressor.compress(v[None], KEY, torch.tensor([client]))[0]


def many(compressor: fp.compressors.Compressor, v: torch.Tensor, clients: int) -> torch.Tensor:
    """The same vector as sent by so many clients, in double precision."""
    return compressor.compress(v.expand(clients, -1), KEY, torch.arange(clients)).to(DOUBLE)
