"""Calibration: rivals are run, the other methods' records are those of full-data, and curves add up."""

from pathlib import Path

import pytest

from fedpop.data.image_task import FullImageTask
from fedpop.report.results import Results, record
from research import calibration, full_data
from research.experiment import Asked
from tests.data.files import mnist

BINS = {
    "bin0_confidence": 0.55, "bin0_accuracy": 0.5, "bin0_count": 6,
    "bin1_confidence": 0.95, "bin1_accuracy": 1.0, "bin1_count": 4,
}  # fmt: skip
SCORES = {"accuracy": 0.7, "nll": 0.5, "brier": 0.4, "ece": 0.05, "ece_per_client": 0.1}


def test_rivals_are_run_and_the_others_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TASKS", (FullImageTask("mnist", 2, b=5),))
    monkeypatch.setattr(full_data, "PASSES", 420)
    (setting,) = calibration.settings(Results(tmp_path))
    beside = Results(tmp_path / "full-data")
    beside.add([record("full-data", setting, "FedSOUL", 0, SCORES | BINS, {"seconds": 3.0}, {})])
    out, data = tmp_path / "calibration", mnist(tmp_path)
    calibration.EXPERIMENT.run(out=out, processes=1, data=data)
    records = {r["method"]: r for r in Results.open(out).records}
    assert set(records) == {"FedSOUL", "FedBE", "QLSD", "DG-LMC"}
    for r in records.values():
        m = r["metrics"]
        bins = calibration.curve([r])
        total = sum(n for _, _, n in bins)
        assert total == (10 if r["method"] == "FedSOUL" else 20)
        # Pooled ECE is the bins' mean distance.
        ece = sum(abs(sure - right) * n for sure, right, n in bins) / total
        assert ece == pytest.approx(m["ece"], abs=1e-9)
        assert r["cost"]["backbone_passes"] <= 420 * (1 + 1e-9)
    text = (out / "results.md").read_text()
    assert "| FedSOUL | 1 | 70.0 % | 0.500 | 0.400 | 0.050 | 0.100 | +0.010 |" in text
    assert "| FedRep | 0 | not run |" in text
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "The command is: python -m research calibration" in page


def test_a_record_that_has_changed_is_taken_again(tmp_path: Path) -> None:
    setting = calibration.settings(Results(tmp_path))[0]
    beside, own = Results(tmp_path / "full-data"), Results(tmp_path / "own")

    def pending() -> list[str]:
        jobs = calibration.jobs(Asked(tmp_path / "own", 1))
        return [j.label for j in jobs if j.methods == ("FedRep",) and not j.done(own)]

    assert pending() == []
    beside.add([record("full-data", setting, "FedRep", 0, SCORES, {}, {})])
    assert pending() == ["cifar10 S=5, FedRep, seed 0"]
    own.add(calibration.taken(beside.records[0]))
    assert pending() == []
    beside.add([record("full-data", setting, "FedRep", 0, SCORES | {"accuracy": 0.8}, {}, {})])
    assert pending() == ["cifar10 S=5, FedRep, seed 0"]
    beside.add([record("full-data", setting, "FedRep", 7, SCORES, {}, {})])
    assert pending() == ["cifar10 S=5, FedRep, seed 0"]  # a seed that nobody asked for


def test_bins_of_seeds_are_joined() -> None:
    found = [{"metrics": BINS}, {"metrics": BINS | {"bin0_confidence": 0.95, "bin0_accuracy": 0.0}}]
    # .55 lies in the ninth of 15 bins, .95 in the last: 4 + 6 + 4 images, 8 of them right.
    assert calibration.curve(found) == [(0.55, 0.5, 6), (pytest.approx(0.95), pytest.approx(8 / 14), 14)]
    assert calibration.too_sure([{"metrics": BINS}]) == pytest.approx((6 * 0.05 - 4 * 0.05) / 10)


def test_in_its_own_folder_it_takes_the_committed_records() -> None:
    folder = calibration.EXPERIMENT.folder
    assert calibration.beside(folder) == full_data.EXPERIMENT.folder
    assert all(job.done(Results.open(folder)) for job in calibration.jobs(Asked(folder, 1)))
