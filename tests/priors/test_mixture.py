"""A mixture of Normals against torch.distributions, autograd, exact EM and its own limits.

Density, score and gradient are compared exactly (double precision); moments of samples within five standard
errors. One component is the Normal prior.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.evaluation.marginal import closed_form
from fedpop.kernels.target import Target
from fedpop.keys import Key
from fedpop.server.averaging import aligner
from tests.helpers import generator
from tests.oracles import DOUBLE, assert_mean, cohort_of, gaussian_noise, make_case
from tests.priors.mixtures import WEIGHTS, D, K, covariances, mixture_of

# --- density, draws, summaries ---------------------------------------------------------------


@covariances
def test_density_and_gradient(covariance):
    prior, beta, law = mixture_of(covariance)
    assert beta.shape == (prior.size(D),)
    assert prior.dimension(beta) == D
    z = (2 * gaussian_noise(1, 4, 5, D)).requires_grad_()
    exact = law.log_prob(z)
    value, grad = prior.value_and_grad(beta, z)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(grad, torch.autograd.grad(exact.sum(), z)[0])
    torch.testing.assert_close(prior.mu(beta), law.mean)
    cov = law.component_distribution.covariance_matrix.diagonal(dim1=-2, dim2=-1)
    spread = (law.component_distribution.mean - law.mean).square()
    torch.testing.assert_close(prior.sd(beta), (WEIGHTS @ (cov + spread)).sqrt())


@covariances
def test_draws_have_the_right_law(covariance):
    prior, beta, law = mixture_of(covariance)
    z = prior.draw(beta, torch.arange(20_000), Key(0, purpose="draw"), 2)[:, 1]
    assert_mean(z, law.mean, "mean")
    shares = prior.responsibilities(beta, z).mT
    # E[r_k] = w_k, and E[r_k z] = w_k mu_k: draws come from the right components in the right shares.
    assert_mean(shares, WEIGHTS, "weights")
    means = law.component_distribution.mean
    assert_mean(shares.unsqueeze(-1) * z.unsqueeze(1), WEIGHTS.unsqueeze(1) * means, "first moments")
    assert_mean(z.square(), law.mean.square() + prior.sd(beta).square(), "second moments")


@covariances
def test_precision_bounds_the_curvature_everywhere(covariance):
    prior, beta, law = mixture_of(covariance)
    bound = prior.precision(beta)
    for z in 3 * gaussian_noise(3, 60, D):
        curvature = -torch.autograd.functional.hessian(law.log_prob, z)
        assert torch.linalg.eigvalsh(bound - curvature).min() > -1e-9


# --- what a client sends, and what the server makes of it ------------------------------------


@covariances
def test_the_score_is_the_gradient(covariance):
    prior, beta, _ = mixture_of(covariance)
    z = 2 * gaussian_noise(4, 3, 6, D)
    free = beta.clone().requires_grad_()
    score = prior.score(beta, z, z, "left")
    assert score.shape == (3, prior.size(D))
    for i in range(3):
        (exact,) = torch.autograd.grad(prior.log_prob(free, z[i]).mean(), free)
        torch.testing.assert_close(prior.gradient(beta, score[i]), exact)


def posterior_problem(covariance, k=2, clients=45, n=12):
    """Clients whose z come from two far clusters, in a conjugate model with two features."""
    case = make_case("normal", covariance)
    centre = torch.where(torch.arange(clients) % 3 == 0, -2.0, 2.0).double()
    z = (centre.unsqueeze(1) + 0.8 * gaussian_noise(21, clients, 2)).unsqueeze(-1)
    x = gaussian_noise(20, clients, n, 2)
    data = list(zip(x, x @ z + gaussian_noise(22, clients, n, 1), strict=True))
    cohort = cohort_of(case.model, data)
    local = case.model.bind(case.model.initial_phi(), cohort.x, cohort)
    prior = fp.priors.Mixture(k, covariance)
    return prior, prior.init(torch.zeros(2, dtype=DOUBLE), 1.5, Key(1)), local, data


@covariances
def test_the_marginal_is_a_mixture_of_multivariate_normals(covariance):
    prior, beta, local, data = posterior_problem(covariance)
    exact = []
    for x, y in data:
        terms = [
            p.log_weight
            + MultivariateNormal(
                x @ p.normal.mu(p.beta), x @ p.normal.sigma(p.beta) @ x.mT + torch.eye(len(x), dtype=DOUBLE)
            ).log_prob(y[:, 0])
            for p in prior.parts(beta)
        ]
        exact.append(torch.stack(terms).logsumexp(0))
    torch.testing.assert_close(closed_form(Target(local, prior, beta)), torch.stack(exact))


@covariances
def test_the_expected_score_is_the_gradient_of_the_marginal(covariance):
    prior, beta, local, _ = posterior_problem(covariance)
    free = beta.clone().requires_grad_()
    (exact,) = torch.autograd.grad(closed_form(Target(local, prior, free)).sum(), free)
    score = prior.expected_score(beta, *Target(local, prior, beta).mixture()).sum(0)
    torch.testing.assert_close(prior.gradient(beta, score), exact)


@covariances
def test_em_never_lowers_the_likelihood_and_ends_at_a_maximum(covariance):
    prior, beta, local, _ = posterior_problem(covariance)
    path = []
    for _ in range(150):
        target = Target(local, prior, beta)
        path.append(closed_form(target).sum())
        score = prior.expected_score(beta, *target.mixture())
        beta = prior.project(prior.em_step(beta, score.mean(0), 1.0))
    assert (torch.stack(path).diff() > -1e-9 * path[0].abs()).all()
    assert path[-1] > path[0] + 20
    free = beta.clone().requires_grad_()
    (grad,) = torch.autograd.grad(closed_form(Target(local, prior, free)).sum(), free)
    assert grad.abs().max() < 1e-3
    # A third of the clients sits in the cluster at -2.
    smaller = prior.log_weights(beta).exp().min()
    assert abs(float(smaller) - 1 / 3) < 0.05


@covariances
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_em_step_mixes_sufficient_statistics(covariance, rate):
    """Sums of r_k, r_k z and r_k z z' under the prior (1 - rate) and over the draws (rate)."""
    prior, beta, law = mixture_of(covariance)
    z = 2 * gaussian_noise(6, 40, 5, D)
    new = prior.em_step(beta, prior.score(beta, z, z, "left").mean(0), rate)
    flat, r = z.reshape(-1, D), prior.responsibilities(beta, z.reshape(-1, D))
    means, covs = law.component_distribution.mean, law.component_distribution.covariance_matrix
    for k, part in enumerate(prior.parts(new)):
        outer = torch.einsum("s,si,sj->ij", r[k], flat, flat) / len(flat)
        weight = (1 - rate) * WEIGHTS[k] + rate * r[k].mean()
        first = (1 - rate) * WEIGHTS[k] * means[k] + rate * (r[k] @ flat) / len(flat)
        second = (1 - rate) * WEIGHTS[k] * (covs[k] + torch.outer(means[k], means[k])) + rate * outer
        mu = first / weight
        sigma = second / weight - torch.outer(mu, mu)
        if covariance == "isotropic":
            sigma = sigma.trace() / D * torch.eye(D, dtype=DOUBLE)
        elif covariance == "diagonal":
            sigma = torch.diag(sigma.diagonal())
        torch.testing.assert_close(part.log_weight.exp(), weight)
        torch.testing.assert_close(part.normal.mu(part.beta), mu)
        torch.testing.assert_close(part.normal.sigma(part.beta), sigma)


