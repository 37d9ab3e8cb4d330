"""Held-out examples are predicted in pieces where there are very many: the scores are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.population import client_models, posterior

SIZES = (9, 4, 7, 9, 5, 8)


@pytest.mark.parametrize("uncertain", [False, True])
def test_scores_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch, uncertain: bool) -> None:
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(0.1))
    noise = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 9).unsqueeze(1)
    pairs = [
        (x[:n], (slope * x[:, 0] + 0.3 * e)[:n]) for slope, n, e in zip(range(6), SIZES, noise, strict=True)
    ]
    population = fp.FedSOUL(model).fit([fp.Client(*own, test=own) for own in pairs], rounds=30)
    whole = fp.evaluate(population, theta_uncertainty=uncertain)
    draws = population.algorithm.footprint.final_draws
    monkeypatch.setattr(posterior, "PREDICTED_ENTRIES_AT_ONCE", 4 * draws)
    sizes = [len(y) for _, _, y in population.held_out("test")]
    assert sizes == [4, 4, 1, 4, 4, 3, 4, 4, 1, 4, 1, 4, 4]
    parts = fp.evaluate(population, theta_uncertainty=uncertain)
    assert parts.names == whole.names
    assert torch.equal(parts.examples, whole.examples)
    for name, values in whole.scores.items():
        torch.testing.assert_close(parts.scores[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [fp.FedSOUL, fp.FedPer])
def test_models_that_would_not_fit_are_made_again_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, method: type[fp.FedSOUL]
) -> None:
    """Room for two of six: the scores are the same, and no more than three are ever there."""
    model = fp.Composition(nn.Linear(2, 2), nn.Linear(2, 1), fp.likelihoods.Normal(0.1))
    g = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 2, generator=g), torch.randn(n, generator=g)) for n in SIZES]
    population = method(model).fit([fp.Client(*own, test=own) for own in rows], rounds=2)
    whole = fp.evaluate(population)
    each = 4 * (3 * population.algorithm.footprint.final_draws if method is fp.FedSOUL else 3 + 6)
    population._personal.clear()
    first = population.predict(4, torch.ones(1, 2)).mean  # asked for by its user, and kept
    monkeypatch.setattr(client_models, "CACHED_MODEL_BYTES", 2 * each)
    held = [len(population._personal) for _ in population.held_out("test")]
    assert max(held) <= 3
    assert set(population._personal) >= {4}
    parts = fp.evaluate(population)
    assert parts.names == whole.names
    for name, values in whole.scores.items():
        torch.testing.assert_close(parts.scores[name], values, rtol=1e-5, atol=1e-6)
    assert torch.equal(population.predict(4, torch.ones(1, 2)).mean, first)
