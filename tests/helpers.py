"""Small federations and models that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.federation.cohort import Cohort
from fedpop.models.base import Model
from fedpop.runtime.random import Key


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(module: nn.Module, seed: int = 0, size: float = 0.5) -> nn.Module:
    """The module with keyed weights, so that tests do not depend on torch's global generator."""
    g = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype))
    return module


def linear_model(k: int = 3, d: int = 2, variance: float | str = 0.5, seed: int = 0) -> fp.Composition:
    """y = z' W x + noise, without biases: the paper's synthetic model."""
    return fp.Composition(
        seeded(nn.Linear(k, d, bias=False), seed),
        seeded(nn.Linear(d, 1, bias=False), seed + 1),
        fp.likelihoods.Normal(variance),
    )


def ragged(sizes: tuple[int, ...] = (3, 0, 5, 1), k: int = 3, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Clients of these sizes with standard normal x and y."""
    g = generator(seed)
    return [(torch.randn(n, k, generator=g), torch.randn(n, generator=g)) for n in sizes]


def population_data(
    b: int, n: int, k: int, d: int, variance: float, seed: int = 0
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Clients of y = x' phi z + noise, z standard normal; and the truth, phi ``[k, d]`` and z ``[b, d]``."""
    g = generator(seed)
    phi = torch.linalg.qr(torch.randn(k, d, generator=g))[0]
    z = torch.randn(b, d, generator=g)
    x = torch.randn(b, n, k, generator=g)
    noise = torch.randn(b, n, generator=g)
    y = torch.einsum("bnk,kd,bd->bn", x, phi, z) + variance**0.5 * noise
    return [(x[i], y[i]) for i in range(b)], phi, z


def cohort_of(model: Model, clients: Any, weights: Tensor | None = None) -> Cohort:
    """All clients as one cohort, checked and cast as in a run."""
    federation = model.prepare(fp.Federation.of(clients))
    ids = torch.arange(len(federation))
    ones = torch.ones(len(federation)) if weights is None else weights
    return federation.cohort(ids, ones, model.initial_phi().device)


def train_key(round: int = 0, seed: int = 0) -> Key:
    return Key(seed).at(round=round, purpose="train")
