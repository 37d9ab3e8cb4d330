"""Sites with Gaussian potentials U_i(w) = h_i norm(w - m_i)^2 / 2, for which samplers have closed forms.

A site's d examples are the rows of sqrt(h_i) times the identity, so that a mini-batch of k of them is what
rand-k makes of the gradient: k entries, times d / k.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.federation.cohort import Cohort
from fedpop.methods.base import Algorithm, Facts
from tests.helpers import cohort_of, generator, run_of, seeded

WIDE = torch.float64


@dataclass
class Sites:
    """b sites with precisions h and means m ``[b, d]``; lambda is the prior's precision."""

    d: int
    h: list[float]
    spread: float = 1.0
    prior: float = 0.0
    seed: int = 0
    clients: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        g = generator(self.seed)
        self.m = self.spread * torch.randn(len(self.h), self.d, generator=g, dtype=WIDE)
        eye = torch.eye(self.d, dtype=WIDE)
        self.clients = [(h**0.5 * eye, h**0.5 * m) for h, m in zip(self.h, self.m, strict=True)]
        self.facts = Facts(len(self.h), 10**6)
        self.model = fp.Composition(
            None, seeded(nn.Linear(self.d, 1, bias=False).to(WIDE), 1), fp.likelihoods.Normal(1.0)
        )

    @property
    def curvatures(self) -> Tensor:
        return torch.tensor(self.h, dtype=WIDE)

    @property
    def precision(self) -> float:
        return sum(self.h) + self.prior

    @property
    def mean(self) -> Tensor:
        """Of the posterior N(mean, I / precision)."""
        return self.curvatures @ self.m / self.precision

    def cohort(self) -> Cohort:
        return cohort_of(self.model, self.clients)

    def gradient(self, w: Tensor) -> Tensor:
        """Of each U_i, ``[b, d]``."""
        return self.curvatures.unsqueeze(1) * (w - self.m)


def chain(method: Algorithm, sites: Sites, rounds: int, start: Tensor, burn_in: int = 20) -> Tensor:
    """The server's w after each of these rounds ``[K, d]``, everyone (or one client in turn) taking part."""
    run = run_of(method, sites.clients, sites.facts.rounds)
    run.server = run.server | {"w": start}
    out = []
    for _ in range(burn_in + rounds):
        run.train_round()
        out.append(run.server["w"])
    return torch.stack(out[burn_in:])


def assert_variance(draws: Tensor, mean: Tensor, expected: Tensor, correlation: float, what: str) -> float:
    """The second moment about the mean, pooled over coordinates, within five standard errors; gives the
    relative standard error.

    Coordinates are nearly independent, each near an AR(1) with this correlation c; the squares of a
    Gaussian one have correlation c^2 per lag, so K rounds of d coordinates are worth
    K d (1 - c^2) / (1 + c^2) independent squares, of relative variance 2 each. Compression noise has
    heavier tails than a Gaussian: a factor of two in the variance, which bounds a kurtosis of five.
    """
    size = draws.numel() * (1 - correlation**2) / (1 + correlation**2)
    error = (2 * 2 / size) ** 0.5
    ratio = float((draws - mean).square().mean() / expected.mean())
    assert abs(ratio - 1) < 5 * error, f"{what}: {ratio:.4f} of what is expected, 5 se are {5 * error:.4f}"
    return error


def assert_centre(draws: Tensor, mean: Tensor, variance: Tensor, correlation: float) -> None:
    """Every coordinate's mean within five standard errors, K (1 - c) / (1 + c) draws being independent."""
    error = (variance / (len(draws) * (1 - correlation) / (1 + correlation))).sqrt()
    torch.testing.assert_close((draws.mean(0) - mean) / error, torch.zeros_like(mean), rtol=0, atol=5.0)
