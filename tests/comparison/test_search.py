"""Settings by random search, in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from tests.helpers import seeded


def clients(test: float = 0.2) -> fp.Federation:
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    return fp.hold_out([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], test=test, validation=0.2)


def ditto(rate: float = 1e-5) -> fp.Ditto:
    model = fp.Composition(None, seeded(nn.Linear(1, 1)), fp.likelihoods.Normal(0.1))
    return fp.Ditto(model, personal=fp.LocalSGD(rate=rate))


SPACE: dict[str, Any] = {"personal.rate": {"log": [0.01, 0.3]}, "personal.epochs": [5, 10]}


def test_the_best_on_validation_examples_is_chosen_and_runs_as_it_says() -> None:
    found = fp.tune(ditto(), SPACE, clients(), trials=4, rounds=5)
    assert [set(settings) for settings, _ in found.trials] == [set(), *[set(SPACE)] * 3]
    scores = [score for _, score in found.trials if score is not None]
    assert found.score == min(scores) < scores[0]
    again = found.method.fit(clients(), rounds=5)
    assert fp.evaluate(again, "validation").summary()["nll"] == pytest.approx(found.score)
    assert fp.tune(ditto(), SPACE, clients(), trials=4, rounds=5).trials == found.trials


def test_test_examples_change_nothing() -> None:
    other = clients()
    other.splits["test"].y.fill_(1e6)
    assert (
        fp.tune(ditto(), SPACE, other, trials=2, rounds=3).trials
        == fp.tune(ditto(), SPACE, clients(), trials=2, rounds=3).trials
    )


@pytest.mark.parametrize("name", ["personal.speed", "none", "personal.rate.more"])
def test_a_setting_that_is_not_there(name: str) -> None:
    with pytest.raises(SettingsError, match="has no setting"):
        fp.tune(ditto(), {name: [1]}, clients(), trials=2, rounds=1)


def test_without_validation_examples() -> None:
    with pytest.raises(DataError, match="validation examples, and there are none"):
        fp.tune(ditto(), SPACE, [(torch.zeros(2, 1), torch.zeros(2))], rounds=1)
