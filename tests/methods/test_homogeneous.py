"""Clients that are all alike: the prior loses its width, and its mean must reach the pooled estimate."""

import torch
from torch import nn

import fedpop as fp
from fedpop.keys import Key
from fedpop.priors.normal import Normal

TRUTH = torch.tensor([1.5, -1.0])


def clients(count=30, examples=20):
    key, ids = Key(3, purpose="alike"), torch.arange(count)
    x = key.at(purpose="x").normal(ids, (examples, 2))
    y = (key.at(purpose="y").uniform(ids, (examples,)) <= torch.sigmoid(x @ TRUTH)).float()
    return list(zip(x, y, strict=True))


def pooled_estimate(data):
    """Logistic regression on all rows by Newton's method."""
    x, y = (torch.cat(part).double() for part in zip(*data, strict=True))
    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(x @ w)
        information = (x * (p * (1 - p)).unsqueeze(1)).mT @ x
        w = w + torch.linalg.solve(information, x.mT @ (y - p))
    return w, torch.linalg.inv(information).diagonal().sqrt()


def test_the_mean_reaches_the_pooled_estimate_from_a_prior_without_width():
    data = clients()
    model = fp.Composition(None, nn.Linear(2, 1, bias=False), "bernoulli")
    prior = Normal(scale=0.01, learn_scale=False)
    population = fp.FedSOUL(model, prior=prior).fit(data, rounds=150, seed=0)
    w, se = pooled_estimate(data)
    assert (population.prior_mean.double() - w).abs().le(0.2 * se).all()


def test_without_the_floor_the_mean_would_stall():
    prior = Normal(scale=0.01)
    beta = prior.init(torch.zeros(2), 0.01)
    score = torch.tensor([1.0, -1.0, 0.0])
    stalled = prior.em_step(beta, score, 1.0) - beta
    moved = prior.em_step(beta, score, 1.0, floor=0.25) - beta
    assert torch.allclose(stalled[:2], 1e-4 * score[:2])
    assert torch.allclose(moved[:2], 0.25 * score[:2])
    # The scale's own step knows nothing of the floor.
    assert torch.equal(moved[2:], stalled[2:])


def test_a_direction_without_width_is_no_reason_to_go_on():
    """Slopes differ and intercepts do not: the best full covariance is singular, its smallest scale goes to
    zero and its information with it. A run without ``rounds`` is over when nothing is left to be gained."""
    g = torch.Generator().manual_seed(0)
    data = []
    for _ in range(40):
        x = torch.randn(12, 1, generator=g)
        slope = -0.3 + torch.randn((), generator=g)
        data.append((x, (torch.rand(12, generator=g) < torch.sigmoid(0.5 + slope * x[:, 0])).float()))
    model = fp.Composition(None, nn.Linear(1, 1), "bernoulli")
    population = fp.FedSOUL(model, prior=Normal(covariance="full")).fit(data, seed=0)
    verdict = population.diagnostics().theta.verdict
    assert verdict.converged
    assert verdict.upwards == 0
    assert population.rounds <= 1000