@covariances
def test_an_empty_component_stands_still_and_keeps_its_floor(covariance):
    prior, beta, _ = mixture_of(covariance)
    betas = prior.betas(beta)
    betas[1] = betas[1].clone()
    betas[1][:D] = 1e4  # nobody is near
    beta = prior.replaced(beta, betas)
    for _ in range(30):
        z = gaussian_noise(7, 10, 4, D)
        beta = prior.project(prior.em_step(beta, prior.score(beta, z, z, "left").mean(0), 1.0))
        assert torch.isfinite(beta).all()
    torch.testing.assert_close(prior.betas(beta)[1], betas[1])
    weights = prior.log_weights(beta).exp()
    torch.testing.assert_close(weights[1], torch.tensor(prior.floor, dtype=DOUBLE))
    torch.testing.assert_close(weights.sum(), torch.ones((), dtype=DOUBLE))
    assert "component 1 of the prior is empty" in prior.at_bound(beta)[0]


def test_projection_leaves_the_inside_alone_and_keeps_the_outside_in():
    prior, beta, _ = mixture_of("diagonal")
    torch.testing.assert_close(prior.project(beta), beta)
    assert prior.at_bound(beta) == []
    shifted = beta.clone()
    shifted[:K] += 5  # the same weights
    torch.testing.assert_close(prior.project(shifted), beta)
    tight = fp.priors.Mixture(K, "diagonal", bounds=(0.9, 1.1), ball=1.0, floor=0.25)
    inside = tight.project(beta)
    assert prior.log_weights(inside).exp().min() >= 0.25 - 1e-12
    assert all(0.9 - 1e-9 <= float(s) <= 1.1 + 1e-9 for b in prior.betas(inside) for s in b[D:].exp())
    assert "component 0" in " ".join(tight.at_bound(inside))


