"""An energy prior learns a population with two clusters."""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.keys import Key

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
