"""New clients, on a set of a few small images: none of them in training, scored with each number of them."""

from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop.data.image_task import FullImageTask
from fedpop.report.results import Results
from research import new_clients
from tests.data.files import mnist
from tests.research.quick import shorten

TASK = FullImageTask("mnist", 2, b=5)


def test_new_clients_are_scored_with_each_number_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_clients, "PASSES", 120)
    monkeypatch.setattr(new_clients, "EXAMPLES", (0, 1, 3))
    monkeypatch.setattr(new_clients, "TASKS", (TASK,))
    shorten(monkeypatch, new_clients.METHODS)
    for name in set(new_clients.TODAY) - {"pFedFDA"}:
        monkeypatch.delitem(new_clients.METHODS, name)
    out = tmp_path / "out"
    new_clients.EXPERIMENT.run(out=out, processes=1, data=mnist(tmp_path))
    records = Results.open(out).records
    there = {(r["method"], r["setting"].get("examples")) for r in records}
    every = {(name, n) for name in new_clients.METHODS for n in (0, 1, 3, None)}
    assert every - there == {("FedRep", 0)}  # a body without a head
    for r in records:
        assert r["setting"]["new"] == 1
        assert 0 <= r["metrics"]["accuracy"] <= 1
        assert ("seconds_per_client" in r["metrics"]) == ("examples" in r["setting"])
    text = (out / "results.md").read_text()
    assert "| 0 | FedRep | 0 | no model |" in text
    assert "not run" not in text
    assert (out / "report.html").read_text().count("<svg") == 3


def test_new_clients_hold_images_of_nobody_else(tmp_path: Path) -> None:
    federation, held = TASK.split(mnist(tmp_path), 0, new_clients.newcomers_of(TASK))
    assert (len(federation), len(held)) == (4, 1)
    mixed = new_clients.shuffled(held[0], 0, seed=0)
    assert not torch.equal(mixed.y, held[0].y)
    assert sorted(mixed.y.tolist()) == sorted(held[0].y.tolist())
    theirs = federation.train.x.flatten(1)
    assert not any(bool((theirs == own).all(1).any()) for own in mixed.x.flatten(1))


def test_images_stay_with_their_labels() -> None:
    x = torch.arange(6.0).unsqueeze(1)
    mixed = new_clients.shuffled(fp.Client(x, 10 * x[:, 0], test=(x, x[:, 0])), 3, seed=1)
    assert torch.equal(mixed.y, 10 * mixed.x[:, 0])