# --- labels and gauge ------------------------------------------------------------------------


@covariances
@pytest.mark.parametrize("order", [[1, 2, 0], [2, 1, 0], [0, 2, 1]], ids=str)
def test_labels_are_matched_and_the_density_is_the_same(covariance, order):
    prior, beta, law = mixture_of(covariance)
    betas = prior.betas(beta)
    turned = torch.cat((beta[order], *[betas[k] for k in order]))
    z = gaussian_noise(8, 5, D)
    torch.testing.assert_close(prior.log_prob(turned, z), law.log_prob(z))
    torch.testing.assert_close(prior.matched(turned, beta), beta)
    assert torch.equal(prior.matched(beta, beta), beta)


def test_components_around_one_point_are_told_apart_by_their_scale():
    prior = fp.priors.Mixture(2)
    narrow, wide = (torch.tensor([0.0, 0.0, math.log(s)], dtype=DOUBLE) for s in (0.2, 2.0))
    reference = torch.cat((torch.tensor([0.3, 0.7]).double().log(), narrow, wide))
    # The means have moved a little, the wrong way round for anything that looks at them alone.
    turned = torch.cat((torch.tensor([0.7, 0.3]).double().log(), wide - 1e-3, narrow + 1e-2))
    matched = prior.matched(turned, reference)
    torch.testing.assert_close(matched, reference, rtol=0.0, atol=2e-2)


@pytest.mark.parametrize("covariance", ["isotropic", "full"])
def test_alignment_turns_every_component_and_orders_them(covariance):
    model = fp.Composition(
        nn.Linear(4, 2, bias=False).double(), nn.Linear(2, 1, bias=False).double(), fp.likelihoods.Normal(0.3)
    )
    prior, beta, _ = mixture_of(covariance)
    method = fp.FedSOUL(model, prior=prior)
    phi = torch.randn(8, generator=generator(9), dtype=DOUBLE)
    angle = torch.tensor(0.7, dtype=DOUBLE)
    a = 1.6 * torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))
    if covariance == "full":
        a = a + torch.tensor([[0.2, 0.5], [0.0, -0.3]], dtype=DOUBLE)
    from fedpop.server.averaging import Gauge

    moved_phi, moved_beta = Gauge.of(model, prior).transform(phi, beta, a)
    betas, order = prior.betas(moved_beta), [2, 0, 1]
    moved_beta = torch.cat((moved_beta[order], *[betas[k] for k in order]))
    clients = [(gaussian_noise(50 + i, 3, 4), gaussian_noise(60 + i, 3, 1)) for i in range(4)]
    cohort = cohort_of(model, clients)

    def marginal(phi, beta):
        return closed_form(method.hierarchy.target(phi, beta, model.features(phi, cohort), cohort))

    torch.testing.assert_close(marginal(moved_phi, moved_beta), marginal(phi, beta))
    back = aligner(model, prior)(torch.cat((moved_phi, moved_beta)), torch.cat((phi, beta)))
    torch.testing.assert_close(back, torch.cat((phi, beta)))
