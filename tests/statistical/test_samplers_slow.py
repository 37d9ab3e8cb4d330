"""Samplers of the whole model on a logistic posterior, against quadrature on a grid.

Whole runs through ``fit``, partial participation, compression and mini-batches included where a method has
them. Tolerances: five standard errors from the chain's own correlation, plus the bias of the step: a factor
of 1 / (1 - gamma L / 2) of a variance, 8/7 at the default step of 1/4 over L, and less than gamma L / 2 of a
standard deviation for the mean of a law as little skewed as this. How much mini-batches and compression
widen a law is checked against closed forms in tests/methods.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from tests.helpers import generator, seeded

pytestmark = pytest.mark.slow

WIDE = torch.float64
ROUNDS, BURN_IN = 6000, 500
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "QLSD": (lambda m: fp.QLSD(m, **RING), {}),
    "QLSD++": (
        lambda m: fp.QLSD(m, variant="++", compressor=fp.compressors.QSGD(), batch=15, **RING),
        {"participation": 2},
    ),
    "FSGLD": (lambda m: fp.FSGLD(m, local_steps=2, batch=15, **RING), {}),
    "DG-LMC": (lambda m: fp.DGLMC(m, rho=0.002, local_steps=2, prior_precision=1.0, **RING), {}),
}
WIDER = {"QLSD": 8 / 7, "DG-LMC": 8 / 7 * (1 + 0.002 * 30)}
"""DG-LMC: rho divides a site's precision H_i by 1 + rho H_i; no site's x'x / 4 has an eigenvalue above 28."""
RING: dict[str, Any] = {"samples": ROUNDS - BURN_IN, "burn_in": BURN_IN, "thin": 1}


def task() -> tuple[fp.Composition, list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Four sites of 30 examples, and the posterior's mean and covariance under N(0, I)."""
    g = generator(0)
    truth = torch.tensor([1.0, -0.5], dtype=WIDE)
    clients = []
    for shift in (-1.0, 0.0, 0.5, 1.0):
        x = torch.randn(30, 2, generator=g, dtype=WIDE) + shift
        clients.append((x, (torch.rand(30, generator=g, dtype=WIDE) < (x @ truth).sigmoid()).to(WIDE)))
    axis = torch.linspace(-3, 4, 400, dtype=WIDE)
    w = torch.cartesian_prod(axis, axis)
    log = -0.5 * w.square().sum(1)
    for x, y in clients:
        eta = w @ x.T
        log = log + (y * eta - nn.functional.softplus(eta)).sum(1)
    p = torch.softmax(log, 0)
    mean = p @ w
    model = fp.Composition(None, seeded(nn.Linear(2, 1, bias=False).to(WIDE), 1), "bernoulli")
    return model, clients, mean, (w - mean).T @ (p.unsqueeze(1) * (w - mean))


@pytest.mark.parametrize("name", METHODS)
def test_a_logistic_posterior(name: str) -> None:
    model, clients, mean, covariance = task()
    make, settings = METHODS[name]
    draws = make(model).fit(clients, rounds=ROUNDS, **settings).published["samples"]
    assert len(draws) == ROUNDS - BURN_IN
    centred = draws - draws.mean(0)
    c = (centred[1:] * centred[:-1]).sum(0) / centred.square().sum(0)
    size = len(draws) * (1 - c) / (1 + c)
    sd = covariance.diagonal().sqrt()
    assert bool(((draws.mean(0) - mean).abs() / sd < 5 / size.sqrt() + 0.125).all())
    ratio = centred.square().mean(0) / covariance.diagonal()
    error = 5 * (2 / size).sqrt()
    assert bool((ratio > 1 - error).all())  # steps and noise only ever widen the law
    if name in WIDER:
        assert bool((ratio < (1 + error) * WIDER[name]).all())
