"""Settings of the methods on images: from files, and what was run with others is run again."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedpop.client.local_sgd import LocalSGD
from fedpop.comparison.config import read_config
from fedpop.data.image_task import ImageTask
from fedpop.errors import FedpopWarning
from fedpop.report.results import Results
from research import small_data
from research.experiment import HERE
from research.images import entries, methods
from tests.data.files import mnist

TASK = ImageTask("mnist", 2, small=3, n_small=2, large=2, n_large=4, validation=0, test=4)


@pytest.mark.parametrize("name", ["small_data", "full_data"])
def test_every_method_can_be_made(name: str) -> None:
    model = TASK.model(0)
    made = {label: build(model) for label, build in methods(name).items()}
    assert made["FedSOUL"].describe() == type(made["FedSOUL"])(model).describe()
    assert all(made[m].name == m for m in made if m != "FedSOUL-local")


@pytest.mark.parametrize("name", ["small_data", "full_data"])
def test_searches_begin_with_methods_of_their_experiment(name: str) -> None:
    searched = read_config(HERE / name / "tune.toml").entries
    known = entries(name) | (entries("leaderboard") if name == "small_data" else {})
    assert searched[0].label == "FedSOUL"
    assert all(known[e.label].name == e.name and e.search for e in searched[1:])


def test_what_was_run_with_other_settings_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is left as it was is not."""
    monkeypatch.setattr(small_data, "PASSES", 80)
    monkeypatch.setattr(small_data, "TASKS", (TASK,))
    asked = {"out": tmp_path / "out", "processes": 1, "data": mnist(tmp_path)}

    def rates() -> list[float]:
        run = Results.open(tmp_path / "out").of(method="APFL")
        return [r["config"]["local"]["rate"] for r in run]

    small_data.EXPERIMENT.run(**asked, seeds=2, only="APFL")
    first = (tmp_path / "out" / "results.json").read_text()
    small_data.EXPERIMENT.run(**asked, seeds=1, only="APFL")
    assert (tmp_path / "out" / "results.json").read_text() == first

    build = small_data.METHODS["APFL"]
    monkeypatch.setitem(small_data.METHODS, "APFL", lambda m: replace(build(m), local=LocalSGD(rate=0.5)))
    with pytest.warns(FedpopWarning, match="2 records of APFL were made with other settings"):
        small_data.EXPERIMENT.run(**asked, seeds=1, only="APFL")
    assert rates() == [0.5]
