"""The Normal prior against torch.distributions, autograd and exact EM.

Density, score and gradient are compared exactly (double precision); moments of samples within five
standard errors.
"""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.evaluation.marginal import closed_form
from fedpop.kernels.target import Target
from fedpop.keys import Key
from fedpop.priors import resolve
from fedpop.priors.base import Guess
from fedpop.priors.normal import COVARIANCES
from tests.oracles import (
    DOUBLE,
    SIGMA,
    assert_mean,
    cohort_of,
    gaussian_cases,
    gaussian_noise,
    make_case,
    normal_prior,
)

covariances = pytest.mark.parametrize("covariance", COVARIANCES)
D = 3


def prior_of(covariance, d=D):
    mu, sigma = torch.linspace(0.5, -1, d, dtype=DOUBLE), SIGMA[covariance](d)
    return (*normal_prior(covariance, mu, sigma), mu, sigma)


@covariances
def test_parameters_go_into_beta_and_come_back(covariance):
    prior, beta, mu, sigma = prior_of(covariance)
    assert beta.shape == (prior.size(D),)
    assert prior.dimension(beta) == D
    torch.testing.assert_close(prior.mu(beta), mu)
    torch.testing.assert_close(prior.sigma(beta), sigma)
    torch.testing.assert_close(prior.sd(beta), sigma.diagonal().sqrt())
    torch.testing.assert_close(prior.precision(beta), torch.linalg.inv(sigma))
    started = prior.init(mu, 0.7)
    torch.testing.assert_close(prior.sigma(started), 0.49 * torch.eye(D, dtype=DOUBLE))
    for d in (1, 2, 7, 40):
        assert prior.dimension(prior.init(torch.zeros(d), 1.0)) == d


@covariances
def test_density_and_gradient(covariance):
    prior, beta, mu, sigma = prior_of(covariance)
    z = gaussian_noise(1, 4, 5, D).requires_grad_()
    exact = MultivariateNormal(mu, sigma).log_prob(z)
    value, grad = prior.value_and_grad(beta, z)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(grad, torch.autograd.grad(exact.sum(), z)[0])


@covariances
def test_whiten_and_colour(covariance):
    prior, beta, _, sigma = prior_of(covariance)
    v = gaussian_noise(2, 4, D)
    torch.testing.assert_close(prior.colour(beta, prior.whiten(beta, v)), v)
    twice = prior.colour(beta, prior.colour(beta, v, transpose=True))
    torch.testing.assert_close(twice, v @ sigma)


@covariances
def test_samples_have_the_right_moments(covariance):
    prior, beta, mu, sigma = prior_of(covariance)
    z = prior.sample(beta, Key(0, purpose="noise").normal(torch.arange(20_000), (D,), DOUBLE))
    centred = z - mu
    assert_mean(z, mu, "mean")
    assert_mean(centred.unsqueeze(-1) * centred.unsqueeze(-2), sigma, "covariance")


# --- the score and what the server makes of it -----------------------------------------------


def gradient_of_density(prior, beta, z):
    """d/dbeta of sum over clients of the mean over draws of log p(z | beta), by autograd."""
    free = beta.clone().requires_grad_()
    value = MultivariateNormal(prior.mu(free), prior.sigma(free)).log_prob(z).mean(1).sum()
    return torch.autograd.grad(value, free)[0]


@covariances
def test_left_score_is_the_gradient_of_the_density(covariance):
    prior, beta, *_ = prior_of(covariance)
    z = gaussian_noise(3, 4, 6, D)
    score = prior.score(beta, z, torch.full_like(z, math.nan), "left")  # it may not look at g
    torch.testing.assert_close(prior.gradient(beta, score.sum(0)), gradient_of_density(prior, beta, z))


@covariances
def test_right_score_is_the_other_form(covariance):
    """E[g] and E[u (L'g)'], with u = L^-1 (z - mu), written out."""
    prior, beta, mu, sigma = prior_of(covariance)
    z, g = gaussian_noise(3, 4, 6, D), gaussian_noise(4, 4, 6, D)
    score = prior.score(beta, z, g, "right")
    root = torch.linalg.cholesky(sigma)
    u = torch.linalg.solve(root, (z - mu).unsqueeze(-1)).squeeze(-1)
    outer = torch.einsum("csi,csj->cij", u, g @ root) / 6
    outer = 0.5 * (outer + outer.mT)
    if covariance == "isotropic":
        scale = outer.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    elif covariance == "diagonal":
        scale = outer.diagonal(dim1=-2, dim2=-1)
    else:
        rows, cols = torch.tril_indices(D, D)
        scale = outer[:, rows, cols]
    torch.testing.assert_close(score, torch.cat((g.mean(1), scale), 1))


@covariances
def test_a_client_without_data_has_no_noise_in_the_right_form(covariance):
    prior, beta, *_ = prior_of(covariance)
    z = gaussian_noise(3, 4, 6, D)
    assert (prior.score(beta, z, torch.zeros_like(z), "right") == 0).all()


