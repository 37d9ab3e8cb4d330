"""Whole runs with a mixture prior: one component is the Normal prior, several reach the exact optimum."""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import EstimateError, SettingsError
from fedpop.evaluation.oracle import exact_optimum
from fedpop.keys import Key
from fedpop.methods import rebuild
from fedpop.methods.base import Facts
from fedpop.priors import resolve
from fedpop.server.averaging import aligner
from tests.crash import Crash, CrashAt
from tests.helpers import generator
from tests.oracles import DOUBLE, gaussian_noise
from tests.priors.mixtures import D, covariances, mixture_of

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
    ("step", "rounds"),
    [(fp.steps.EM(), 150), pytest.param(fp.steps.Adam(0.1), 400, marks=pytest.mark.slow)],
    ids=["em", "adam"],
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

    with pytest.raises(Crash):
        method.fit(
            clients,
            rounds=8,
            seed=4,
            participation=10,
            out=tmp_path,
            checkpoint_every=2,
            callbacks=[CrashAt(5)],
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
