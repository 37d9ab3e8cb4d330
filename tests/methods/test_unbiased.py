"""What the server receives is unbiased for the gradient of the marginal likelihood.

Oracle: autograd of the closed-form marginal likelihood of a conjugate model, in double precision, itself
checked against a multivariate Normal density. With ``Exponential(h=1)`` z is an exact draw from its
posterior, so nothing but the estimator is tested. Every estimate is read off the server: with plain steps of
rate r a round moves theta by r times its estimate of the gradient. Tolerance: five standard errors over
independent rounds, or exact where nothing is random.
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.evaluation.marginal import closed_form
from fedpop.federation.participation import Active, Participation, Roster
from fedpop.keys import Key
from fedpop.priors.normal import COVARIANCES
from fedpop.run.run import Run
from tests.helpers import by_name, cohort_of, run_of
from tests.oracles import DOUBLE, SIGMA, SIGMAS, assert_mean, gaussian_noise, normal_prior, z_scores

SIZES = (0, 1, 4, 6, 3)
B = len(SIZES)
RATE = 1e-4  # small enough that no projection is met
UNEQUAL = (0.9, 0.5, 0.3, 0.6, 0.4)
SCHEMES = {
    "everyone": fp.participation.Everyone(),
    "bernoulli-ratio": fp.participation.Bernoulli(0.5),
    "bernoulli-inverse": fp.participation.Bernoulli(0.5, weights="inverse"),
    "bernoulli-unequal": fp.participation.Bernoulli(UNEQUAL),
    "uniform": fp.participation.Uniform(2),
}


def problem(outputs=2, covariance="isotropic", likelihood=None):
    """A model with backbone, biased head and learned noise, a theta away from the optimum, and data."""
    generator = torch.Generator().manual_seed(0)
    backbone, head = nn.Linear(3, 2).double(), nn.Linear(2, outputs).double()
    for p in (*backbone.parameters(), *head.parameters()):
        nn.init.normal_(p, generator=generator)
    model = fp.Composition(backbone, head, likelihood or fp.likelihoods.Normal())
    d = model.z_layout.size
    prior, beta = normal_prior(covariance, 0.5 * gaussian_noise(1, d), SIGMA[covariance](d))
    clients = [
        (gaussian_noise(10 + i, n, 3), gaussian_noise(20 + i, n, outputs)) for i, n in enumerate(SIZES)
    ]
    return model, prior, beta, clients


def running(method: fp.FedSOUK, clients, beta, participation: Participation) -> Run:
    """A run whose server stands at beta and at the modules' own phi."""
    run = run_of(method, clients, 1000, participation)
    assert torch.equal(run.server["phi"], method.model.initial_phi())
    run.server = run.server | {"beta": beta}
    return run


CLOSED_FORM = fp.chains.Chain(rao_blackwell=True)


def plain(model, prior, form="auto", phi_batch=None, **settings):
    step = fp.steps.SGD(RATE)
    defaults = {
        "kernel": fp.kernels.Exponential(),
        "phi_step": fp.steps.PhiStep(step, batch=phi_batch),
        "beta_step": fp.steps.BetaStep(step, form),
        "start": "random",
        "anneal": fp.steps.Anneal(rounds=0),
    }
    return fp.FedSOUK(model, prior=prior, **(defaults | settings))


def estimate(run: Run, k: int) -> torch.Tensor:
    """(gradient in phi, gradient in beta) as round k of the server sees it."""
    server, run.round = dict(run.server), k
    run.train_round()
    moved = torch.cat([run.server[name] - server[name] for name in ("phi", "beta")]) / RATE
    run.server = server
    return moved


def exact_gradient(model, prior, beta, clients) -> torch.Tensor:
    """The gradient of sum_i log p(D_i | theta), and the closed form checked on the way."""
    cohort = cohort_of(model, clients)
    phi, free = model.initial_phi().requires_grad_(), beta.clone().requires_grad_()
    target = fp.FedSOUK(model, prior=prior).hierarchy.target(phi, free, model.features(phi, cohort), cohort)
    value = closed_form(target)
    torch.testing.assert_close(value, marginal(model, prior, phi, free, clients))
    return torch.cat(torch.autograd.grad(value.sum(), (phi, free)))