@covariances
def test_all_forms_agree_in_expectation(covariance):
    """Over exact draws from conjugate posteriors; the moments give the expectation itself."""
    case = next(c for c in gaussian_cases() if c.prior.covariance == covariance)
    target, exact = case.target(), case.gaussian
    noise = gaussian_noise(5, 3, 200, 50, 2)
    z = exact.mean[:, None, None] + torch.einsum("cij,crsj->crsi", torch.linalg.cholesky(exact.cov), noise)
    flat = z.reshape(3, -1, 2)
    g = target.likelihood_grad(flat, target.value_and_grad(flat)[1]).reshape(z.shape)
    truth = case.prior.moments_score(case.beta, exact.mean, exact.cov)
    anything = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=DOUBLE).expand(3, 2, 2)
    for form, cov in (("left", None), ("right", None), ("mixed", exact.cov), ("mixed", anything)):
        slope = target.value_and_grad(flat)[1].reshape(z.shape)
        guesses = [
            None if cov is None else Guess(slope[:, r] @ cov, cov.diagonal(dim1=1, dim2=2), cov)
            for r in range(200)
        ]
        each = torch.stack(
            [case.prior.score(case.beta, z[:, r], g[:, r], form, guess) for r, guess in enumerate(guesses)]
        )
        assert_mean(each, truth, form)
        # Mixed by the posterior's own covariance, I_mu has no noise at all.
        exact_mean = cov is exact.cov
        assert bool((each[:, :, :2].std(0) < 1e-9).all()) is exact_mean


@covariances
def test_moments_score_is_the_expected_gradient(covariance):
    """E[log p(z | beta)] under N(m, C) is the log-density at m less tr(Sigma^-1 C) / 2."""
    prior, beta, *_ = prior_of(covariance)
    mean, root = gaussian_noise(6, 2, D), gaussian_noise(7, 2, D, D)
    cov = root @ root.mT
    free = beta.clone().requires_grad_()
    density = MultivariateNormal(prior.mu(free), prior.sigma(free))
    spread = torch.einsum("ij,cji->", torch.linalg.inv(prior.sigma(free)), cov)
    (exact,) = torch.autograd.grad(density.log_prob(mean).sum() - 0.5 * spread, free)
    score = prior.moments_score(beta, mean, cov).sum(0)
    torch.testing.assert_close(prior.gradient(beta, score), exact)


@covariances
def test_what_is_fixed_stays(covariance):
    for mean, scale in ((True, False), (False, True)):
        prior, beta, *_ = prior_of(covariance)
        prior = fp.priors.Normal(covariance, learn_mean=mean, learn_scale=scale)
        score = gaussian_noise(8, prior.size(D))
        for change in (prior.gradient(beta, score), prior.em_step(beta, 0.1 * score, 0.5) - beta):
            assert bool((change[:D] == 0).all()) is not mean
            assert bool((change[D:] == 0).all()) is not scale


# --- EM --------------------------------------------------------------------------------------


def exact_em(covariance, mean, cov):
    """The M-step from posterior moments: the pooled mean and second moment."""
    mu = mean.mean(0)
    centred = mean - mu
    second = (cov + centred.unsqueeze(-1) * centred.unsqueeze(-2)).mean(0)
    if covariance == "isotropic":
        return mu, second.diagonal().mean() * torch.eye(len(mu), dtype=DOUBLE)
    return mu, torch.diag(second.diagonal()) if covariance == "diagonal" else second


@covariances
def test_em_step_at_rate_one_is_em(covariance):
    prior, beta, *_ = prior_of(covariance)
    mean, root = gaussian_noise(6, 5, D), 0.5 * gaussian_noise(7, 5, D, D)
    cov = root @ root.mT
    new = prior.em_step(beta, prior.moments_score(beta, mean, cov).mean(0), 1.0)
    mu, sigma = exact_em(covariance, mean, cov)
    torch.testing.assert_close(prior.mu(new), mu)
    torch.testing.assert_close(prior.sigma(new), sigma)


@covariances
def test_em_step_mixes_sufficient_statistics(covariance):
    """Rate r averages E[z] and E[zz'] under the prior (1 - r) and under the posteriors (r)."""
    prior, beta, mu, sigma = prior_of(covariance)
    mean, root = gaussian_noise(6, 5, D), 0.5 * gaussian_noise(7, 5, D, D)
    cov = root @ root.mT
    new = prior.em_step(beta, prior.moments_score(beta, mean, cov).mean(0), 0.3)
    to_mu, to_sigma = exact_em("full", mean, cov)
    first = 0.7 * mu + 0.3 * to_mu
    second = 0.7 * (sigma + torch.outer(mu, mu)) + 0.3 * (to_sigma + torch.outer(to_mu, to_mu))
    _, wanted = exact_em(covariance, first.unsqueeze(0), (second - torch.outer(first, first)).unsqueeze(0))
    torch.testing.assert_close(prior.mu(new), first)
    torch.testing.assert_close(prior.sigma(new), wanted)


