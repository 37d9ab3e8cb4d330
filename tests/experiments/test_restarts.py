"""Restarts of seeds that missed: which ones, what is recorded, and the table."""

import pytest
import torch

from fedpop.cli import main
from fedpop.experiments import restarts
from fedpop.experiments.experiment import Asked
from fedpop.report.results import Results, record

SETTING = {"b": 10, "d": 1, "k": 3, "share_small": 0.9, "n_small": 5, "n_large": 10}


@pytest.fixture
def synthetic(tmp_path):
    """Two seeds, of which the second missed."""
    folder = tmp_path / "synthetic"
    items = [
        record("synthetic", SETTING, "FedSOUL", seed, {"local_optimum": float(seed)}, {}, {})
        for seed in (0, 1)
    ]
    Results(folder).add([*items, record("synthetic", SETTING, "Exact", 1, {}, {}, {})])
    return folder


def test_only_what_missed_is_run_again(synthetic, tmp_path):
    (job,) = restarts.jobs(Asked(tmp_path / "restarts"))
    assert job.seed == 1
    assert job.setting == SETTING | {"restarts": restarts.RESTARTS}


def test_a_job_returns_the_best_of_its_runs(synthetic, monkeypatch, tmp_path, capsys):
    whole = restarts.method_named
    monkeypatch.setattr(restarts, "method_named", lambda name, model: (whole(name, model)[0], 60))
    before = torch.get_num_threads()
    records = restarts.job(SETTING, 2, 1)
    torch.set_num_threads(before)
    metrics = records[0]["metrics"]
    assert metrics["gap"] == min(metrics[f"gap_{i}"] for i in range(3))
    assert metrics["gap"] > -1e-3
    assert metrics["settled"] == 1.0
    monkeypatch.setattr(restarts, "RESTARTS", 2)
    (job,) = restarts.jobs(Asked(tmp_path / "out"))
    Results(tmp_path / "out").add(records)
    assert job.done(Results.open(tmp_path / "out"))
    main(["report", str(tmp_path / "out")])
    assert "| 10,1,3 | 1 |" in (tmp_path / "out" / "results.md").read_text()
    assert "1 of 1 are settled" in (tmp_path / "out" / "report.html").read_text()


def test_nothing_to_run_again_is_a_clear_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["experiment", "restarts", "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "no records of a local optimum" in capsys.readouterr().err
