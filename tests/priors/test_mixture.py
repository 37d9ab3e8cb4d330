"""A mixture of Normals against torch.distributions, autograd, exact EM and its own limits.

Density, score and gradient are compared exactly (double precision); moments of samples within five standard
errors. One component is the Normal prior.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import fedpop as fp
from fedpop.algorithms import rebuild
from fedpop.algorithms.base import Facts
from fedpop.errors import EstimateError, SettingsError
from fedpop.evaluation.marginal import closed_form
from fedpop.evaluation.oracle import exact_optimum
from fedpop.kernels.target import Target
from fedpop.keys import Key
from fedpop.priors import resolve
from fedpop.priors.normal import COVARIANCES
from fedpop.server.gauge import aligner
from tests.helpers import generator
from tests.oracles import DOUBLE, assert_mean, cohort_of, gaussian_noise, make_case

covariances = pytest.mark.parametrize("covariance", COVARIANCES)
D, K = 2, 3
WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=DOUBLE)


def mixture_of(covariance, k=K, d=D):
    """A mixture, its beta and the same law in torch.distributions."""
    prior = fp.priors.Mixture(k, covariance)
    component = prior.component
    weights = WEIGHTS[:k] / WEIGHTS[:k].sum()
    betas = [0.4 * gaussian_noise(30 + i, component.size(d)) for i in range(k)]
    for i, own in enumerate(betas):
        own[:d] += 2 * gaussian_noise(40 + i, d)
    means = torch.stack([component.mu(b) for b in betas])
    covs = torch.stack([component.sigma(b) for b in betas])
    law = MixtureSameFamily(Categorical(weights), MultivariateNormal(means, covs))
    return prior, torch.cat((weights.log(), *betas)), law


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
    from fedpop.server.gauge import Gauge

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


# --- one component is the Normal prior -------------------------------------------------------


@covariances
def test_one_component_is_the_normal_prior(covariance):
    prior, normal = fp.priors.Mixture(1, covariance), fp.priors.Normal(covariance)
    mu = gaussian_noise(10, D)
    beta = prior.init(mu, 0.7, Key(4))
    torch.testing.assert_close(beta[1:], normal.init(mu, 0.7))
    beta = torch.cat((beta[:1], beta[1:] + 0.3 * gaussian_noise(11, normal.size(D))))
    own, z = beta[1:], gaussian_noise(12, 4, 5, D)
    for one, other in zip(prior.value_and_grad(beta, z), normal.value_and_grad(own, z), strict=True):
        torch.testing.assert_close(one, other)
    ids, key = torch.arange(3), Key(5)
    torch.testing.assert_close(prior.draw(beta, ids, key, 4), normal.draw(own, ids, key, 4))
    torch.testing.assert_close(prior.unit(beta), normal.unit(own))
    torch.testing.assert_close(prior.precision(beta), normal.precision(own))
    score, other = prior.score(beta, z, z, "left"), normal.score(own, z, z, "left")
    torch.testing.assert_close(score[:, 1:], other)
    torch.testing.assert_close(score[:, :1], torch.zeros(4, 1, dtype=DOUBLE))
    torch.testing.assert_close(prior.em_step(beta, score[0], 0.4)[1:], normal.em_step(own, other[0], 0.4))
    torch.testing.assert_close(prior.gradient(beta, score[0])[1:], normal.gradient(own, other[0]))


def clustered(b=24, n=5, seed=3):
    """Clients of y = x' phi z + noise, z around two points."""
    g = generator(seed)
    phi = torch.linalg.qr(torch.randn(4, 2, generator=g, dtype=DOUBLE))[0]
    centre = torch.tensor([[1.5, 1.0], [-1.5, 0.5]], dtype=DOUBLE)
    z = centre[torch.arange(b) % 2] + 0.3 * torch.randn(b, 2, generator=g, dtype=DOUBLE)
    x = torch.randn(b, n, 4, generator=g, dtype=DOUBLE)
    y = torch.einsum("bnk,kd,bd->bn", x, phi, z)
    y = y + 0.3 * torch.randn(b, n, generator=g, dtype=DOUBLE)
    return list(zip(x, y, strict=True))


