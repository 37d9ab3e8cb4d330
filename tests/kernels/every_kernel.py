"""Every kernel, and what each is tried on."""

import pytest
import torch
from torch import Tensor

from fedpop.kernels import (
    HMC,
    MALA,
    SGLD,
    ULA,
    Exponential,
    JumpHMC,
    Kernel,
    Tuning,
    run,
)
from fedpop.keys import Key
from tests.oracles import (
    DOUBLE,
    make_case,
)

KERNELS: list[Kernel] = [
    ULA(),
    Exponential(),
    Exponential(h=0.3),
    HMC(),
    HMC(leapfrog=1),
    MALA(),
    JumpHMC(),
    SGLD(batch=4),  # a part of client 2's examples, all of the others'
    SGLD(batch=8, decay=0.0),
]
CASES = [
    make_case("bernoulli", "diagonal"),
    make_case("normal", "full", outputs=2),
    make_case("bernoulli", "full", head="vmap"),
]
KEY = Key(3, purpose="test")
SIZES = (0, 3, 8)

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=repr)
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def start(case, ids, chains=2):
    d = case.prior.dimension(case.beta)
    return case.prior.sample(
        case.beta, KEY.at(purpose="start").normal(torch.tensor(ids), (chains, d), DOUBLE)
    )


def first(kernel, target, clients, z):
    return kernel.first_tuning(clients, z, None if target.linear else z.shape[-1])


def go(kernel, target, z, ids, steps=6, key=KEY, adapt=False, tuning=None):
    if tuning is None:
        tuning = first(kernel, target, len(ids), z)
    return run(kernel, target, z, tuning, steps, key, torch.tensor(ids), adapt=adapt)


def everything(tuning: Tuning) -> dict[str, Tensor]:
    return tuning.to_local()
