"""Where to compute, by name: what is not there, or cannot do the work, is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import SettingsError
from tests.helpers import linear_model, ragged


@pytest.mark.parametrize(
    ("device", "words"),
    [("meta", "holds no numbers"), ("cud", "not here"), ("cuda:99", "not here"), (3, "device")],
)
def test_devices_that_will_not_do_are_refused(device: Any, words: str, tmp_path: Path) -> None:
    method = fp.FedAvg(linear_model())
    with pytest.raises(SettingsError, match=words):
        method.fit(ragged(), rounds=1, device=device, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_cpu_by_name_changes_nothing(tmp_path: Path) -> None:
    method = fp.FedSOUL(linear_model())
    plain, named = (method.fit(ragged(), rounds=3, **more) for more in ({}, {"device": "cpu"}))
    torch.testing.assert_close(plain.published, named.published, rtol=0, atol=0)
    again = fp.load(plain.save(tmp_path / "p"), device=torch.device("cpu"))
    torch.testing.assert_close(again.published, plain.published, rtol=0, atol=0)
    with pytest.raises(SettingsError, match="holds no numbers"):
        fp.load(tmp_path / "p", device="meta")


def test_a_model_is_moved_whole_and_the_one_that_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters go along, to a device that holds none of their numbers but is there to be told apart."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    model = fp.Composition(net, nn.Linear(2, 1), "normal", fixed=nn.Linear(3, 1))
    assert model.on("cpu") is model
    monkeypatch.setattr("fedpop.models.base.device_named", torch.device)
    moved = model.on("meta")
    kinds = {p.device.type for module in moved.modules() for p in module.parameters()}
    assert kinds == {moved.initial_phi().device.type} == {moved.device.type} == {"meta"}
    assert {p.device.type for module in model.modules() for p in module.parameters()} == {"cpu"}
