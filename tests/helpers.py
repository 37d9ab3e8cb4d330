"""Small federations and models that several tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.models.base import Model


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


@dataclass(frozen=True)
class Quadratics:
    """Clients with f_i(w) = (w - w_i)' H_i (w - w_i) / 2 + constant: linear regression, in double."""

    model: fp.Composition
    clients: list[tuple[Tensor, Tensor]]
    curvature: Tensor
    """H_i, ``[b, k, k]``."""
    optimum: Tensor
    """w_i, ``[b, k]``."""

    def gradient(self, i: int, w: Tensor) -> Tensor:
        return self.curvature[i] @ (w - self.optimum[i])

    def start(self) -> Tensor:
        return self.model.initial_z()

    def proximal(self, i: int, strength: float, centre: Tensor) -> Tensor:
        """argmin f_i(w) + strength/2 norm(w - centre)^2."""
        h = self.curvature[i]
        eye = torch.eye(len(h), dtype=h.dtype)
        return torch.linalg.solve(h + strength * eye, h @ self.optimum[i] + strength * centre)

    def minimum(self, weights: Tensor) -> Tensor:
        """argmin sum weights_i f_i."""
        h = torch.einsum("b,bjk->jk", weights, self.curvature)
        return torch.linalg.solve(h, torch.einsum("b,bjk,bk->j", weights, self.curvature, self.optimum))


def quadratics(sizes: tuple[int, ...] = (8, 5, 12), k: int = 3, seed: int = 0) -> Quadratics:
    """Their curvatures differ (1 to 4 times) as much as their optima do."""
    g = generator(seed)
    clients, curvature, optimum = [], [], []
    for i, n in enumerate(sizes):
        q = torch.linalg.qr(torch.randn(n, k, generator=g, dtype=torch.float64))[0]
        spread = 1 + 3 * torch.rand(k, generator=g, dtype=torch.float64)
        turn = torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64))[0]
        x = n**0.5 * (q * spread.sqrt()) @ turn.T
        w = 2 * i + torch.randn(k, generator=g, dtype=torch.float64)
        clients.append((x, x @ w + 0.1 * torch.randn(n, generator=g, dtype=torch.float64)))
        curvature.append(x.T @ x / n)
        optimum.append(torch.linalg.lstsq(x, clients[-1][1].unsqueeze(1)).solution[:, 0])
    head = seeded(nn.Linear(k, 1, bias=False).double(), seed)
    model = fp.Composition(None, head, fp.likelihoods.Normal(1.0))
    return Quadratics(model, clients, torch.stack(curvature), torch.stack(optimum))


def states(population: fp.Population, name: str, clients: int) -> Tensor:
    """What clients that all took part keep between rounds, ``[b, ...]``."""
    assert population.store is not None
    return population.store.get(torch.arange(clients), torch.device("cpu"))[name]
