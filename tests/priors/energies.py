"""Energies of which the truth is known, and small networks."""

import math

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.keys import Key
from tests.helpers import generator, population_data
from tests.oracles import DOUBLE, gaussian_noise

KEY = Key(7, purpose="test")


class Zero(nn.Module):
    """No energy, and no parameter."""

    def forward(self, u: Tensor) -> Tensor:
        return torch.zeros_like(u[:, 0])


class TwoWells(nn.Module):
    """On N(0, I) the density is a mixture of two Normals along the first axis, N(0, 1) along the others."""

    def __init__(self, share: float = 0.7, at: float = 2.0, sd: float = 0.3) -> None:
        super().__init__()
        self.share, self.at, self.sd = share, at, sd

    def log_density(self, u: Tensor) -> Tensor:
        right = math.log(self.share) - 0.5 * ((u - self.at) / self.sd) ** 2
        left = math.log(1 - self.share) - 0.5 * ((u + self.at) / self.sd) ** 2
        return torch.logaddexp(right, left) - math.log(self.sd * math.sqrt(2 * math.pi))

    def forward(self, u: Tensor) -> Tensor:
        return -self.log_density(u[:, 0]) - 0.5 * u[:, 0] ** 2


def small_net(d: int, seed: int = 0, size: float = 0.8) -> nn.Module:
    net = nn.Sequential(nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(size * torch.randn(p.shape, generator=generator(seed), dtype=DOUBLE))
    return net


def grid(prior: fp.priors.Energy, beta: Tensor) -> Tensor:
    """Points over eight scales either side of the base, fine enough for every energy of these tests."""
    d = prior.dimension(beta)
    line = torch.linspace(-8, 8, {1: 2001, 2: 401}[d], dtype=DOUBLE)
    return prior.mu(beta) + prior.sd(beta) * torch.cartesian_prod(*[line] * d).reshape(-1, d)


def energy_of(d: int, **settings) -> tuple[fp.priors.Energy, Tensor]:
    prior = fp.priors.Energy(small_net(d), **settings)
    return prior, prior.init(0.3 * gaussian_noise(1, d), 0.8)


# --- the front door --------------------------------------------------------------------------


def clients_of(b=8):
    return population_data(b, 5, 3, 2, 0.5)[0]


def torch_net(seed=0) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator(seed)))
    return net
