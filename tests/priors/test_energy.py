"""The energy-based prior: a network of zeros is the Normal prior, quadrature is the judge elsewhere.

Exact comparisons in double precision; estimates by chains within five standard errors, over chains that
never meet.
"""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import EstimateError
from fedpop.evaluation.quadrature import evidence, log_normaliser
from fedpop.kernels import HMC, JumpHMC, Target, Tuning, run
from fedpop.models.local import NoData
from tests.helpers import generator, population_data, run_of
from tests.oracles import DOUBLE, gaussian_noise, make_case
from tests.priors.energies import KEY, TwoWells, Zero, energy_of, small_net

# --- energy, gradient, score -----------------------------------------------------------------


def test_the_energy_is_what_it_says():
    prior, beta = energy_of(2)
    net, z = small_net(2), gaussian_noise(2, 4, 3, 2)
    m, s = beta[:2], 0.8
    u = (z - m) / s
    exact = 0.5 * u.square().sum(-1) + net(u).squeeze(-1)
    torch.testing.assert_close(prior.energy(beta, z), exact)
    free = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(-prior.energy(beta, free).sum(), free)
    value, found = prior.value_and_grad(beta, z)
    torch.testing.assert_close(value, -exact)
    torch.testing.assert_close(found, grad)
    assert prior.dimension(beta) == 2
    assert prior.size(2) == beta.shape[0] == 2 + 1 + 25
    for d in (1, 2, 9):
        default = fp.priors.Energy(hidden=5)
        assert default.dimension(default.init(torch.zeros(d), 1.0)) == d


def test_the_score_is_minus_the_gradient_of_the_energy():
    prior, beta = energy_of(2)
    z = gaussian_noise(3, 3, 5, 2)
    score = prior.score(beta, z, z, "left")
    assert score.shape == (3, prior.size(2))
    for i in range(3):
        free = beta.clone().requires_grad_()
        (exact,) = torch.autograd.grad(prior.energy(free, z[i]).mean(), free)
        torch.testing.assert_close(score[i], -exact)
    fixed, _ = energy_of(2, learn_mean=False, learn_scale=False)
    assert (fixed.gradient(beta, score[0])[:3] == 0).all()
    assert (fixed.gradient(beta, score[0])[3:] == score[0][3:]).all()


def test_frozen_weights_of_the_network_stay_out_of_beta():
    net = small_net(2)
    net[0].requires_grad_(False)
    prior = fp.priors.Energy(net)
    beta = prior.init(torch.zeros(2, dtype=DOUBLE), 1.0)
    assert beta.shape == (2 + 1 + 7,)
    z = gaussian_noise(3, 5, 2)
    torch.testing.assert_close(
        prior.energy(beta, z), 0.5 * z.square().sum(-1) + small_net(2)(z).squeeze(-1).detach()
    )


def test_curvature_through_the_energy():
    """Power iteration differentiates once more, inside torch.func."""
    prior, beta = energy_of(2)
    z = gaussian_noise(4, 1, 1, 2)
    found = Target(NoData(), prior, beta).largest_curvature(z, 200)
    hessian = torch.autograd.functional.hessian(lambda at: prior.energy(beta, at), z[0, 0])
    least = prior.unit(beta).square().reciprocal().max()
    torch.testing.assert_close(found[0], torch.linalg.eigvalsh(hessian).abs().max().maximum(least))


# --- a network of zeros is the Normal prior --------------------------------------------------


def test_without_a_network_it_is_the_normal_prior():
    prior, normal = fp.priors.Energy(Zero()), fp.priors.Normal()
    mu = gaussian_noise(5, 2)
    beta = prior.init(mu, 0.7)
    torch.testing.assert_close(beta, normal.init(mu, 0.7))
    z = gaussian_noise(6, 4, 5, 2)
    value, grad = prior.value_and_grad(beta, z)
    exact, exact_grad = normal.value_and_grad(beta, z)
    torch.testing.assert_close(value - exact, torch.full_like(value, float(log_normaliser(prior, beta))))
    torch.testing.assert_close(grad, exact_grad)
    # What the server adds is the mean of grad E under N(mu, s^2): 0 for m, -d for log s.
    lacking = torch.tensor([0.0, 0.0, -2.0], dtype=DOUBLE)
    torch.testing.assert_close(prior.score(beta, z, z, "left") + lacking, normal.score(beta, z, z, "left"))
    torch.testing.assert_close(prior.unit(beta), normal.unit(beta))


