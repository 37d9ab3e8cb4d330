"""The README's model on other draws, and how far below the best known optimum a run ends."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import FedpopWarning
from fedpop.evaluation.oracle import exact_optimum
from tests.helpers import generator, seeded

INPUTS, WIDTH, CLIENTS = 20, 2, 100
PARAMETERS = INPUTS * WIDTH + WIDTH + 1
"""Of phi and of the prior; a learned variance is one more, which does not make a run any better here."""


def draw(examples: int, variance: float, seed: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """phi and everyone's data, made as in the README."""
    g = generator(1000 + seed)
    shared = torch.randn(INPUTS, WIDTH, generator=g)
    clients = []
    for _ in range(CLIENTS):
        x, z = torch.randn(examples, INPUTS, generator=g), torch.randn(WIDTH, generator=g)
        clients.append((x, x @ shared @ z + variance**0.5 * torch.randn(examples, generator=g)))
    return shared, clients


def method(variance: float | str, seed: int, **settings: Any) -> fp.FedSOUL:
    backbone, head = nn.Linear(INPUTS, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False)
    likelihood = fp.likelihoods.Normal(variance)
    model = fp.Composition(seeded(backbone, seed, INPUTS**-0.5), seeded(head, seed), likelihood)
    return fp.FedSOUL(model, **({"engine": "sampled"} | settings))


def best_known(examples: int, variance: float, seed: int, learned: bool, starts: int) -> float:
    """The largest log-likelihood that L-BFGS finds from the truth and from so many random starts."""
    shared, clients = draw(examples, variance, seed)
    of = method("learned" if learned else variance, seed)
    g = generator(7)
    noise = torch.full((int(learned),), math.log(variance), dtype=torch.float64)
    phis = [torch.cat((shared.mT.reshape(-1).double(), noise))]
    for _ in range(starts):
        phis.append(torch.cat((torch.randn(INPUTS * WIDTH, generator=g).double(), 0 * noise)))
    beta = of.hierarchy.prior.init(torch.zeros(WIDTH, dtype=torch.float64), 1.0)
    federation = of.model.checked(fp.Federation.of(clients))
    return exact_optimum(of, federation, [(phi, beta) for phi in phis]).log_likelihood


def gap(
    examples: int, variance: float, seed: int, learned: bool = False, starts: int = 0, **settings: Any
) -> float:
    """Nats per parameter below the best known optimum after the README's 300 rounds."""
    _, clients = draw(examples, variance, seed)
    of = method("learned" if learned else variance, seed, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedpopWarning)  # that a run is not at an optimum is what is measured
        reached = of.fit(clients, rounds=300, progress=False).log_likelihood().value
    return (best_known(examples, variance, seed, learned, starts) - reached) / PARAMETERS
