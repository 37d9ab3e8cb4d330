"""Kernels and the learned prior scale, with more draws than an ordinary test run can afford.

Oracles: quadrature for posteriors of at most three dimensions and for the marginal likelihood of populations
with a scalar random effect (softmax: the two contrasts that matter); two different adjusted kernels against
each other in 25 dimensions. Tolerances: five standard errors from chains that never meet; 3 % for the scale.
"""

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import fedpop as fp
from fedpop.kernels import HMC, MALA, ULA, Exponential, Target, run
from fedpop.keys import Key
from tests.oracles import (
    DOUBLE,
    SIGMAS,
    assert_mean,
    bias_of_distance,
    cohort_of,
    effective_draws,
    gaussian_noise,
    make_case,
    normal_prior,
    other_cases,
    sample,
    uniform_noise,
    warmed,
)

pytestmark = pytest.mark.slow

HEADS = [make_case("bernoulli", "isotropic"), make_case("categorical", "isotropic", features=1, outputs=3)]


@pytest.mark.parametrize("kernel", [HMC(), MALA()], ids=repr)
@pytest.mark.parametrize("case", other_cases(), ids=lambda c: c.name)
def test_adjusted_kernels_to_five_percent_of_a_standard_deviation(case, kernel):
    draws = 60 if isinstance(kernel, HMC) else 600
    # A step is halved as soon as one of 3000 chains diverges on its way in, and needs time to grow back.
    trace = sample(kernel, case.target(), chains=3000, warmup=400, draws=draws)
    z, exact = trace.draws.movedim(2, 0), case.moments
    centred = z - exact.mean.unsqueeze(1)
    second = torch.einsum("kcmi,kcmj->kcij", centred, centred) / z.shape[2]
    assert_mean(z.mean(2), exact.mean, "mean")
    assert_mean(second, exact.cov, "covariance")
    assert_mean((z - case.mu).square().sum(-1).mean(2), exact.distance, "mean of norm(z - mu)^2")
    # (5 / 0.05)^2 = 10,000 effective draws.
    assert effective_draws(z.mean(2), exact.cov.diagonal(dim1=-2, dim2=-1)).min() > 10_000


@pytest.mark.parametrize("case", HEADS, ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("kernel", "steps"),
    [(ULA, (0.8, 0.4, 0.2, 0.1)), (Exponential, (1.0, 0.5, 0.25))],
    ids=["ULA", "Exponential"],
)
def test_bias_of_unadjusted_kernels_falls_with_every_step(case, kernel, steps):
    table = [bias_of_distance(kernel(h), case, 6000, h) for h in steps]
    text = ", ".join(
        f"{h}: {100 * b:+.2f} +- {100 * e:.2f} %" for h, (b, e) in zip(steps, table, strict=True)
    )
    print(f"\n{kernel.__name__} on {case.name}: {text}")
    for (large, e), (small, f) in pairwise(table):
        assert abs(large) - abs(small) > SIGMAS * math.hypot(e, f)


# --- a softmax head of 25 dimensions ---------------------------------------------------------


def softmax_target() -> tuple[Target, torch.Tensor]:
    """Five classes, four features and a bias; clients with 0, 10 and 40 examples."""
    model = fp.Composition(None, nn.Linear(4, 5).double(), "categorical")
    mu = 0.5 * gaussian_noise(1, 25)
    prior, beta = normal_prior("isotropic", mu, torch.eye(25, dtype=DOUBLE))
    clients = []
    for i, n in enumerate((0, 10, 40)):
        x = gaussian_noise(2 + i, n, 4)
        rows = torch.cat((x, torch.ones(n, 1, dtype=DOUBLE)), 1)
        p = (rows @ (mu + gaussian_noise(5 + i, 25)).reshape(5, 5).mT).softmax(-1)
        clients.append((x, (uniform_noise(8 + i, n, 1) > p.cumsum(-1)[:, :-1]).sum(-1)))
    cohort = cohort_of(model, clients)
    return Target(model.bind(model.initial_phi(), cohort.x, cohort), prior, beta), mu