def marginal(model, prior, phi, beta, clients):
    """log N(y; F mu, F Sigma F' + s2 I), with outputs stacked."""
    views = model.phi_layout.views(phi)
    out = []
    for x, y in clients:
        if len(y) == 0:
            out.append(torch.zeros((), dtype=DOUBLE))
            continue
        features = x @ views["backbone.weight"].mT + views["backbone.bias"]
        rows = torch.cat((features, torch.ones_like(features[:, :1])), 1)
        design = torch.block_diag(*[rows] * y.shape[1])
        noise = views["likelihood.log_variance"].exp() * torch.eye(y.numel(), dtype=DOUBLE)
        cov = design @ prior.sigma(beta) @ design.mT + noise
        out.append(MultivariateNormal(design @ prior.mu(beta), cov).log_prob(y.mT.reshape(-1)))
    return torch.stack(out)


# --- without any randomness ------------------------------------------------------------------


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("outputs", [1, 2])
def test_rao_blackwell_is_the_gradient_itself(covariance, outputs):
    model, prior, beta, clients = problem(outputs, covariance)
    run = running(plain(model, prior, chain=CLOSED_FORM), clients, beta, fp.participation.Everyone())
    exact = exact_gradient(model, prior, beta, clients)
    # theta moves by 1e-4 of the gradient, so differences keep 1e-16 / 1e-4 of theta's size.
    torch.testing.assert_close(estimate(run, 0), exact, rtol=1e-9, atol=1e-9)


class Fixed(Participation):
    """The clients that another rule would draw in the first round in which it draws this set."""

    def __init__(self, rule: Participation, chosen: tuple[int, ...]) -> None:
        self.rule, self.chosen = rule, chosen

    def describe(self) -> dict[str, Any]:
        return {"kind": "Fixed", "rule": self.rule.describe(), "chosen": list(self.chosen)}

    def draw(self, roster: Roster, key: Key) -> Active:
        for k in range(100_000):
            active = self.rule.draw(roster, Key(1, k, "search"))
            if tuple(active.ids.tolist()) == self.chosen:
                return active
        raise AssertionError(f"{self.rule} never draws {self.chosen}")


def probability(scheme: Participation, chosen: tuple[int, ...]) -> float:
    """That exactly these clients are active."""
    if isinstance(scheme, fp.participation.Everyone):
        return float(len(chosen) == B)
    if isinstance(scheme, fp.participation.Uniform):
        sets = len(list(combinations(range(B), scheme.size)))
        return 1 / sets if len(chosen) == scheme.size else 0.0
    p = scheme.p if isinstance(scheme.p, tuple) else (scheme.p,) * B
    return float(torch.tensor([p[i] if i in chosen else 1 - p[i] for i in range(B)], dtype=DOUBLE).prod())


def expectation(scheme: Participation, weights: Participation) -> torch.Tensor:
    """Over all sets of active clients, each with its probability: no sampling anywhere."""
    model, prior, beta, clients = problem()
    method = plain(model, prior, chain=CLOSED_FORM)
    sets = [chosen for size in range(1, B + 1) for chosen in combinations(range(B), size)]
    chances = [probability(scheme, chosen) for chosen in sets]
    drawn = [(p, chosen) for p, chosen in zip(chances, sets, strict=True) if p > 0]
    each = [p * estimate(running(method, clients, beta, Fixed(weights, chosen)), 0) for p, chosen in drawn]
    total = torch.stack(each).sum(0)
    # b/|A| weights are unbiased given a round that is not empty.
    return total / sum(chances) if weights.draw(Roster.numbered(B), Key(0)).ratio else total


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_exactly_unbiased(name):
    exact = exact_gradient(*problem())
    torch.testing.assert_close(expectation(SCHEMES[name], SCHEMES[name]), exact, rtol=1e-6, atol=1e-6)


def test_equal_weights_for_unequal_clients_are_not():
    """What the library refuses: b/|A| when clients join with different probabilities."""
    wrong = expectation(SCHEMES["bernoulli-unequal"], SCHEMES["bernoulli-ratio"])
    exact = exact_gradient(*problem())
    assert (wrong - exact).norm() > 0.1 * exact.norm()
    with pytest.raises(SettingsError, match="biased"):
        fp.participation.Bernoulli(UNEQUAL, weights="ratio")


