"""The server's chains on an energy-based prior, and its term beside the clients', against quadrature."""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.evaluation.quadrature import log_normaliser
from fedpop.kernels import HMC, JumpHMC, Target, Tuning, prior_chains, run
from fedpop.models.local import NoData
from tests.helpers import run_of
from tests.oracles import DOUBLE, assert_mean, cohort_of, gaussian_noise, make_case, sample
from tests.priors.energies import KEY, TwoWells, energy_of, grid, small_net

# --- the server's chains ---------------------------------------------------------------------


def exact_term(prior, beta):
    """E[grad_beta E] and log Z by quadrature."""
    points = grid(prior, beta)
    weight = torch.softmax(-prior.energy(beta, points), 0)
    free = beta.clone().requires_grad_()
    (grad,) = torch.autograd.grad(weight @ prior.energy(free, points), free)
    return grad


def energy_grad(prior, beta, z):
    """grad_beta of the mean energy of draws ``[C, S, d]``, by autograd."""
    free = beta.clone().requires_grad_()
    return torch.stack([torch.autograd.grad(prior.energy(free, own).mean(), free)[0] for own in z])


def on_the_prior(prior, beta, z, tuning, steps, key):
    """Chains on the prior alone, as the server runs them."""
    target = Target(NoData(), prior, beta)
    return run(JumpHMC(), target, z, tuning, steps, key, key.server(), adapt=False)


@pytest.mark.parametrize("d", [1, 2])
def test_the_gradient_of_log_z(d):
    """By quadrature it is that of log Z itself; by the server's chains it is within five standard errors."""
    prior, beta = energy_of(d, chains=300, steps=60)
    exact = exact_term(prior, beta)
    free = beta.clone().requires_grad_()
    (direct,) = torch.autograd.grad(log_normaliser(prior, free), free)
    torch.testing.assert_close(-direct, exact, rtol=1e-6, atol=1e-8)
    state = prior_chains.first_states(prior, beta, KEY)
    term, new = prior_chains.normaliser(prior, beta, state, KEY)
    tuning = Tuning(state["log_step"], state["updates"])
    z, ids = state["states"].unsqueeze(0), KEY.server()
    trace = on_the_prior(prior, beta, z, tuning, 60, KEY.at(purpose="negative"))
    chains = energy_grad(prior, beta, trace.draws[0].transpose(0, 1))
    torch.testing.assert_close(term, chains.mean(0))
    torch.testing.assert_close(new["states"], trace.state.z[0].roll(prior.ship, 0))
    assert_mean(chains, exact, "grad log Z")
    # The tolerance tells it from the base's own expectation, which leaves the network out.
    noise = KEY.at(purpose="base").normal(ids, (4000, d), DOUBLE)
    base = energy_grad(prior, beta, prior.mu(beta) + prior.sd(beta) * noise)[0]
    with pytest.raises(AssertionError):
        assert_mean(chains, base, "the base alone")
    # What diagnostics use, from independent groups of chains.
    groups = prior_chains.normaliser_batches(prior, beta, state, KEY, 60)
    assert_mean(groups, exact, "grad log Z in batches")


def test_chains_visit_both_clusters_in_their_true_shares():
    """All start in the smaller well, seven of its scales from the other one."""
    prior = fp.priors.Energy(TwoWells(share=0.7), chains=150, steps=150)
    beta = prior.init(torch.zeros(2, dtype=DOUBLE), 1.0)
    start = torch.tensor([-2.0, 0.0], dtype=DOUBLE).expand(150, 2).clone()
    state = {
        "states": start,
        "log_step": torch.tensor([math.log(0.2)], dtype=DOUBLE),
        "updates": torch.ones(1).double(),
    }
    _, state = prior_chains.normaliser(prior, beta, state, KEY)
    tuning = Tuning(state["log_step"], state["updates"])
    z = state["states"].unsqueeze(0)
    trace = on_the_prior(prior, beta, z, tuning, 150, KEY.at(round=9))
    right = (trace.draws[0, :, :, 0] > 0).double().mean(0)
    assert_mean(right, torch.tensor(0.7, dtype=DOUBLE), "share of the larger well")
    assert ((right > 0) & (right < 1)).double().mean() > 0.9  # nearly every chain saw both
    # Without jumps nobody leaves: the reason for them.
    stuck = run(
        HMC(), Target(NoData(), prior, beta), start[None], tuning, 100, KEY, KEY.server(), adapt=False
    )
    assert (stuck.draws[..., 0] < 0).all()