def summary(draws: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Per chain and client, averaged over draws: z and norm(z - mu)^2, ``[K, C, 26]``."""
    distance = (draws - mu).square().sum(-1, keepdim=True)
    return torch.cat((draws, distance), -1).mean(1).transpose(0, 1)


def test_two_adjusted_kernels_agree_on_a_softmax_head():
    target, mu = softmax_target()
    hmc = summary(sample(HMC(), target, chains=400, warmup=200, draws=200).draws, mu)
    mala = summary(sample(MALA(), target, chains=400, warmup=600, draws=1000).draws, mu)
    error = (hmc.var(0) + mala.var(0)).div(400).sqrt()
    assert ((hmc.mean(0) - mala.mean(0)).abs() < SIGMAS * error).all()
    # Without data it is the prior: mean mu, and norm(z - mu)^2 has mean 25.
    truth = torch.cat((mu, torch.tensor([25.0], dtype=DOUBLE)))
    assert_mean(hmc[:, 0], truth, "HMC without data")
    assert_mean(mala[:, 0], truth, "MALA without data")
    assert (error[:, -1] < 0.007 * hmc.mean(0)[:, -1]).all()  # so five of them are 3.5 %


def test_adaptation_during_training_does_not_bias_the_chain():
    """The step goes on adapting, round after round of ten transitions, as it does in training."""
    target, mu = softmax_target()
    frozen = summary(sample(HMC(), target, chains=400, warmup=200, draws=200).draws, mu)
    # Each replicate needs a step of its own: one chain per client, 150 copies of the three clients.
    copies = 150
    local = target.likelihood
    many = type(local)(
        local.features.repeat(copies, 1, 1),
        local.y.repeat(copies, 1, 1),
        local.mask.repeat(copies, 1),
        local.likelihood,
        local.params,
    )
    wide, ids = Target(many, target.prior, target.beta), torch.arange(3 * copies)
    z, tuning = warmed(HMC(), wide, ids, 1, 200)
    draws = []
    for k in range(100):
        trace = run(HMC(), wide, z, tuning, 10, Key(5, k, "adapting"), ids, adapt=True)
        z, tuning = trace.state.z, trace.tuning
        draws.append(trace.draws)
    seen = torch.cat(draws, 1)[:, :, 0].reshape(copies, 3, -1, 25)
    adapting = torch.cat((seen, (seen - mu).square().sum(-1, keepdim=True)), -1).mean(2)
    error = (adapting.var(0) / copies + frozen.var(0) / 400).sqrt()
    gap = adapting.mean(0) - frozen.mean(0)
    print(f"\nnorm(z - mu)^2, adapting over frozen: {(gap / frozen.mean(0))[:, -1].tolist()}")
    assert (gap.abs() < SIGMAS * error).all()


def test_a_mass_that_adapts_during_training_does_not_bias_the_chain():
    """Step and mass go on adapting, for a head through vmap; against quadrature."""
    case, copies = make_case("bernoulli", "isotropic", features=1, head="curved"), 300
    cohort = cohort_of(case.model, case.clients * copies)
    local = case.model.bind(case.model.initial_phi(), cohort.x, cohort)
    target = Target(local, case.prior, case.beta)
    z, tuning = warmed(HMC(), target, cohort.units, 1, 200)
    draws = []
    for k in range(100):
        trace = run(HMC(), target, z, tuning, 10, Key(5, k, "adapting"), cohort.units, adapt=True)
        z, tuning = trace.state.z, trace.tuning
        draws.append(trace.draws[:, :, 0])
    assert tuning.mass is not None
    seen = torch.cat(draws, 1).reshape(copies, 3, -1, 2)
    assert_mean(seen.mean(2), case.moments.mean, "mean")
    distance = (seen - case.mu).square().sum(-1).mean(2)
    assert_mean(distance, case.moments.distance, "mean of norm(z - mu)^2")
    # Five standard errors of the latter are below 2.5 % of it.
    assert (SIGMAS * distance.std(0) / copies**0.5 < 0.025 * case.moments.distance).all()


# --- the learned prior scale -----------------------------------------------------------------

CLIENTS, EXAMPLES = 100, 8


@cache
def logistic_population():
    """y ~ Bernoulli(sigmoid(x z)), z ~ N(mu, sigma^2); marginal likelihood by Gauss-Hermite quadrature."""
    z = 0.5 + gaussian_noise(1, CLIENTS, 1, 1)
    x = gaussian_noise(2, CLIENTS, EXAMPLES, 1)
    y = (uniform_noise(3, CLIENTS, EXAMPLES, 1) < (x * z).sigmoid()).to(DOUBLE)
    nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(60))
    log_weights = (weights / weights.sum()).log()

    def loss(theta):
        eta = x * (theta[0] + math.exp(theta[1]) * nodes)
        log_lik = (y * eta - nn.functional.softplus(eta)).sum(1)
        return -float(torch.logsumexp(log_lik + log_weights, 1).sum())

    model = fp.Composition(None, nn.Linear(1, 1, bias=False), "bernoulli")
    return model, list(zip(x.float(), y.float(), strict=True)), maximum(loss, 2)


@cache
def softmax_population():
    """Three classes and one feature. Only the two contrasts of z matter, and they are N(B mu, sigma^2 I)."""
    mu = torch.tensor([0.6, 0.0, -0.6], dtype=DOUBLE)
    z = mu + gaussian_noise(1, CLIENTS, 1, 3)
    x = gaussian_noise(2, CLIENTS, EXAMPLES, 1)
    chance = (x * z).softmax(-1).cumsum(-1)[..., :-1]
    y = (uniform_noise(3, CLIENTS, EXAMPLES, 1) > chance).sum(-1)
    contrasts = torch.tensor([[1, -1, 0], [1, 1, -2]], dtype=DOUBLE)
    contrasts = contrasts / contrasts.norm(dim=1, keepdim=True)
    nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(25))
    grid = torch.cartesian_prod(nodes, nodes)
    log_weights = torch.cartesian_prod(weights, weights).prod(1).log() - 2 * weights.sum().log()
    chosen = nn.functional.one_hot(y, 3).to(DOUBLE)

    def loss(theta):
        at = (torch.tensor(theta[:2]) + math.exp(theta[2]) * grid) @ contrasts
        log_p = (x.unsqueeze(2) * at).log_softmax(-1)
        log_lik = torch.einsum("bngk,bnk->bg", log_p, chosen)
        return -float(torch.logsumexp(log_lik + log_weights, 1).sum())

    model = fp.Composition(None, nn.Linear(1, 3, bias=False), "categorical")
    return model, list(zip(x.float(), y, strict=True)), maximum(loss, 3)


def maximum(loss, size: int) -> float:
    """The prior scale at the maximum of the marginal likelihood."""
    best = minimize(loss, [0.0] * size, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6})
    assert best.success
    return math.exp(best.x[-1])


@pytest.mark.parametrize("start", [0.2, 5.0], ids=lambda f: f"from-{f}-times")
@pytest.mark.parametrize("population", [logistic_population, softmax_population], ids=["logistic", "softmax"])
def test_the_learned_scale_is_that_of_the_maximum_likelihood(population, start):
    """Defaults only, from a start five times too small and five times too large."""
    model, clients, sd = population()
    fitted = fp.FedSOUL(model, prior=fp.priors.Normal(scale=start * sd)).fit(
        clients, rounds=400, progress=False
    )
    learned = float(fitted.published["beta"][-1].exp())
    print(f"\nmaximum likelihood {sd:.4f}, learned {learned:.4f} ({100 * (learned / sd - 1):+.2f} %)")
    assert learned == pytest.approx(sd, rel=0.03)
