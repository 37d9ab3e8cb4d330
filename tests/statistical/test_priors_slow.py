"""What mixture and energy priors are for, run afresh; the committed results are held to it over ten seeds."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.experiments.clusters import SHOTS, TASK, differences, run_seed
from fedpop.keys import Key
from fedpop.report.results import Results, interval95

pytestmark = pytest.mark.slow
COMMITTED = Path(__file__).parents[2] / "results" / "clusters"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def beats(results, name):
    """The interval of the difference to the Normal prior lies above zero, with no data and with a few."""
    for shots in SHOTS:
        found = differences(results, f"log_likelihood_{shots}", name, "Normal")
        centre, low, _ = interval95(found)
        assert centre > 0, (name, shots)
        assert low > 0, (name, shots, found)


def test_mixture_and_energy_priors_beat_the_normal_one_on_new_clients(tmp_path):
    results = Results(tmp_path)
    for seed in range(100, 104):  # seeds that nothing was chosen on
        results.add(run_seed(TASK, seed, names=("Normal", "Mixture", "Energy")))
    beats(results, "Mixture")
    beats(results, "Energy")


@pytest.mark.parametrize("name", ["Mixture", "Energy"])
def test_committed_results_say_so_too(name):
    if not (COMMITTED / "results.json").exists():
        pytest.skip("results/clusters is not there; make it with: fedpop experiment clusters")
    results = Results.open(COMMITTED)
    assert len(results.of(method=name)) == len(results.of(method="Normal")) == 10
    beats(results, name)


def bimodal(seed, b=400, n=5):
    """y = x z + noise, z from 0.65 N(1, 0.25^2) + 0.35 N(-1, 0.25^2)."""
    key, ids = Key(seed, purpose="bimodal"), torch.arange(b)
    right = key.at(purpose="side").uniform(ids, (1,)) <= 0.65
    z = torch.where(right, 1.0, -1.0) + 0.25 * key.at(purpose="z").normal(ids, (1,))
    x = key.at(purpose="x").normal(ids, (n, 1))
    y = x * z.unsqueeze(1) + 0.2 * key.at(purpose="y").normal(ids, (n, 1))
    return list(zip(x, y, strict=True)), z


@pytest.mark.parametrize("stateful", [True, False])
def test_an_energy_learns_a_bimodal_population(stateful):
    """z of one dimension and no phi: the density itself is identified.

    400 clients hold 800 degrees of information: an empirical share of 0.65 has a standard error of 0.024,
    so five of them bound the share, and total variation cannot be expected below a few hundredths.
    """
    clients, z = bimodal(0)
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(0.04))
    prior = fp.priors.Energy(scale=1.0)
    chain = fp.chains.Chain(stateful=stateful)
    method = fp.FedSOUL(model, prior=prior, local_steps=5 if stateful else 10, chain=chain)
    population = method.fit(clients, rounds=200, seed=0)
    line = torch.linspace(-4, 4, 2001, dtype=torch.float64)
    cell = float(line[1] - line[0])
    beta = population.published["beta"].double()
    learned = torch.softmax(prior.log_prob(beta, line.unsqueeze(1)).detach(), 0) / cell
    shape = lambda at: torch.exp(-0.5 * ((line - at) / 0.25) ** 2) / (0.25 * math.sqrt(2 * math.pi))  # noqa: E731
    exact = 0.65 * shape(1.0) + 0.35 * shape(-1.0)
    share = float(learned[line > 0].sum()) * cell
    empirical = float((z > 0).double().mean())
    assert abs(share - empirical) < 0.05
    assert abs(share - 0.65) < 5 * 0.024
    assert 0.5 * float((learned - exact).abs().sum()) * cell < 0.12
    # A newcomer without data is one or the other, in the same shares (1,000 draws of 256 chains).
    drawn = population.new_client().posterior.flat[:, 0]
    assert abs(float((drawn > 0).double().mean()) - share) < 5 * math.sqrt(0.25 / 256)
    # One Normal cannot: half of its mass lies where nobody is.
    normal = fp.FedSOUL(model, local_steps=5).fit(clients, rounds=100, seed=0)
    assert population.log_likelihood().value > normal.log_likelihood().value + 50
