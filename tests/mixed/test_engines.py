"""One model, several engines: FedSOUK's own, in its own coordinates, and those of mixed models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.federation.participation import Bernoulli
from fedpop.keys import Key
from fedpop.mixed.sampled import layout_of, scored


@pytest.mark.parametrize("formula", ["y ~ x + w + s + (w | g)", "y ~ w + (w || g)", "y ~ x + (0 + w | g)"])
def test_fedsouks_exact_engine_ends_at_the_same_optimum(formula, simulated):
    fit = fp.mixed_model(formula, simulated([8] * 20))
    layout = layout_of(fit.groups, fit.units, fit.family, 0.0)
    federation, weighted = layout.federation(fit.groups)
    method = fp.FedSOUL(layout.model(weighted), prior=layout.prior(), engine="exact")
    population = method.fit(federation, progress=False)
    prior, beta = population.algorithm.hierarchy.prior, population.published["beta"]
    point = layout.point(population.published["phi"], prior.mu(beta), prior.factor(beta))
    assert fit.engine.log_likelihood(point) == pytest.approx(fit.log_likelihood, abs=1e-5)


@pytest.mark.parametrize(("y", "family"), [("y", "gaussian"), ("count", "poisson")])
def test_scores_of_some_add_up_to_everyones(y, family, simulated):
    """And are the gradient of the likelihood: by differences."""
    fit = fp.mixed_model(f"{y} ~ w + (w | g)", simulated([8] * 12), family)
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


def test_scoring_steps_come_back_to_the_maximum(simulated):
    """From half a standard error away in every direction, with a half of the groups in each step; also where
    groups join with probabilities of their own. What is left is sqrt((1/p - 1) / K) standard errors, a sixth
    of the limit."""
    fit = fp.mixed_model("y ~ w + (1 | g)", simulated([6] * 20))
    engine, best = fit.engine, fit.engine.vector(fit.outcome.point)
    inverse = engine.landing(best).inverse
    away = best + 0.5 * inverse.diagonal().sqrt()
    for rule in (Bernoulli(0.5), Bernoulli([0.4, 0.8] * 10)):
        x, steps = scored(engine, away, rule, Key(1))
        assert 500 < steps < 1000
        assert engine.landing(away).distance.nats > 0.3
        left = (x - best).abs() / inverse.diagonal().sqrt()
        assert float(left.max()) < 0.2


def test_what_was_asked_for_is_what_ran(simulated):
    frame = simulated([6] * 12)
    assert fp.mixed_model("y ~ w + (1 | g)", frame).outcome.engine == "exact engine"
    short = fp.mixed_model("y ~ w + (1 | g)", frame, participation=0.5, rounds=30)
    assert short.rounds == 30
    assert short.outcome.engine == "FedSOUL with chains"
    with pytest.raises(SettingsError, match="all correlated or all independent"):
        fp.mixed_model("y ~ w + (w | g) + (0 + x | g)", frame, engine="sampled")
