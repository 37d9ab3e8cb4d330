"""The experiment on differential privacy: a job and its page."""

from pathlib import Path

import pytest

from fedpop.report.results import Results, values
from research import hostile, privacy
from research.__main__ import main
from research.experiment import Asked
from research.seeds import middle_of

PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()


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


def committed() -> Results:
    return Results.open(privacy.EXPERIMENT.folder)


def middles(task: str, clients: int) -> dict[str, float]:
    """Of the committed records, by budget."""
    about = privacy.setting_of(task, clients)
    return {name: middle_of(values(committed().of(about, name), "angle")) for name in privacy.METHODS}


def test_the_page_has_the_records_angles() -> None:
    for clients in privacy.CLIENTS:
        found = middles(privacy.README, clients)
        assert f"| {clients:,} | {' | '.join(f'{v:.4f}' for v in found.values())} |" in PAGE
    *last, end = (f"{v:.4f}" for v in middles(privacy.ORTHONORMAL, 3000).values())
    assert f"the last row is {', '.join(last)} and {end}" in PAGE.replace("\n", " ")


@pytest.mark.parametrize("task", privacy.TASKS)
def test_three_thousand_clients_have_epsilon_4_for_half_as_much_again(task: str) -> None:
    found = middles(task, 3000)
    assert found["epsilon 4"] <= 1.5 * found[privacy.OPEN]


def test_the_page_has_the_records_of_hostile_clients() -> None:
    table = (hostile.EXPERIMENT.folder / "results.md").read_text().splitlines()
    rows = [line for line in table if line.startswith("|")][2:]
    assert len(rows) == 9
    for row in rows:
        assert row.replace("|  |", "| |") in PAGE


def test_the_page_has_the_accuracies_on_images() -> None:
    told = []
    for name in ("FedSOUL", "FedRep", "FedAvg"):
        (accuracy,) = values(committed().of(privacy.image_setting(name), "epsilon 4"), "accuracy")
        told.append(f"{name} {100 * accuracy:.1f} %")
    assert ", ".join(told) in " ".join(PAGE.split())
