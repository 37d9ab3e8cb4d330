"""The energy-based prior: a network of zeros is the Normal prior, quadrature is the judge elsewhere.

Exact comparisons in double precision; estimates by chains within five standard errors, over chains that
never meet.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms import rebuild
from fedpop.algorithms.base import Facts
from fedpop.errors import CheckpointError, EstimateError, ModelError, SettingsError
from fedpop.evaluation.quadrature import evidence, log_normaliser
from fedpop.kernels import HMC, JumpHMC, Target, Tuning, prior_chains, run
from fedpop.keys import Key
from fedpop.models.local import NoData
from fedpop.priors import resolve
from tests.helpers import FRAME, answers, begun, generator, linear_model, population_data, run_of
from tests.oracles import DOUBLE, assert_mean, cohort_of, gaussian_noise, make_case, sample

KEY = Key(7, purpose="test")


class Zero(nn.Module):
    """No energy, and no parameter."""

    def forward(self, u: Tensor) -> Tensor:
        return torch.zeros_like(u[:, 0])


class TwoWells(nn.Module):
    """On N(0, I) the density is a mixture of two Normals along the first axis, N(0, 1) along the others."""

    def __init__(self, share: float = 0.7, at: float = 2.0, sd: float = 0.3) -> None:
        super().__init__()
        self.share, self.at, self.sd = share, at, sd

    def log_density(self, u: Tensor) -> Tensor:
        right = math.log(self.share) - 0.5 * ((u - self.at) / self.sd) ** 2
        left = math.log(1 - self.share) - 0.5 * ((u + self.at) / self.sd) ** 2
        return torch.logaddexp(right, left) - math.log(self.sd * math.sqrt(2 * math.pi))

    def forward(self, u: Tensor) -> Tensor:
        return -self.log_density(u[:, 0]) - 0.5 * u[:, 0] ** 2


def small_net(d: int, seed: int = 0, size: float = 0.8) -> nn.Module:
    net = nn.Sequential(nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(size * torch.randn(p.shape, generator=generator(seed), dtype=DOUBLE))
    return net


def grid(prior: fp.priors.Energy, beta: Tensor) -> Tensor:
    """Points over eight scales either side of the base, fine enough for every energy of these tests."""
    d = prior.dimension(beta)
    line = torch.linspace(-8, 8, {1: 2001, 2: 401}[d], dtype=DOUBLE)
    return prior.mu(beta) + prior.sd(beta) * torch.cartesian_prod(*[line] * d).reshape(-1, d)


def energy_of(d: int, **settings) -> tuple[fp.priors.Energy, Tensor]:
    prior = fp.priors.Energy(small_net(d), **settings)
    return prior, prior.init(0.3 * gaussian_noise(1, d), 0.8)


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


@pytest.mark.parametrize("name", SCHEMES)
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
    for k in range(80):
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


# --- the front door --------------------------------------------------------------------------


def clients_of(b=8):
    return population_data(b, 5, 3, 2, 0.5)[0]


def torch_net(seed=0) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator(seed)))
    return net


def test_by_name():
    population = fp.FedSOUL(linear_model(), prior="energy").fit(clients_of(), rounds=2)
    assert population.published["beta"].shape == (2 + 1 + 32 * 2 + 32 + 32 * 32 + 32 + 32,)
    assert population.new_client().posterior.draws.shape == (4, 250, 2)
    assert population.prior_sd.shape == (2,)


SHORT = fp.chains.Final(chains=2, burn_in=5, draws=10)
BRIEF = {"final": SHORT, "chain": fp.chains.Chain(burn_in=5)}


def test_the_front_door(tmp_path):
    clients, prior = clients_of(), fp.priors.Energy(torch_net(), chains=32)
    population = fp.FedSOUL(linear_model(), prior=prior, **BRIEF).fit(clients, rounds=3, seed=2)
    text = str(population)
    assert "Energy: network of" in text
    assert "its chains: norm of mean" in text
    x = clients[0][0]
    population.new_client().predict(x).interval(0.9)
    newcomer = population.new_client(*clients[0])
    population.save(tmp_path / "saved")
    again = fp.load(tmp_path / "saved", clients=clients)
    assert torch.equal(again.predict(3, x).mean, population.predict(3, x).mean)
    assert torch.equal(again.new_client().predict(x).mean, population.new_client().predict(x).mean)
    assert torch.equal(again.new_client(*clients[0]).predict(x).mean, newcomer.predict(x).mean)
    estimate = population.log_likelihood()
    assert estimate.method == "quadrature"
    assert again.log_likelihood().value == estimate.value
    with pytest.raises(EstimateError, match="theta_uncertainty is there for Normal priors"):
        population.predict(0, x, theta_uncertainty=True)


def test_a_network_of_ones_own_is_asked_for_again(tmp_path):
    clients, prior = clients_of(), fp.priors.Energy(TwoWells(), chains=16)
    population = fp.FedSOUL(linear_model(), prior=prior, **BRIEF).fit(clients, rounds=2)
    population.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"prior=\.\.\."):
        fp.load(tmp_path, clients=clients)
    again = fp.load(tmp_path, clients=clients, prior=prior)
    x = clients[0][0]
    assert torch.equal(again.new_client().predict(x).mean, population.new_client().predict(x).mean)


def test_settings_come_back():
    method = fp.FedSOUL(linear_model(), prior=fp.priors.Energy(torch_net(), scale=0.5, chains=17))
    again = rebuild(method.describe(), "FedSOUL", method.model).prior
    assert repr(again) == repr(method.prior)
    assert isinstance(resolve("energy"), fp.priors.Energy)
    assert isinstance(method.on_beta.on(method.hierarchy.prior), fp.steps.Adam)
    assert isinstance(method.sampler.kernel, fp.kernels.JumpHMC)


@pytest.mark.parametrize("stateful", [True, False])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, stateful):
    clients = clients_of()
    chain = fp.chains.Chain(stateful=stateful, burn_in=5)
    method = fp.FedSOUL(linear_model(), prior=fp.priors.Energy(hidden=4, chains=16), chain=chain)
    settings = {"rounds": 7, "seed": 4, "participation": 4}
    whole = method.fit(clients, **settings)

    class Stop(fp.callbacks.Callback):
        def after_round(self, run, metrics):
            if run.round == 5:
                raise ZeroDivisionError
            return False

    with pytest.raises(ZeroDivisionError):
        method.fit(clients, **settings, out=tmp_path, checkpoint_every=2, callbacks=[Stop()])
    resumed = method.fit(clients, **settings, out=tmp_path, checkpoint_every=2, resume=True)
    assert set(whole.published) == {"phi", "beta", "states"}
    for name, tensor in whole.published.items():
        assert torch.equal(resumed.published[name], tensor), name


def test_cohorts_do_not_matter():
    clients = clients_of()
    method = fp.FedSOUL(linear_model(), prior=fp.priors.Energy(hidden=4, chains=16), **BRIEF)
    one, many = (method.fit(clients, rounds=4, seed=1, memory=memory) for memory in ("1GiB", "1KiB"))
    for name, tensor in one.published.items():
        torch.testing.assert_close(many.published[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_is_sent_and_shipped():
    clients = clients_of()
    prior = fp.priors.Energy(torch_net(), chains=32, ship=5)
    method = fp.FedSOUL(linear_model(), prior=prior, start="random", guard=None)
    population = method.fit(clients, rounds=3)
    phi, beta = method.model.phi_layout.size, prior.size(2)
    # Before the rounds a client gets phi, and sends two double numbers about the size of its features, and
    # two about that of its targets; in the first of them, half of all, it gets the noise in force.
    assert population.totals["bytes_up"] == 8 * (3 * 4 * (phi + beta) + 16 + 16 + (3 * 2 + 2) * FRAME)
    first = 4 * (phi + beta + 5 * 2)
    assert population.totals["bytes_down"] == 8 * (3 * first + 4 * phi + 4)


@pytest.mark.parametrize("stateful", [True, False])
def test_clients_start_from_the_servers_chains(stateful):
    clients = clients_of()
    prior, chain = fp.priors.Energy(TwoWells(), chains=32, ship=6), fp.chains.Chain(stateful=stateful)
    method = fp.FedSOUL(linear_model(), prior=prior, chain=chain)
    cohort = cohort_of(method.model, clients)
    server, local = begun(method, cohort, Facts(8, 3), KEY)
    broadcast = method.broadcast(server)
    assert broadcast["states"].shape == (6, 2)
    assert all(any(torch.equal(z, s) for s in broadcast["states"]) for z in local["z"][:, 0])
    assert len({tuple(z.tolist()) for z in local["z"][:, 0]}) > 2
    if not stateful:  # where the state was makes no difference
        moved = local | {"z": local["z"] + 1}
        one, two = (answers(method, cohort, start, broadcast, KEY).local["z"] for start in (local, moved))
        assert torch.equal(one, two)


# --- what is refused -------------------------------------------------------------------------


class Broken(nn.Module):
    """NaN on one side."""

    def forward(self, u: Tensor) -> Tensor:
        return torch.log(u[:, 0])


class Falls(nn.Module):
    """Falls faster than the base rises: exp(-E) has no integral."""

    def forward(self, u: Tensor) -> Tensor:
        return -u.square().sum(-1)


def test_an_energy_that_is_nan_is_one_clear_error():
    with pytest.raises(ModelError, match=r"energy of the prior is NaN or infinite .*Broken"):
        fp.FedSOUL(linear_model(), prior=fp.priors.Energy(Broken())).fit(clients_of(), rounds=1)
    # Also when it becomes so on the way.
    prior, beta = energy_of(2)
    state = prior_chains.first_states(prior, beta, KEY)
    with pytest.raises(ModelError, match="NaN or infinite"):
        prior_chains.normaliser(prior, beta * math.nan, state, KEY)


def test_an_energy_without_a_density_is_one_clear_error():
    with pytest.raises(EstimateError, match="chains of the energy prior escape"):
        fp.FedSOUL(linear_model(), prior=fp.priors.Energy(Falls())).fit(clients_of(), rounds=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"scale": -1.0},
        {"bounds": (2.0, 1.0)},
        {"mean": math.nan},
        {"chains": 4},
        {"chains": 16.0},
        {"steps": 0},
        {"ship": 0},
        {"chains": 16, "ship": 17},
        {"hidden": 0},
        {"net": "mlp"},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SettingsError):
        fp.priors.Energy(**settings)


def test_networks_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match="dropout"):
        fp.priors.Energy(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    with pytest.raises(ModelError, match="does not accept z of 2 dimensions"):
        fp.FedSOUL(linear_model(), prior=fp.priors.Energy(nn.Linear(3, 1))).fit(clients_of(), rounds=1)
    with pytest.raises(ModelError, match="does not accept z of 2 dimensions"):
        fp.FedSOUL(linear_model(), prior=fp.priors.Energy(nn.Linear(2, 2))).fit(clients_of(), rounds=1)


def test_what_needs_another_prior_says_so():
    model = linear_model()
    with pytest.raises(SettingsError, match="EM steps cannot be made for Energy priors"):
        fp.FedSOUL(model, prior="energy", beta_step=fp.steps.EM())
    with pytest.raises(SettingsError, match="rao_blackwell needs closed-form posteriors"):
        fp.FedSOUL(model, prior="energy", chain=fp.chains.Chain(rao_blackwell=True))
    with pytest.raises(SettingsError, match="right form of I needs a Normal prior"):
        fp.FedSOUL(model, prior="energy", beta_step=fp.steps.BetaStep(form="right"))
    with pytest.raises(SettingsError, match="hyperprior"):
        fp.FedSOUL(model, prior="energy", hyperprior=fp.priors.Hyperprior(log_scale=(0.0, 1.0)))
    wide = fp.FedSOUL(linear_model(4, 3), prior="energy")
    clients = population_data(4, 5, 4, 3, 0.5)[0]
    with pytest.raises(SettingsError, match="at most two dimensions"):
        wide.fit(clients, rounds=1, restarts=1)
    with pytest.raises(EstimateError, match="at most 2 dimensions, not 3"):
        wide.fit(clients, rounds=1).log_likelihood()


def test_restarts_in_two_dimensions():
    method = fp.FedSOUL(linear_model(), prior=fp.priors.Energy(hidden=4, chains=16))
    population = method.fit(clients_of(), rounds=3, restarts=1)
    assert math.isfinite(population.log_likelihood().value)


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
