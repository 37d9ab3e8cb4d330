"""What changes while training is state: a round makes no settings anew, and checks none."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.checked import Checked
from fedpop.methods import METHODS
from tests.helpers import linear_model, population_data, ragged, run_of, seeded
from tests.methods.conformance import Stage, able, clients, made


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which classes of settings were checked."""
    seen: list[str] = []
    real = Checked.__post_init__

    def watched(self: Checked) -> None:
        seen.append(type(self).__name__)
        real(self)

    monkeypatch.setattr(Checked, "__post_init__", watched)
    return seen


@pytest.mark.parametrize("name", METHODS)
def test_no_method_makes_settings_in_a_round(name: str, checks: list[str]) -> None:
    kind = able(name, "softmax", "linear")[0]
    paced = any(f.name == "schedule" for f in fields(METHODS[name]))
    settings: dict[str, Any] = {"schedule": fp.steps.Cosine()} if paced else {}
    run = Stage(made(name, kind, **settings), kind).run
    checks.clear()
    for _ in range(3):
        run.train_round()
    assert checks == []
    assert len(clients(kind)) == 7


ANNEALED = population_data(6, 5, 3, 2, 0.01)[0]
NETWORK = fp.Composition(seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 1), nn.Linear(4, 1), "bernoulli")
CASES: dict[str, tuple[fp.FedSOUL, Any]] = {
    "annealed": (fp.FedSOUL(linear_model(variance=0.01), engine="sampled"), ANNEALED),
    "exact, annealed": (fp.FedSOUL(linear_model(variance=0.01)), ANNEALED),
    "the paper's": (fp.FedSOUL.paper(linear_model(), rate=1e-3), ANNEALED),
    "full covariance": (fp.FedSOUL(linear_model(), prior="full", engine="sampled"), ANNEALED),
    "mixture": (fp.FedSOUL(linear_model(), prior="mixture"), ANNEALED),
    "adamw": (fp.FedSOUL(linear_model(), phi_step=fp.steps.AdamW(0.01)), ANNEALED),
    "local epochs": (
        fp.FedSOUL(
            NETWORK, phi_step=fp.steps.PhiStep(local=fp.LocalSGD(batch=2), schedule=fp.steps.Cosine())
        ),
        [(x, (y > 0).float()) for x, y in ragged((3, 4, 2))],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_nor_does_fedsoul(case: str, checks: list[str]) -> None:
    method, data = CASES[case]
    run = run_of(method, data, rounds=20)
    run.train_round()
    checks.clear()
    for _ in range(4):
        run.train_round()
    assert checks == []
    assert all(bool(torch.isfinite(t).all()) for t in (run.server["phi"], run.server["beta"]))


def test_it_can_fail(checks: list[str]) -> None:
    fp.steps.EM()
    assert checks == ["EM"]
