"""Scoring steps: on a quadratic the mean of Newton steps; on a mixed model the exact optimum, sooner."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.server import scoring
from tests.helpers import generator

WIDE = torch.float64


def test_on_a_quadratic_the_rounds_are_averaged() -> None:
    """From k_0 = 1 on, theta is the mean of optimum + I^-1 noise_k over the rounds, wherever it began."""
    g = generator(0)
    half = torch.randn(2, 2, generator=g, dtype=WIDE)
    info, optimum = half @ half.T + torch.eye(2, dtype=WIDE), torch.tensor([1.0, -2.0], dtype=WIDE)
    inverse, noises = torch.linalg.inv(info), 0.1 * torch.randn(50, 2, generator=g, dtype=WIDE)
    theta = optimum + 0.1
    for k, noise in enumerate(noises):
        theta = scoring.step(theta, info @ (optimum - theta) + noise, inverse, k, 1.0)
    torch.testing.assert_close(theta, optimum + inverse @ noises.mean(0))


def test_a_step_is_bounded_and_a_crowd_makes_it_shorter() -> None:
    """Half of move' I move is at most LONGEST; with b/|A| = 32 and p = 4 the first rate is an eighth."""
    one, at = torch.eye(4, dtype=WIDE), torch.zeros(4, dtype=WIDE)
    far = scoring.step(at, torch.full((4,), 1e6, dtype=WIDE), one, 0, 1.0)
    assert 0.5 * float(far.square().sum()) == pytest.approx(scoring.LONGEST_SCORING_STEP)
    near = scoring.step(at, torch.ones(4, dtype=WIDE), one, 0, 32.0)
    torch.testing.assert_close(near, torch.full((4,), 1 / 8, dtype=WIDE))


@pytest.mark.slow
def test_clients_that_take_turns_reach_the_exact_optimum_in_a_stage_of_scoring() -> None:
    """A random intercept and slope, one client in five: a second stage ends near enough."""
    g = generator(0)
    clients = []
    for _ in range(60):
        z = torch.tensor([0.5, -0.3]) + torch.randn(2, generator=g) * torch.tensor([0.8, 0.5])
        x = torch.randn(12, 1, generator=g) + 2
        clients.append((x, z[0] + z[1] * x[:, 0] + 0.5 * torch.randn(12, generator=g)))
    model = fp.Composition(None, nn.Linear(1, 1), fp.likelihoods.Normal("learned"))
    best = fp.FedSOUL(model).fit(clients, progress=False).log_likelihood().value
    population = fp.FedSOUL(model).fit(clients, participation=0.2, progress=False)
    assert population.rounds > 250  # a further stage there was
    assert population.convergence is not None
    assert population.convergence.converged
    assert best - population.log_likelihood().value < 0.06
    assert "scoring steps" in str(population)
