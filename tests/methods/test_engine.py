"""Which engine finds theta: one function chooses, and everybody is told which it was, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import CheckpointError, SettingsError
from fedpop.methods.fedsoul import choice
from tests.helpers import linear_model, ragged, run_of

EVERYONE = fp.participation.Everyone()
SAID: dict[str, tuple[dict[str, Any], Any, str]] = {
    "closed-form": ({}, None, "exact: closed-form posteriors, 9 parameters, everyone takes part"),
    "by name": ({"engine": "exact"}, None, "exact: as asked for, 9 parameters"),
    "by name, with chains": (
        {"engine": "exact", "local_steps": 5, "kernel": "hmc"},
        None,
        "exact: as asked for, 9 parameters; local_steps and kernel were given, which is of chains",
    ),
    "turns": ({}, 0.5, "sampled: not everyone takes part in every round, then scoring steps on theta"),
    "one more step": ({"local_steps": 11}, None, "sampled: local_steps was given, which is of chains"),
    "a step of phi": ({"phi_step": fp.steps.Adam()}, None, "sampled: phi_step was given, which is of chains"),
    "compressed": ({"compressor": "natural"}, None, "sampled: sums are compressed or clipped"),
    "clipped": ({"clip": 1.0}, None, "sampled: sums are compressed or clipped"),
    "mixture": ({"prior": "mixture"}, None, "sampled: posteriors are not closed-form: the prior is Mixture"),
    "as asked": ({"engine": "sampled"}, None, "sampled: as asked for"),
}


@pytest.mark.parametrize("name", SAID)
def test_the_choice_says_why(name: str) -> None:
    settings, rule, reason = SAID[name]
    method = fp.FedSOUL(linear_model(), **settings)
    population = method.fit(ragged((4, 3)), rounds=1, participation=rule, progress=False)
    # A linear backbone learns features: scoring steps are for those without one.
    assert population.engine.startswith(reason.removesuffix(", then scoring steps on theta"))
    assert f"  engine   {population.engine}" in str(population)
    assert ("kernel   " in str(population)) == population.engine.startswith("sampled")
    assert population.algorithm.replace(model=method.model) == method  # as it was given


def test_scoring_steps_are_told() -> None:
    model = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(1.0))
    told = choice(fp.FedSOUL(model), fp.participation.Bernoulli(0.5), waits=True)
    assert told.reason == "sampled: not everyone takes part in every round, then scoring steps on theta"
    assert type(told.method) is fp.FedSOUL


def test_other_models() -> None:
    wide = fp.Composition(nn.Linear(3, 200), nn.Linear(200, 1), "normal")
    dropout = fp.Composition(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), nn.Linear(2, 1), "normal")
    classes = fp.Composition(nn.Linear(3, 2), nn.Linear(2, 2), "categorical")
    for model, why in ((wide, "1003 parameters, more than 500"), (dropout, "dropout"), (classes, "closed")):
        told = choice(fp.FedSOUL(model), EVERYONE, waits=True)
        assert told.reason.startswith("sampled: ")
        assert why in told.reason


def test_the_exact_engine_is_a_method_of_its_own() -> None:
    """To the bit the same whether it is asked for or chosen."""
    clients = ragged((4, 3, 5))
    chosen = fp.FedSOUL(linear_model(), prior="full").fit(clients, rounds=9, progress=False)
    own = fp.MaximumMarginalLikelihood(linear_model(), prior="full").fit(clients, rounds=9, progress=False)
    assert all(torch.equal(own.published[n], v) for n, v in chosen.published.items())
    assert chosen.engine.startswith("exact: ")
    assert own.engine == ""
    run = run_of(fp.FedSOUL(linear_model(), prior="full"), clients)
    assert type(run.algorithm) is fp.MaximumMarginalLikelihood
    assert run.algorithm == own.algorithm.replace(model=run.algorithm.model)
    x = torch.ones(2, 3)
    for name in chosen.names:
        assert torch.equal(chosen.predict(name, x).mean, own.predict(name, x).mean)


def test_where_it_cannot_be_it_says_so_before_anything_runs() -> None:
    softmax = fp.Composition(nn.Linear(3, 2), nn.Linear(2, 2), "categorical")
    clients = [(torch.ones(4, 3), torch.arange(4) % 2)]
    with pytest.raises(SettingsError, match=r"Marginal-ML cannot be used here: posteriors are not"):
        fp.MaximumMarginalLikelihood(softmax).fit(clients, rounds=1)
    with pytest.raises(SettingsError, match="Marginal-ML needs every client in every round"):
        fp.MaximumMarginalLikelihood(linear_model()).fit(ragged((4, 3)), rounds=1, participation=0.5)
    with pytest.raises(SettingsError, match="a search for an optimum wants sums as they are"):
        fp.MaximumMarginalLikelihood(linear_model(), compressor="natural")
    with pytest.raises(SettingsError, match=r"cannot be used here: rounds close on a quorum"):
        choice(fp.FedSOUL(linear_model(), engine="exact"), EVERYONE, waits=False)


def test_config_and_progress_have_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "exact: closed-form posteriors, 9 parameters, everyone takes part"
    fp.FedSOUL(linear_model()).fit(ragged((4, 3)), rounds=2, out=tmp_path, progress=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["engine"] == told
    assert (config["algorithm"]["method"], config["algorithm"]["engine"]) == ("FedSOUL", "auto")
    assert f"FedSOUL, {told}" in " ".join(capsys.readouterr().err.split())


def test_a_saved_population_still_says_so(tmp_path: Path) -> None:
    population = fp.FedSOUL(linear_model()).fit(ragged((4, 3)), rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    assert again.engine == population.engine
    assert str(again).splitlines()[1:4] == str(population).splitlines()[1:4]
    assert type(again.algorithm) is fp.FedSOUL


def test_another_engine_does_not_go_on_with_a_run(tmp_path: Path) -> None:
    clients = ragged((4, 3))
    fp.FedSOUL(linear_model()).fit(clients, rounds=2, out=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match=r"engine: exact then, sampled now"):
        fp.FedSOUL(linear_model(), local_steps=11).fit(
            clients, rounds=2, out=tmp_path, resume=True, progress=False
        )