@covariances
def test_em_never_lowers_the_likelihood_and_ends_at_its_maximum(covariance):
    case = make_case("normal", covariance)
    x, z = gaussian_noise(20, 30, 10, 2), 2 * gaussian_noise(21, 30, 2, 1)
    clients = list(zip(x, x @ z + gaussian_noise(22, 30, 10, 1), strict=True))
    cohort = cohort_of(case.model, clients)
    local = case.model.bind(case.model.initial_phi(), cohort.x, cohort)
    beta, path = case.prior.init(torch.full((2,), 3.0, dtype=DOUBLE), 0.2), []
    for _ in range(100):
        target = Target(local, case.prior, beta)
        path.append(closed_form(target).sum())
        beta = case.prior.em_step(beta, case.prior.moments_score(beta, *target.moments()).mean(0), 1.0)
    steps = torch.stack(path).diff()
    assert (steps > -1e-9 * path[0].abs()).all()
    assert steps[:3].min() > 1
    free = beta.clone().requires_grad_()
    (grad,) = torch.autograd.grad(closed_form(Target(local, case.prior, free)).sum(), free)
    assert grad.abs().max() < 1e-6


@covariances
def test_a_noisy_em_step_stays_positive(covariance):
    prior, beta, *_ = prior_of(covariance)
    score = torch.zeros(prior.size(D), dtype=DOUBLE)
    score[D:] = -1e3
    new = prior.em_step(beta, score, 1.0)
    assert torch.isfinite(new).all()
    assert torch.linalg.eigvalsh(prior.sigma(new)).min() > 0


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal"])
def test_the_floor_keeps_the_mean_moving(covariance):
    prior = fp.priors.Normal(covariance, learn_scale=False)
    beta = prior.init(torch.zeros(D, dtype=DOUBLE), 1e-3)
    score = torch.cat((torch.ones(D), torch.zeros(prior.scale_size(D)))).double()
    torch.testing.assert_close(prior.mu(prior.em_step(beta, score, 0.5)), torch.full((D,), 5e-7).double())
    floored = prior.em_step(beta, score, 0.5, floor=0.01)
    torch.testing.assert_close(prior.mu(floored), torch.full((D,), 5e-3).double())


# --- projection ------------------------------------------------------------------------------


@covariances
def test_projection_leaves_the_inside_alone(covariance):
    prior, beta, *_ = prior_of(covariance)
    assert torch.equal(prior.project(beta), beta)
    assert prior.at_bound(beta) == []


@covariances
def test_projection_on_bounds_and_ball(covariance):
    prior = fp.priors.Normal(covariance, bounds=(0.5, 2.0), ball=1.0)
    mu = torch.tensor([3.0, 0.0, 4.0], dtype=DOUBLE)
    for scale, bound, name in ((0.01, 0.5, "lower"), (50.0, 2.0, "upper")):
        new = prior.project(prior.init(mu, scale))
        torch.testing.assert_close(prior.mu(new), mu / 5)
        torch.testing.assert_close(prior.sigma(new), bound**2 * torch.eye(D, dtype=DOUBLE))
        said = " ".join(prior.at_bound(new))
        assert name in said
        assert "ball" in said


@pytest.mark.parametrize("far", [30.0, 300.0, 1e4])
def test_projection_of_what_would_overflow(far: float) -> None:
    """As draws of theta can be where a scale is hardly known."""
    prior = fp.priors.Normal("full", bounds=(1e-3, 1e3), ball=10.0)
    for seed in range(20):
        beta = far * torch.randn(prior.size(3), generator=torch.Generator().manual_seed(seed))
        inside = torch.linalg.svdvals(prior.factor(prior.project(beta).double()))
        assert bool(torch.isfinite(inside).all())
        assert 0.99e-3 < float(inside.min()) <= float(inside.max()) < 1.01e3


def test_projection_of_a_full_covariance_clips_its_spectrum():
    prior = fp.priors.Normal("full", bounds=(0.5, 2.0))
    values, vectors = torch.tensor([0.01, 1.0, 9.0]).double(), torch.linalg.qr(gaussian_noise(9, D, D))[0]
    sigma = vectors * values @ vectors.mT
    beta = prior.pack(torch.zeros(D, dtype=DOUBLE), torch.linalg.cholesky(sigma))
    wanted = vectors * values.clamp(0.25, 4.0) @ vectors.mT
    torch.testing.assert_close(prior.sigma(prior.project(beta)), wanted)
    assert len(prior.at_bound(prior.project(beta))) == 2


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"covariance": "round"},
        {"scale": -1.0},
        {"scale": 1e4, "bounds": (1e-3, 1e3)},
        {"bounds": (0.0, 1.0)},
        {"bounds": (2.0, 1.0)},
        {"ball": 0.0},
        {"mean": math.nan},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SettingsError):
        fp.priors.Normal(**settings)


def test_names():
    assert resolve("normal") == fp.priors.Normal()
    assert resolve("full").covariance == "full"
    with pytest.raises(SettingsError, match="known are"):
        resolve("cauchy")
    prior, beta, *_ = prior_of("isotropic")
    with pytest.raises(SettingsError, match="form"):
        prior.score(beta, torch.zeros(1, 1, D), torch.zeros(1, 1, D), "middle")
