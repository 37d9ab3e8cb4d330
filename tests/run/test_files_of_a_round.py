"""A reader who follows one sampled round meets few files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.run.run import Run
from tests.followed import files_of
from tests.helpers import generator, linear_model, ragged

MOST = 40
SEEN = {"methods/fedsouk.py", "client/sampler.py", "site/sites.py", "message/channel.py"}


def images() -> tuple[fp.FedSOUL, list[Any]]:
    g = generator(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4), nn.ReLU())
    model = fp.Composition(network, nn.Linear(4, 3), "categorical")
    rows = [(torch.randn(6, 1, 6, 6, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(4)]
    return fp.FedSOUL(model), rows


def numbers() -> tuple[fp.FedSOUL, list[Any]]:
    return fp.FedSOUL(linear_model(), engine="sampled"), ragged((3, 5, 4, 6))


@pytest.mark.parametrize("case", [numbers, images])
def test_one_sampled_round_runs_code_of_few_files(case, monkeypatch):
    """The third of three: what is found once, such as a precision or a step size, is no part of a round."""
    train, found = Run.train_round, []

    def followed(run: Run, *args: Any, **more: Any) -> Any:
        files, result = files_of(lambda: train(run, *args, **more))
        found.append(files)
        return result

    monkeypatch.setattr(Run, "train_round", followed)
    method, clients = case()
    method.fit(clients, rounds=3, progress=False)
    assert found[-1] >= SEEN
    assert len(found[-1]) <= MOST, sorted(found[-1])