@pytest.mark.parametrize("name", SCHEMES)
def test_clients_join_as_often_as_promised(name):
    scheme, rounds = SCHEMES[name], 1500
    joined = torch.zeros(rounds, B, dtype=DOUBLE)
    for k in range(rounds):
        joined[k, scheme.draw(Roster.numbered(B), Key(0, k)).ids] = 1
    p = {"everyone": [1.0] * B, "uniform": [2 / B] * B}.get(name, getattr(scheme, "p", None))
    p = torch.as_tensor(p, dtype=DOUBLE).expand(B)
    assert_mean(joined, p, "share of rounds")
    pairs = joined.unsqueeze(2) * joined.unsqueeze(1)
    together = p.unsqueeze(1) * p
    if name == "uniform":
        together = torch.full((B, B), 2 / B * 1 / (B - 1), dtype=DOUBLE)
    together = torch.where(torch.eye(B, dtype=torch.bool), torch.diag(p), together)
    assert_mean(pairs, together, "share of rounds together")


# --- with exact draws ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["left", "right", "mixed"])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_sums_are_unbiased_with_everyone(covariance, form):
    model, prior, beta, clients = problem(2, covariance)
    method = plain(model, prior, form=form, local_steps=2, chain=fp.chains.Chain(chains=120))
    run = running(method, clients, beta, fp.participation.Everyone())
    seen = torch.stack([estimate(run, k) for k in range(60)])
    exact = exact_gradient(model, prior, beta, clients)
    assert_mean(seen, exact, form)
    # Sharp enough to see an error of a tenth in the gradient's larger entries.
    assert z_scores(seen, 1.1 * exact).abs().max() > 7


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("bernoulli-ratio", "left"),
        ("bernoulli-inverse", "right"),
        ("bernoulli-unequal", "left"),
        ("uniform", "right"),
    ],
)
def test_sums_are_unbiased_under_partial_participation(name, form):
    model, prior, beta, clients = problem()
    method = plain(model, prior, form=form, chain=fp.chains.Chain(chains=20), local_steps=1)
    run = running(method, clients, beta, SCHEMES[name])
    seen = torch.stack([estimate(run, k) for k in range(300)])
    if name == "bernoulli-ratio":  # an empty round makes no step, and nothing is claimed about it
        empty = (seen == 0).all(1)
        assert 1 <= empty.sum() <= 25  # 300 / 2^5 = 9.4 expected, five standard deviations are 15
        seen = seen[~empty]
    assert_mean(seen, exact_gradient(model, prior, beta, clients), name)


COMPRESSORS = {
    "qsgd": fp.compressors.QSGD(levels=2),
    "rand-k": fp.compressors.RandK(k=3),
    "natural": fp.compressors.Natural(),
    "one each": by_name(
        ("identity", "qsgd", fp.compressors.RandK(k=2), "natural", fp.compressors.QSGD(levels=1))
    ),
}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("qsgd", "everyone"),
        ("rand-k", "everyone"),
        ("natural", "everyone"),
        ("qsgd", "bernoulli-unequal"),
        ("rand-k", "uniform"),
        ("one each", "bernoulli-inverse"),
    ],
)
def test_sums_are_unbiased_with_compression_and_participation(name, scheme):
    """With closed-form J nothing but the clients that join and the compressor's draws is random."""
    model, prior, beta, clients = problem()
    method = plain(model, prior, chain=CLOSED_FORM, compressor=COMPRESSORS[name])
    run = running(method, clients, beta, SCHEMES[scheme])
    seen = torch.stack([estimate(run, k) for k in range(120)])
    exact = exact_gradient(model, prior, beta, clients)
    assert_mean(seen, exact, name)
    size = model.phi_layout.size
    assert seen[:, :size].std(0).min() > 0
    if scheme == "everyone":
        assert z_scores(seen[:, :size], 1.5 * exact[:size]).abs().max() > 7
        # I is sent as it is.
        torch.testing.assert_close(seen[0, size:], exact[size:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 3])
def test_mini_batches_of_j_are_unbiased(batch):
    model, prior, beta, clients = problem()
    method = plain(model, prior, phi_batch=batch, chain=fp.chains.Chain(chains=20))
    run = running(method, clients, beta, fp.participation.Everyone())
    seen = torch.stack([estimate(run, k) for k in range(120)])
    exact = exact_gradient(model, prior, beta, clients)
    assert_mean(seen, exact, "J")
    assert z_scores(seen, 0.8 * exact).abs().max() > 7  # the factor n / batch matters


