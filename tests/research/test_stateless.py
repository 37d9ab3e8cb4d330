"""Clients that keep nothing between rounds, on a set of a few small images: who takes part, and a page."""

from pathlib import Path

import pytest

from fedpop.data.image_task import ImageTask
from fedpop.report.results import Results
from research import stateless
from tests.data.files import mnist
from tests.research.quick import FEW

TASK = ImageTask("mnist", 2, small=0, n_small=2, large=5, n_large=4, validation=0, test=4)


def test_every_start_is_run_at_every_participation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateless, "PASSES", 24)
    monkeypatch.setattr(stateless, "TASK", TASK)
    monkeypatch.setattr(stateless, "FINAL", FEW)
    monkeypatch.setattr(stateless, "STEPS", (2,))
    monkeypatch.setattr(stateless, "SHARES", (0.4, 0.2))
    out = tmp_path / "out"
    stateless.EXPERIMENT.run(out=out, processes=1, data=mnist(tmp_path))
    records = Results.open(out).records
    assert {(r["method"], r["setting"]["participation"]) for r in records} == {
        (name, share) for name in stateless.METHODS for share in (0.4, 0.2)
    }
    for r in records:
        assert r["setting"]["local_steps"] == r["config"]["local_steps"] == 2
        assert r["config"]["chain"]["stateful"] == (r["method"] == "stateful")
        # The same passes: half as many clients a round make twice as many rounds.
        assert r["cost"]["rounds"] == (3 if r["setting"]["participation"] == 0.4 else 6)
    assert "not run" not in (out / "results.md").read_text()
    assert (out / "report.html").read_text().count("<svg") == 2


def test_the_usual_setting_comes_first() -> None:
    assert stateless.grid()[0] == (10, 0.1)
    assert {share for _, share in stateless.grid()} == {0.01, 0.05, 0.1, 0.5}
