"""The experiment on small clients, on a set of a few small images: records, differences and a page."""

from pathlib import Path

import pytest

from fedpop.data.image_task import ImageTask
from fedpop.report.results import Results, record
from research import full_data, small_data
from research.experiment import Asked
from tests.data.files import mnist
from tests.research.quick import shorten

PASSES = 80
TASK = ImageTask("mnist", 2, small=3, n_small=2, large=2, n_large=4, validation=0, test=4)


def test_every_method_is_run_on_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, small_data.METHODS)
    for name in full_data.TODAY:  # the leaderboard's tests have them
        monkeypatch.delitem(small_data.METHODS, name)
    monkeypatch.setattr(small_data, "PASSES", PASSES)
    monkeypatch.setattr(small_data, "TASKS", (TASK,))
    small_data.EXPERIMENT.run(out=tmp_path / "out", seeds=1, processes=1, data=mnist(tmp_path))
    records = Results.open(tmp_path / "out").records
    assert {r["method"] for r in records} == set(small_data.METHODS)
    assert {r["setting"]["share_small"] for r in records} == {0.6}
    assert all(r["cost"]["backbone_passes"] <= PASSES * (1 + 1e-9) for r in records)
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_the_first_stage_comes_first() -> None:
    jobs = small_data.jobs(Asked(Path("none"), 3))
    early = jobs[: 6 * 4 * 3]
    assert {small_data.group_of(j.setting) for j in early} == {"cifar10 S=5"}
    assert {j.setting["n_small"] for j in early} == {5, 10}
    assert {j.methods[0] for j in early} == set(small_data.FIRST_METHODS)
    assert len(jobs) == (18 + 3) * len(small_data.METHODS) * 3
    fewest = {
        (j.setting["dataset"], j.setting["classes_per_client"]) for j in jobs if j.setting["n_small"] == 2
    }
    assert fewest == {("cifar10", 5)}


def test_methods_that_nobody_has_run_stand_in_one_row(tmp_path: Path) -> None:
    setting, results = small_data.setting_of(small_data.TASKS[0]), Results(tmp_path)
    results.add([record("small-data", setting, "FedRep", 0, {"accuracy": 0.5}, {}, {})])
    first, rest = small_data.everything(results, [setting]).rows
    assert first[1] == "FedRep"
    assert rest[1].startswith("not run: FedSOUL, APFL, ")
    assert len(first) == len(rest)


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """Gains of 10 and 12 points on seeds 0 and 1; a seed that only one method has is left out."""
    setting = small_data.setting_of(small_data.TASKS[0])
    results = Results(tmp_path)
    for method, seed, accuracy, ece in (
        ("FedSOUL", 0, 0.50, 0.02),
        ("FedSOUL", 1, 0.62, 0.02),
        ("FedSOUL", 2, 0.90, 0.02),
        ("FedRep", 0, 0.40, 0.10),
        ("FedRep", 1, 0.50, 0.10),
    ):
        results.add([record("small-data", setting, method, seed, {"accuracy": accuracy, "ece": ece}, {}, {})])
    (row,) = small_data.gains(results, [setting]).rows
    # 11 +- 12.706 sd / sqrt(2), sd = sqrt(2)
    assert row == ("10 % with 2", "FedRep", "2", "+11.0", "-1.7 to +23.7", "0.20")