def test_a_newcomer_without_data_is_drawn_from_the_learned_density():
    prior = fp.priors.Energy(TwoWells(share=0.6, at=1.0), chains=200)
    beta = prior.init(torch.zeros(1, dtype=DOUBLE), 1.0)
    z = prior_chains.final_draws(prior, beta, torch.tensor([4]), KEY, 1000)
    assert z.shape == (1, 1000, 1)
    # Five visits of each of the 200 chains.
    visits = z[0, :, 0].unflatten(0, (5, 200)).mT
    points = grid(prior, beta)
    weight = torch.softmax(-prior.energy(beta, points), 0)
    assert_mean(visits.mean(1), (weight @ points)[0], "mean")
    assert_mean(visits.square().mean(1), (weight @ points.square())[0], "second moment")


# --- the server's term carries the clients' weight -------------------------------------------

SCHEMES = {
    "ratio": fp.participation.Bernoulli(0.6),
    "inverse": fp.participation.Bernoulli((0.9, 0.5, 0.7, 0.6)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "inverse" else n for n in SCHEMES]
)
def test_what_the_server_sees_is_unbiased(name):
    """Against the gradient of the marginal likelihood by quadrature, z of one dimension."""
    prior = fp.priors.Energy(small_net(1, size=1.2), chains=200, steps=8, learn_scale=True)
    model = fp.Composition(None, nn.Linear(1, 1, bias=False).double(), fp.likelihoods.Normal(0.5))
    beta = prior.init(torch.zeros(1, dtype=DOUBLE), 1.0)
    clients = [
        (gaussian_noise(10 + i, n, 1), gaussian_noise(20 + i, n, 1)) for i, n in enumerate((0, 1, 3, 6))
    ]
    cohort = cohort_of(model, clients)
    free = beta.clone().requires_grad_()
    target = Target(model.bind(model.initial_phi(), cohort.x, cohort), prior, free)
    (exact,) = torch.autograd.grad(by_quadrature(target), free)
    rate = 1e-5
    plain = fp.steps.SGD(rate)
    method = fp.FedSOUK(
        model,
        prior=prior,
        beta_step=plain,
        phi_step=plain,
        chain=fp.chains.Chain(chains=60),
        local_steps=8,
    )
    runner = run_of(method, clients, rounds=500, rule=SCHEMES[name])
    states = prior_chains.first_states(prior, beta, KEY)
    server = runner.server | {"beta": beta} | {f"prior.{n}": v for n, v in states.items()}
    runner.server = server
    seen = []
    for k in range(66):
        runner.round = k
        runner.train_round()
        # Chains go on, theta goes back to where it was.
        moved = (runner.server["beta"] - beta) / rate
        runner.server = runner.server | {"beta": beta, "phi": server["phi"]}
        if k >= 10 and bool(moved.any()):
            seen.append(moved)
    # Eight transitions with jumps leave next to nothing of where a chain was a round before.
    assert_mean(torch.stack(seen), exact, name)


def by_quadrature(target):
    """sum_i log p(D_i | beta), differentiable in beta: the grid is put where beta is now, and held."""
    prior, beta = target.prior, target.beta
    points = grid(prior, beta.detach())
    log_prior = prior.log_prob(beta, points)
    joint = target.likelihood.value(points.expand(4, -1, -1)) + log_prior
    return (joint.logsumexp(1) - log_prior.logsumexp(0)).sum()


# --- other heads -----------------------------------------------------------------------------


def test_posterior_under_two_wells_and_a_logistic_head():
    """Quadrature on a grid: shares of the wells and moments, client by client."""
    case = make_case("bernoulli", "isotropic")
    prior = fp.priors.Energy(TwoWells(share=0.6, at=1.5, sd=0.4))
    beta = prior.init(torch.zeros(2, dtype=DOUBLE), 1.0)
    target = Target(case.target().likelihood, prior, beta)
    trace = sample(JumpHMC(), target, chains=100, warmup=40, draws=50)
    points = grid(prior, beta)
    for i, (x, y) in enumerate(case.clients):
        log_p = -prior.energy(beta, points)
        weight = torch.softmax(log_p + case.log_likelihood(points, x, y) if len(y) else log_p, 0)
        z = trace.draws[i].movedim(1, 0)
        assert_mean(z.mean(1), weight @ points, "mean")
        right = (z[..., 0] > 0).double().mean(1)
        assert_mean(right, weight @ (points[:, 0] > 0).double(), "share of the right well")
