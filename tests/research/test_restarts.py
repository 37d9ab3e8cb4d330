"""Seeds that missed without annealing: which ones, what is recorded, and the table."""

import torch

from fedpop.data.synthetic import SyntheticTask
from fedpop.report.results import Results
from research import restarts
from research.__main__ import main
from research.experiment import Asked

SETTING = {"b": 10, "d": 1, "k": 3, "share_small": 0.9, "n_small": 5, "n_large": 10}


def test_six_seeds_are_run_again(tmp_path):
    jobs = restarts.jobs(Asked(tmp_path / "restarts"))
    assert [j.label for j in jobs][-2:] == ["100,5,20, seed 3", "100,5,20, seed 4"]
    assert len(jobs) == 6


def test_a_job_returns_the_best_of_its_runs(monkeypatch, tmp_path):
    build, _ = restarts.METHODS[restarts.METHOD]
    monkeypatch.setitem(restarts.METHODS, restarts.METHOD, (build, 60))
    before = torch.get_num_threads()
    records = restarts.job(SETTING, 2, 1)
    torch.set_num_threads(before)
    metrics = records[0]["metrics"]
    assert metrics["gap"] == min(metrics[f"gap_{i}"] for i in range(3))
    assert metrics["gap"] > -1e-3
    assert metrics["settled"] == 1.0
    monkeypatch.setattr(restarts, "RESTARTS", 2)
    monkeypatch.setattr(restarts, "MISSED", ((SyntheticTask(b=10, d=1, k=3), (1,)),))
    (job,) = restarts.jobs(Asked(tmp_path / "out"))
    Results(tmp_path / "out").add(records)
    assert job.done(Results.open(tmp_path / "out"))
    main(["report", str(tmp_path / "out")])
    assert "| 10,1,3 | 1 |" in (tmp_path / "out" / "results.md").read_text()
    assert "1 of 1 reach the optimum" in (tmp_path / "out" / "report.html").read_text()
