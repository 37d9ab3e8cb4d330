"""One model, several engines: FedSOUK's, in its coordinates, and those of mixed models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.federation.participation import Bernoulli, Uniform
from fedpop.keys import Key
from fedpop.mixed.sampled import layout_of, scored


@pytest.mark.parametrize("formula", ["y ~ x + w + s + (w | g)", "y ~ w + (w || g)", "y ~ x + (0 + w | g)"])
def test_fedsouks_exact_engine_ends_at_the_same_optimum(formula, simulated):
    fit = fp.mixed_model(formula, simulated([6] * 10))
    layout = layout_of(fit.groups, fit.units, 0.0)
    federation, weighted = layout.federation(fit.groups)
    method = fp.FedSOUL(layout.model(weighted), prior=layout.prior(), engine="exact")
    population = method.fit(federation, progress=False)
    prior, beta = population.algorithm.hierarchy.prior, population.published["beta"]
    point = layout.point(population.published["phi"], prior.mu(beta), prior.factor(beta))
    assert fit.engine.log_likelihood(point) == pytest.approx(fit.log_likelihood, abs=1e-5)


@pytest.mark.parametrize(("y", "family"), [("y", "gaussian"), ("count", "poisson")])
def test_scores_of_some_add_up_to_everyones(y, family, simulated, fitted):
    """And are the gradient of the likelihood: by differences."""
    fit = fitted(f"{y} ~ w + (w | g)", simulated([6] * 12), family).fit
    engine, x = fit.engine, fit.engine.vector(fit.outcome.point) + 0.05
    whole, information = engine.score_and_information(x)
    parts = [engine.score(x, ids) for ids in torch.arange(12).split(5)]
    assert torch.stack(parts).sum(0).numpy() == pytest.approx(whole.numpy(), rel=1e-9, abs=1e-9)
    steps = 1e-5 * torch.eye(len(x), dtype=x.dtype)
    slope = [
        (engine.log_likelihood(engine.point(x + s)) - engine.log_likelihood(engine.point(x - s))) / 2e-5
        for s in steps
    ]
    assert whole.numpy() == pytest.approx(np.array(slope), rel=1e-5, abs=1e-4)
    bend = [
        (engine.score_and_information(x - s)[0] - engine.score_and_information(x + s)[0]) / 2e-5
        for s in steps
    ]
    assert information.numpy() == pytest.approx(torch.stack(bend).numpy(), rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("rule", [Bernoulli(0.4), Bernoulli([0.3, 0.6] * 6), Uniform(4)])
def test_scoring_steps_come_back_to_the_maximum(rule, simulated):
    """From half a standard error away in every direction; in each step those who are there, also where they
    join with different probabilities."""
    fit = fp.mixed_model("y ~ w + (1 | g)", simulated([6] * 12))
    engine, best = fit.engine, fit.engine.vector(fit.outcome.point)
    _, information = engine.score_and_information(best)
    error = torch.linalg.inv(information).diagonal().sqrt()
    x, rounds, distance = scored(engine, best + 0.5 * error, rule, Key(1))
    assert rounds > 50
    assert distance.nats < 5e-4
    assert float(((x - best).abs() / error).max()) < 0.04  # sqrt(2 nats), and what is not quadratic


def test_what_was_asked_for_is_what_ran(simulated):
    frame = simulated([6] * 12)
    assert fp.mixed_model("y ~ w + (1 | g)", frame).outcome.engine == "exact engine"
    short = fp.mixed_model("y ~ w + (1 | g)", frame, participation=0.5, rounds=30)
    assert short.rounds == 30
    assert short.outcome.engine == "FedSOUL with chains"
    with pytest.raises(SettingsError, match="all correlated or all independent"):
        fp.mixed_model("y ~ w + (w | g) + (0 + x | g)", frame, engine="sampled")