def double_model(seed=0):
    backbone, head = nn.Linear(4, 2, bias=False).double(), nn.Linear(2, 1, bias=False).double()
    g = generator(seed)
    with torch.no_grad():
        backbone.weight.copy_(torch.randn(2, 4, generator=g, dtype=DOUBLE) / 2)
    return fp.Composition(backbone, head, fp.likelihoods.Normal(0.09))


def test_a_run_with_one_component_is_a_run_with_the_normal_prior():
    clients = clustered()
    runs = [
        fp.FedSOUL(double_model(), prior=prior, beta_step=fp.steps.BetaStep(form="left")).fit(
            clients, rounds=25, seed=1
        )
        for prior in (fp.priors.Normal(), fp.priors.Mixture(1))
    ]
    normal, mixture = (p.published for p in runs)
    torch.testing.assert_close(mixture["phi"], normal["phi"], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(mixture["beta"][1:], normal["beta"], rtol=1e-7, atol=1e-7)
    first, second = (p.posterior(0).mean for p in runs)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


# --- the federated run reaches the exact optimum ---------------------------------------------


def test_a_run_reaches_the_maximum_of_the_marginal():
    """Closed-form I and J, so nothing but the optimisation is tested; L-BFGS in double precision."""
    clients = clustered()
    step = fp.steps.Adam(0.1, fp.steps.Cosine(), beta1=0.7, beta2=0.9)
    method = fp.FedSOUL(
        double_model(),
        prior="mixture",
        chain=fp.chains.Chain(rao_blackwell=True),
        local_steps=1,
        phi_step=step,
        beta_step=fp.steps.EM(1.0, 1.0),
        average=fp.steps.Averaging("last"),
    )
    population = method.fit(clients, rounds=250, seed=0)
    best = exact_optimum(
        method, population.federation, [(population.published["phi"], population.published["beta"])]
    )
    reached = population.log_likelihood()
    assert reached.method == "closed form"
    assert best.log_likelihood - reached.value < 1e-4
    # And it is worth having: one Normal cannot say that there are two kinds of clients.
    single = method.replace(prior="normal", beta_step=None, average=fp.steps.Averaging())
    one = single.fit(clients, rounds=100, seed=0)
    assert reached.value > one.log_likelihood().value + 5


@pytest.mark.parametrize(
    ("step", "rounds"), [(fp.steps.EM(), 150), (fp.steps.Adam(0.1), 400)], ids=["em", "adam"]
)
def test_draws_and_either_step_come_close(step, rounds):
    """Over seeds both are within 0.3; after 150 rounds Adam is still up to 3 away."""
    clients = clustered()
    method = fp.FedSOUL(double_model(), prior="mixture", beta_step=step)
    population = method.fit(clients, rounds=rounds, seed=0)
    best = exact_optimum(
        method, population.federation, [(population.published["phi"], population.published["beta"])]
    )
    assert best.log_likelihood - population.log_likelihood().value < 1.0


def test_averages_match_labels_first():
    """A reference with the labels the other way round gives the same published density."""
    clients = clustered()
    method = fp.FedSOUL(double_model(), prior="mixture")
    theta = torch.cat((method.model.initial_phi(), mixture_of("isotropic", 2)[1]))
    prior = method.hierarchy.prior
    align, betas = aligner(method.model, prior), prior.betas(theta[8:])
    turned = torch.cat((theta[:8], theta[[9, 8]], betas[1], betas[0]))
    state = method.average.init(theta)
    for k, one in enumerate((theta, turned, theta, turned)):
        state = method.average.update(state, one, 1.0, 12 + k, 16, align)
    torch.testing.assert_close(method.average.value(state, theta), theta)
    assert len(clients) == 24


# --- the front door --------------------------------------------------------------------------


def test_the_front_door(tmp_path):
    clients = clustered()
    population = fp.FedSOUL(double_model(), prior="mixture").fit(clients, rounds=60, seed=2)
    text = str(population)
    assert "Mixture of 2 Normals, isotropic" in text
    assert text.count("weight 0.") == 2
    x = clients[0][0]
    prior_only, few = population.new_client().predict(x), population.new_client(*clients[0]).predict(x)
    assert few.log_prob(clients[0][1]).mean() > prior_only.log_prob(clients[0][1]).mean()
    population.save(tmp_path / "saved")
    again = fp.load(tmp_path / "saved", clients=clients)
    assert again.algorithm.prior == population.algorithm.prior
    torch.testing.assert_close(again.predict(3, x).mean, population.predict(3, x).mean)
    assert again.log_likelihood().value == population.log_likelihood().value
    with pytest.raises(EstimateError, match="theta_uncertainty is there for Normal priors"):
        population.predict(0, x, theta_uncertainty=True)


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    clients = clustered()
    method = fp.FedSOUL(double_model(), prior=fp.priors.Mixture(2, "diagonal"), kernel=fp.kernels.JumpHMC())
    whole = method.fit(clients, rounds=8, seed=4, participation=10)

    class Stop(fp.callbacks.Callback):
        def after_round(self, run, metrics):
            if run.round == 5:
                raise ZeroDivisionError
            return False

    with pytest.raises(ZeroDivisionError):
        method.fit(
            clients, rounds=8, seed=4, participation=10, out=tmp_path, checkpoint_every=2, callbacks=[Stop()]
        )
    resumed = method.fit(
        clients, rounds=8, seed=4, participation=10, out=tmp_path, checkpoint_every=2, resume=True
    )
    for name, tensor in whole.published.items():
        assert torch.equal(resumed.published[name], tensor), name


def test_cohorts_do_not_matter():
    clients, method = clustered(), fp.FedSOUL(double_model(), prior="mixture")
    one, many = (method.fit(clients, rounds=4, seed=1, memory=memory) for memory in ("1GiB", "1KiB"))
    for name, tensor in one.published.items():
        torch.testing.assert_close(many.published[name], tensor, rtol=1e-6, atol=1e-6)


def test_restarts_start_elsewhere():
    method = fp.FedSOUL(double_model(), prior="mixture")
    first, second = (method.init(Facts(4, 10, restart), Key(0), {})["beta"] for restart in (0, 1))
    assert not torch.equal(first, second)
    population = method.fit(clustered(), rounds=20, seed=0, restarts=1)
    assert math.isfinite(population.log_likelihood().value)


def test_the_scale_of_a_start_is_that_of_the_data():
    prior = fp.priors.Mixture(3, mean=0.5)
    beta = prior.init(torch.full((2,), 0.5), 1.0, Key(3))
    grown = prior.rescaled(beta, 0.2)
    for one, other in zip(prior.betas(beta), prior.betas(grown), strict=True):
        torch.testing.assert_close(other[:2] - 0.5, 0.2 * (one[:2] - 0.5))
        torch.testing.assert_close(other[2:], one[2:] + math.log(0.2))
    torch.testing.assert_close(prior.mu(beta), torch.full((2,), 0.5))


@pytest.mark.parametrize(
    "settings",
    [
        {"components": 0},
        {"components": 9},
        {"components": True},
        {"spread": 0.0},
        {"floor": 0.5},
        {"floor": 0.0},
        {"covariance": "round"},
        {"scale": -1.0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SettingsError):
        fp.priors.Mixture(**settings)


def test_what_needs_a_normal_prior_says_so():
    model = double_model()
    for form in ("right", "mixed"):
        with pytest.raises(SettingsError, match=f"the {form} form of I needs a Normal prior, not Mixture"):
            fp.FedSOUL(model, prior="mixture", beta_step=fp.steps.BetaStep(form=form))
    with pytest.raises(SettingsError, match="hyperprior on the prior's mean or scale"):
        fp.FedSOUL(model, prior="mixture", hyperprior=fp.priors.Hyperprior(mean_scale=1.0))
    prior, beta, _ = mixture_of("isotropic")
    with pytest.raises(SettingsError, match="left form of I only"):
        prior.score(beta, torch.zeros(1, 1, D), torch.zeros(1, 1, D), "right")


def test_names_and_rebuilding():
    assert resolve("mixture") == fp.priors.Mixture()
    method = fp.FedSOUL(double_model(), prior=fp.priors.Mixture(3, "full"))
    assert rebuild(method.describe(), "FedSOUL", method.model).prior == method.prior
    assert isinstance(method.sampler.kernel, fp.kernels.MixtureDraw)
    logistic = fp.Composition(None, nn.Linear(2, 1), "bernoulli")
    assert isinstance(fp.FedSOUL(logistic, prior="mixture").sampler.kernel, fp.kernels.JumpHMC)
    assert isinstance(fp.FedSOUL(logistic).sampler.kernel, fp.kernels.HMC)