def test_posterior_draws_without_a_network_are_those_of_the_normal_prior():
    case = make_case("bernoulli", "isotropic")
    energy = Target(case.target().likelihood, fp.priors.Energy(Zero()), case.beta)
    # Only the start differs: an energy has no exact draws, so both begin at the same place.
    z, ids = gaussian_noise(8, 3, 4, 2), torch.arange(3)
    for kernel in (HMC(), JumpHMC()):
        tuning = Tuning.fresh(3, kernel.initial_log_step, z)
        one, two = (run(kernel, t, z, tuning, 20, KEY, ids, adapt=True) for t in (energy, case.target()))
        torch.testing.assert_close(one.draws, two.draws)
        torch.testing.assert_close(one.tuning.log_step, two.tuning.log_step)


def test_a_run_without_a_network_is_a_run_with_the_normal_prior_fixed():
    clients = [(x.double(), y.double()) for x, y in population_data(8, 5, 3, 2, 0.5)[0]]
    backbone, head = nn.Linear(3, 2, bias=False).double(), nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        backbone.weight.copy_(torch.randn(2, 3, generator=generator(4), dtype=DOUBLE))
    model = fp.Composition(backbone, head, fp.likelihoods.Normal(0.5))
    energy = fp.priors.Energy(Zero(), scale=1.0, learn_mean=False)
    normal = fp.priors.Normal(scale=1.0, learn_mean=False, learn_scale=False)
    published = []
    for prior in (energy, normal):
        left = fp.steps.BetaStep(form="left")
        alone = fp.chains.Chain(follow=False)  # an energy has no mode to follow
        settings = {"kernel": fp.kernels.JumpHMC(), "beta_step": left, "start": "random", "chain": alone}
        method = fp.FedSOUK(model, prior=prior, average=fp.steps.Averaging("last"), **settings)
        runner = run_of(method, clients)
        ids = torch.arange(8)
        zeros = torch.zeros(8, dtype=DOUBLE)
        start = {"z": gaussian_noise(9, 8, 1, 2), "log_step": zeros - 1.0, "updates": zeros.clone()}
        runner.sites.store.put(ids, start)
        for _ in range(10):
            runner.train_round()
        published.append(method.publish(runner.server))
    torch.testing.assert_close(published[0]["phi"], published[1]["phi"], rtol=1e-9, atol=1e-9)
    assert not torch.equal(published[0]["phi"], model.initial_phi())


# --- quadrature ------------------------------------------------------------------------------


def test_quadrature_of_a_network_of_zeros_is_the_closed_form():
    case = make_case("normal", "isotropic")
    target = case.target()
    energy = Target(target.likelihood, fp.priors.Energy(Zero()), case.beta)
    torch.testing.assert_close(evidence(energy, 3), target.evidence(), rtol=1e-9, atol=1e-9)


def test_quadrature_refuses_what_it_cannot_do():
    prior, beta = energy_of(3)
    with pytest.raises(EstimateError, match="at most 2 dimensions, not 3"):
        log_normaliser(prior, beta)
    # One narrow well is found, two far apart are narrower than any grid over both.
    narrow = fp.priors.Energy(TwoWells(at=0.0, sd=1e-3))
    found = log_normaliser(narrow, narrow.init(torch.zeros(2, dtype=DOUBLE), 1.0))
    torch.testing.assert_close(found, torch.tensor(0.5 * math.log(2 * math.pi), dtype=DOUBLE))
    narrow = fp.priors.Energy(TwoWells(sd=1e-3))
    with pytest.raises(EstimateError, match="narrower than the grid"):
        log_normaliser(narrow, narrow.init(torch.zeros(2, dtype=DOUBLE), 1.0))
