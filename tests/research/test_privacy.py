"""The experiment on differential privacy: a job and its page."""

from pathlib import Path

import pytest

from fedpop.report.results import Results
from research import privacy
from research.__main__ import main
from research.experiment import Asked


def test_a_job_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(privacy, "ROUNDS", 3)
    monkeypatch.setattr(privacy, "CLIENTS", (20,))
    monkeypatch.setattr(privacy, "EPSILONS", (8.0, 1.0))
    monkeypatch.setattr(privacy, "METHODS", (privacy.OPEN, "epsilon 8", "epsilon 1"))
    results = Results.open(tmp_path)
    results.add(privacy.job(privacy.README, 20, 0))
    assert {r["method"] for r in results.records} == set(privacy.METHODS)
    assert all(0 <= r["metrics"]["angle"] <= 1 for r in results.records)
    results.add(privacy.job(privacy.ORTHONORMAL, 20, 0))
    mine = [job for job in privacy.jobs(Asked(tmp_path, 1)) if not job.label.startswith("images")]
    assert all(job.done(results) for job in mine)
    main(["report", str(tmp_path)])
    assert "principal angle to the truth" in (tmp_path / "report.html").read_text()
