"""What several tests share: small posteriors with exact moments, long chains, tests of means.

A mean is tested with a tolerance of five standard errors, the standard error coming from independent
replicates (chains that never meet, or rounds with different keys). For a chain that is sd / sqrt(ESS) of
the quantity itself, with no estimate of an autocorrelation in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, Poisson

import fedpop as fp
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Kernel, Pass, Target, Tuning, prior_chains, run
from fedpop.keys import Key
from fedpop.models.base import Model
from tests.helpers import federation_of

torch.set_num_threads(1)  # on tensors this small a second thread costs more than it gives

SIGMAS = 5.0
DOUBLE = torch.float64


def gaussian_noise(seed: int, *shape: int) -> Tensor:
    """Standard normal test data in double precision, from a generator of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def uniform_noise(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def cohort_of(model: Model, clients: Any, ids: Sequence[int] | None = None) -> Cohort:
    """The clients (or those at these positions) as one cohort."""
    federation = federation_of(model, clients)
    chosen = torch.arange(len(federation)) if ids is None else torch.tensor(ids)
    return federation.cohort(chosen, model.initial_phi().device)


# --- tests of means --------------------------------------------------------------------------


def z_scores(replicates: Tensor, truth: Tensor) -> Tensor:
    """(mean - truth) in standard errors, over independent replicates ``[R, ...]``."""
    spread = replicates.std(0) / replicates.shape[0] ** 0.5
    rounding = 1e-9 * (replicates.abs().mean(0) + truth.abs()) + 1e-12
    return (replicates.mean(0) - truth) / (spread + rounding)


def assert_mean(replicates: Tensor, truth: Tensor, what: str, sigmas: float = SIGMAS) -> None:
    """The mean of the replicates is the truth, within so many standard errors."""
    assert replicates.shape[0] >= 50, "too few replicates to know the standard error"
    assert replicates.shape[1:] == truth.shape
    score = z_scores(replicates, truth)
    worst = score.abs().max()
    assert worst < sigmas, f"{what}: {float(worst):.1f} standard errors off\n{score}"


def effective_draws(replicates: Tensor, variance: Tensor) -> Tensor:
    """How many independent draws the mean over replicates is worth."""
    return variance * replicates.shape[0] / replicates.var(0)


# --- chains ----------------------------------------------------------------------------------


def warmed(kernel: Kernel, target: Target, ids: Tensor, chains: int, warmup: int) -> tuple[Tensor, Tuning]:
    """Chains started from the prior, with the step adapted every ten transitions."""
    key = Key(11, purpose="warm")
    z = prior_chains.draw(target.prior, target.beta, ids, key.at(purpose="start"), chains)
    tuning = kernel.first_tuning(len(ids), z, None if target.linear else z.shape[-1])
    for k in range(warmup // 10):
        trace = run(kernel, target, z, tuning, 10, key.at(round=k), ids, adapt=True)
        z, tuning = trace.state.z, trace.tuning
    return z, tuning


def sample(kernel: Kernel, target: Target, *, chains: int, warmup: int, draws: int) -> Pass:
    """Draws ``[C, M, K, d]`` with the step frozen after the warm-up."""
    ids = torch.arange(target.likelihood.y.shape[0])
    z, tuning = warmed(kernel, target, ids, chains, warmup)
    return run(kernel, target, z, tuning, draws, Key(11, purpose="draws"), ids, adapt=False)


def bias_of_distance(kernel: Kernel, case: Case, chains: int, step: float) -> tuple[float, float]:
    """Relative bias of the mean of norm(z - mu)^2 over the clients with data, and its standard error."""
    exact = case.moments.distance[1:].sum()
    warmup, draws = int(4 / step) * 10, int(60 / step)  # the same time of the diffusion at any step
    trace = sample(kernel, case.target(), chains=chains, warmup=warmup, draws=draws)
    distance = (trace.draws[1:] - case.mu).square().sum(-1).mean(1).sum(0)
    return float(distance.mean() / exact) - 1, float(distance.std() / chains**0.5 / exact)


# --- small posteriors with exact moments -----------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """Mean ``[C, d]``, covariance ``[C, d, d]`` and mean of norm(z - mu)^2 ``[C]``."""

    mean: Tensor
    cov: Tensor
    distance: Tensor

    @classmethod
    def of_gaussians(cls, mean: Tensor, cov: Tensor, mu: Tensor) -> Moments:
        distance = cov.diagonal(dim1=-2, dim2=-1).sum(-1) + (mean - mu).square().sum(-1)
        return cls(mean, cov, distance)


@dataclass(frozen=True)
class Case:
    """Three clients (none, three and eight examples), a model and a prior N(mu, sigma)."""

    name: str
    model: Model
    clients: list[tuple[Tensor, Tensor]]
    prior: fp.priors.Normal
    beta: Tensor
    mu: Tensor
    sigma: Tensor
    log_likelihood: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``[G]`` from z ``[G, d]``, x and y, written with torch.distributions."""

    def target(self, ids: Sequence[int] | None = None) -> Target:
        cohort = cohort_of(self.model, self.clients, ids)
        phi = self.model.initial_phi()
        features = self.model.features(phi, cohort)
        return Target(self.model.bind(phi, features, cohort), self.prior, self.beta)

    @cached_property
    def moments(self) -> Moments:
        """By quadrature: the trapezoidal rule on a grid over seven prior sds either side."""
        d = len(self.mu)
        line = torch.arange(-28, 29, dtype=DOUBLE) / 4
        grid = torch.cartesian_prod(*[line] * d).reshape(-1, d)
        root = torch.linalg.cholesky(self.sigma)
        z = self.mu + grid @ root.mT
        mean, cov, distance = [], [], []
        for x, y in self.clients:
            log_p = -0.5 * grid.square().sum(1)
            w = torch.softmax(log_p + self.log_likelihood(z, x, y) if len(y) else log_p, 0)
            m = w @ z
            mean.append(m)
            cov.append((z - m).mT @ ((z - m) * w.unsqueeze(1)))
            distance.append(w @ (z - self.mu).square().sum(1))
        return Moments(torch.stack(mean), torch.stack(cov), torch.stack(distance))

    def precision(self, i: int) -> tuple[Tensor, Tensor]:
        """Q and Q m of client i in a model with noise variance one and no bias."""
        x, y = self.clients[i]
        design = torch.block_diag(*[x] * self.model.outputs)
        prior = torch.linalg.inv(self.sigma)
        q = design.mT @ design + prior
        return q, design.mT @ y.mT.reshape(-1) + prior @ self.mu

    @cached_property
    def gaussian(self) -> Moments:
        """The posterior in closed form, for the same models."""
        pairs = [self.precision(i) for i in range(len(self.clients))]
        cov = torch.stack([torch.linalg.inv(q) for q, _ in pairs])
        mean = torch.stack([torch.linalg.solve(q, v) for q, v in pairs])
        return Moments.of_gaussians(mean, cov, self.mu)


def normal_prior(covariance: str, mu: Tensor, sigma: Tensor) -> tuple[fp.priors.Normal, Tensor]:
    """The library's prior and beta for N(mu, sigma)."""
    prior = fp.priors.Normal(covariance=covariance)
    if covariance == "full":
        return prior, prior.pack(mu, torch.linalg.cholesky(sigma))
    log_sd = 0.5 * sigma.diagonal().log()
    return prior, torch.cat((mu, log_sd[:1] if covariance == "isotropic" else log_sd))


SIGMA = {
    "isotropic": lambda d: 0.8 * torch.eye(d, dtype=DOUBLE),
    "diagonal": lambda d: torch.diag(torch.linspace(0.5, 1.5, d, dtype=DOUBLE)),
    "full": lambda d: 0.4 + torch.diag(torch.linspace(0.4, 1.0, d, dtype=DOUBLE)),
}

DENSITY: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda eta: Normal(eta, torch.ones_like(eta)),
    "bernoulli": lambda eta: Bernoulli(logits=eta),
    "poisson": lambda eta: Poisson(eta.exp()),
    "categorical": lambda eta: Categorical(logits=eta),
}


class Curved(nn.Module):
    """2 tanh(w x) + s, a head that is not linear in z = (s, w)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.inner = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * 2 + self.shift


def make_case(
    family: str, covariance: str, *, features: int = 2, outputs: int = 1, head: str = "linear"
) -> Case:
    """Clients with 0, 3 and 8 examples, their targets drawn from the model itself.

    ``head`` is "linear", "bias" (with one), "vmap" (linear, but not told) or "curved".
    """
    module = Curved() if head == "curved" else nn.Linear(features, outputs, bias=head == "bias")
    if head == "vmap":  # the same head, but nothing is known of it
        module = nn.Sequential(module)
    likelihood = fp.likelihoods.Normal(1.0) if family == "normal" else family
    model = fp.Composition(None, module.double(), likelihood)

    def eta(z: Tensor, x: Tensor) -> Tensor:  # [G, n, o] from [G, d] and [n, p]
        if head == "curved":
            return torch.tanh(z[:, None, 1:] * x) * 2 + z[:, None, :1]
        rows = torch.cat((x, torch.ones_like(x[:, :1])), 1) if head == "bias" else x
        return torch.einsum("np,gop->gno", rows, z.reshape(len(z), outputs, -1))

    def log_likelihood(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return DENSITY[family](eta(z, x)).log_prob(y).reshape(len(z), -1).sum(1)

    d = model.z_layout.size
    mu, sigma = torch.linspace(0.6, -0.4, d, dtype=DOUBLE), SIGMA[covariance](d)
    truth = mu + gaussian_noise(1, 3, d) @ torch.linalg.cholesky(sigma).mT
    clients = []
    for i, n in enumerate((0, 3, 8)):
        x = gaussian_noise(2 + i, n, features)
        u = uniform_noise(7 + i, n, outputs)
        at = eta(truth[i : i + 1], x)[0]
        if family == "normal":
            y = at + gaussian_noise(7 + i, n, outputs)
        elif family == "bernoulli":
            y = (u < at.sigmoid()).to(DOUBLE)
        elif family == "poisson":
            y = torch.floor(at.exp() + u)
        else:
            y = (u[:, :1] > at.softmax(-1).cumsum(-1)[:, :-1]).sum(-1)
        clients.append((x, y))
    prior, beta = normal_prior(covariance, mu, sigma)
    name = "-".join([family, covariance, f"{outputs}-outputs", head])
    return Case(name, model, clients, prior, beta, mu, sigma, log_likelihood)


def gaussian_cases() -> list[Case]:
    """Normal likelihood with noise variance one."""
    one = [make_case("normal", covariance) for covariance in SIGMA]
    return one + [make_case("normal", covariance, outputs=2) for covariance in SIGMA]


def other_cases() -> list[Case]:
    """Posteriors that are not Gaussian, of at most three dimensions."""
    return [
        make_case("bernoulli", "isotropic"),
        make_case("bernoulli", "full", features=1, head="bias"),
        make_case("bernoulli", "isotropic", features=1, head="curved"),
        make_case("categorical", "isotropic", features=1, outputs=3),
        make_case("categorical", "diagonal", features=1, outputs=3),
        make_case("poisson", "diagonal"),
    ]
