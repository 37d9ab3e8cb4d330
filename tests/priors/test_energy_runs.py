"""Whole runs with an energy-based prior: from its name to a saved population, and what is refused."""

import math

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import CheckpointError, EstimateError, ModelError, SettingsError
from fedpop.kernels import prior_chains
from fedpop.methods import rebuild
from fedpop.methods.base import Facts
from fedpop.priors import resolve
from tests.crash import Crash, CrashAt
from tests.helpers import FRAME, answers, begun, linear_model, population_data
from tests.oracles import cohort_of
from tests.priors.energies import KEY, TwoWells, clients_of, energy_of, torch_net

# --- the front door --------------------------------------------------------------------------


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
    assert isinstance(method.on_beta.on(method.hierarchy), fp.steps.Adam)
    assert isinstance(method.sampler.kernel, fp.kernels.JumpHMC)


@pytest.mark.parametrize("stateful", [True, False])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, stateful):
    clients = clients_of()
    chain = fp.chains.Chain(stateful=stateful, burn_in=5)
    method = fp.FedSOUL(linear_model(), prior=fp.priors.Energy(hidden=4, chains=16), chain=chain)
    settings = {"rounds": 5, "seed": 4, "participation": 4}
    whole = method.fit(clients, **settings)
    with pytest.raises(Crash):
        method.fit(clients, **settings, out=tmp_path, checkpoint_every=2, callbacks=[CrashAt(3)])
    resumed = method.fit(clients, **settings, out=tmp_path, checkpoint_every=2, resume=True)
    assert set(whole.published) == {"phi", "beta", "states", "sets", "ball"}
    for name, tensor in whole.published.items():
        assert torch.equal(resumed.published[name], tensor), name


def test_cohorts_do_not_matter():
    clients = clients_of(5)
    method = fp.FedSOUL(linear_model(), prior=fp.priors.Energy(hidden=4, chains=16), **BRIEF)
    one, many = (method.fit(clients, rounds=3, seed=1, memory=memory) for memory in ("1GiB", "1KiB"))
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
