"""The drift experiment: its methods are what they say, and its page is made from its records."""

from pathlib import Path

import pytest
import torch

from fedpop.data.synthetic import SyntheticTask
from fedpop.report.results import Results
from research import drift
from research.__main__ import main
from research.experiment import Asked
from tests.helpers import run_of


def test_one_full_batch_epoch_is_the_plain_round() -> None:
    task = SyntheticTask(b=6, k=4)
    data = task.make(0)
    examples = sum(len(c.y) for c in data.clients)
    ends = []
    for name in (drift.PLAIN, "1 epoch"):
        model = task.model(0)
        method = drift.method_named(name, drift.SCHEDULES["decreasing"], model, examples)
        run = run_of(method, data.clients, rounds=10)
        start = run.server["phi"].clone()
        for _ in range(3):
            run.train_round()
        assert not torch.allclose(run.server["phi"], start, rtol=1e-3)
        ends.append(run.server["phi"])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_a_job_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "ROUNDS", 4)
    monkeypatch.setattr(drift, "SyntheticTask", lambda: SyntheticTask(b=8, k=4, held_out=2))
    results = Results.open(tmp_path)
    for schedule in drift.SCHEDULES:
        results.add(drift.job(schedule, 0))
    assert {r["method"] for r in results.records} == set(drift.METHODS)
    assert all(r["metrics"]["likelihood_gap"] > -1e-3 for r in results.records)
    assert all(job.done(results) for job in drift.jobs(Asked(tmp_path, 1)))
    main(["report", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "local epochs a round" in page
    assert "one gradient" in (tmp_path / "results.md").read_text()
