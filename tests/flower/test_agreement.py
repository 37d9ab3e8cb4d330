"""A deployment learns what the simulator learns, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from tests.flower.sites import across, here, same_bits
from tests.helpers import generator, linear_model, seeded

NAMES = ("ada", "bea", "cem", "dag")


def data(classes: int | None = None) -> dict[str, Any]:
    g = generator(0)
    out = {}
    for name, n in zip(NAMES, (4, 3, 6, 5), strict=True):
        x = torch.randn(n, 3, generator=g)
        noise = torch.randn(n, generator=g)
        out[name] = (x, x.sum(1) + noise if classes is None else torch.randint(classes, (n,), generator=g))
    return out


def softmax() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 3), 2), "categorical")


SGD = fp.LocalSGD(epochs=2, rate=0.05, batch=2)
BRIEF = fp.chains.Final(2, 5, 5)
CASES: dict[str, Any] = {
    "FedSOUL": lambda: (fp.FedSOUL(softmax(), final=BRIEF), data(3)),
    "FedSOUL, exact": lambda: (fp.FedSOUL(linear_model()), data()),
    "FedSOUL, QSGD": lambda: (fp.FedSOUL(softmax(), compressor="qsgd", final=BRIEF), data(3)),
    "FedAvg": lambda: (fp.FedAvg(softmax(), local=SGD), data(3)),
    "SCAFFOLD": lambda: (fp.SCAFFOLD(softmax(), local=SGD), data(3)),
    "Ditto": lambda: (fp.Ditto(softmax(), local=SGD), data(3)),
}


@pytest.mark.parametrize("rule", [None, 2], ids=["everyone", "two a round"])
@pytest.mark.parametrize("name", CASES)
def test_theta_is_the_simulators_to_the_bit(name: str, rule: Any, tmp_path: Path) -> None:
    method, clients = CASES[name]()
    if rule is not None:
        rule = fp.participation.Uniform(rule)
    rounds = 10 if rule is None else 5
    elsewhere, _ = across(method, clients, tmp_path, rounds=rounds, rule=rule)
    simulated = here(method, clients, rounds=rounds, rule=rule)
    assert elsewhere.rounds == simulated.rounds
    same_bits(elsewhere.published, simulated.published)