# --- the hyperprior --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bernoulli-ratio", "bernoulli-inverse"])
def test_the_hyperprior_enters_once_and_in_empty_rounds_as_the_paper_says(name):
    model, prior, beta, clients = problem()
    hyper = fp.priors.Hyperprior(phi_scale=2.0, mean_scale=0.7, log_scale=(0.3, 0.5))
    phi, d = model.initial_phi(), prior.dimension(beta)
    free_phi, free = phi.clone().requires_grad_(), beta.clone().requires_grad_()
    log_p = -free_phi.square().sum() / 8 - free[:d].square().sum() / 2 / 0.49
    log_p = log_p - (free[d:] - 0.3).square().sum() / 2 / 0.25
    grad = torch.cat(torch.autograd.grad(log_p, (free_phi, free)))

    class Nobody(Participation):
        def draw(self, roster: Roster, key: Key) -> Active:
            return Active(torch.arange(0), torch.ones(0), ratio=name == "bernoulli-ratio")

    empty = estimate(running(plain(model, prior, hyperprior=hyper), clients, beta, Nobody()), 0)
    wanted = torch.zeros_like(grad) if name == "bernoulli-ratio" else grad
    torch.testing.assert_close(empty, wanted, rtol=1e-9, atol=1e-9)
    method = plain(model, prior, hyperprior=hyper, chain=CLOSED_FORM)
    run = running(method, clients, beta, fp.participation.Everyone())
    torch.testing.assert_close(
        estimate(run, 0), grad + exact_gradient(model, prior, beta, clients), rtol=1e-9, atol=1e-9
    )


# --- with chains -----------------------------------------------------------------------------


def logistic():
    """One scalar random effect and a scalar phi: y ~ Bernoulli(sigmoid(phi x z))."""
    backbone, head = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(backbone.weight, 1.5)
    model = fp.Composition(backbone, head, "bernoulli")
    clients = []
    for i in range(4):
        x = gaussian_noise(30 + i, 6, 1)
        clients.append((x, (x * (2.0 - i) + gaussian_noise(40 + i, 6, 1) > 0).double()))
    prior, beta = normal_prior("isotropic", torch.tensor([0.5]).double(), torch.eye(1).double())
    z = torch.linspace(-12, 12, 4001, dtype=DOUBLE)
    phi, free = model.initial_phi().requires_grad_(), beta.clone().requires_grad_()
    total = 0.0
    for x, y in clients:
        eta = phi * x * z
        log_lik = (y * eta - nn.functional.softplus(eta)).sum(0)
        log_prior = torch.distributions.Normal(free[0], free[1].exp()).log_prob(z)
        total = total + torch.logsumexp(log_lik + log_prior, 0)
    return model, prior, beta, clients, torch.cat(torch.autograd.grad(total, (phi, free)))


@pytest.mark.parametrize(
    ("kernel", "form"),
    [
        (fp.kernels.HMC(), "left"),
        pytest.param(fp.kernels.HMC(), "right", marks=pytest.mark.slow),
        (fp.kernels.ULA(0.2), "right"),
    ],
    ids=repr,
)
def test_bias_of_stateless_chains_falls_with_m(kernel, form):
    """Started from the prior, a chain's mean is off by about C/M, plus the kernel's own bias."""
    model, prior, beta, clients, exact = logistic()
    bias, error = [], []
    for m in (1, 4, 16):
        stateless = fp.chains.Chain(chains=100, stateful=False, follow=False)
        settings = {"kernel": kernel, "form": form, "chain": stateless, "local_steps": m}
        run = running(plain(model, prior, **settings), clients, beta, fp.participation.Everyone())
        seen = torch.stack([estimate(run, k) for k in range(50)])
        bias.append(float((seen.mean(0) - exact).norm()))
        error.append(float((seen.std(0) / 50**0.5).norm()))
    size = ", ".join(f"{100 * v / float(exact.norm()):.1f}" for v in bias)
    print(f"\n{kernel!r}, {form}: bias at M = 1, 4, 16 in % of the gradient: {size}")
    assert bias[0] - bias[1] > SIGMAS * (error[0] + error[1])
    assert bias[1] - bias[2] > SIGMAS * (error[1] + error[2])


def test_stateful_chains_have_no_bias_once_they_have_mixed():
    model, prior, beta, clients, exact = logistic()
    settings = {
        "kernel": fp.kernels.HMC(),
        "local_steps": 4,
        "chain": fp.chains.Chain(chains=200),
        "form": "right",
    }
    run = running(plain(model, prior, **settings), clients, beta, fp.participation.Everyone())
    seen = torch.stack([estimate(run, k) for k in range(210)])[10:]
    blocks = seen.reshape(50, 4, -1).mean(1)  # 16 transitions: far beyond the correlation of HMC here
    assert_mean(blocks, exact, "gradient")
