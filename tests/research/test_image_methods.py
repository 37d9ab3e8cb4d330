"""Settings of the methods on images: from files, and what was run with others is run again."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedpop.client.local_sgd import LocalSGD
from fedpop.comparison.config import read_config
from fedpop.comparison.tune import trials_of
from fedpop.data.image_task import ImageTask
from fedpop.errors import FedpopWarning
from fedpop.report.results import Results
from research import small_data
from research.experiment import HERE
from research.images import entries, methods, settings_of
from tests.data.files import mnist

TASK = ImageTask("mnist", 2, small=3, n_small=2, large=2, n_large=4, validation=0, test=4)


@pytest.mark.parametrize("name", ["small_data", "full_data"])
def test_every_method_can_be_made(name: str) -> None:
    model = TASK.model(0)
    made = {label: build(model) for label, build in methods(name).items()}
    assert made["FedSOUL"].describe() == type(made["FedSOUL"])(model).describe()
    assert all(made[m].name == m for m in made if not m.startswith("FedSOUL-"))


@pytest.mark.parametrize("place", ["small_data/tune", "full_data/tune", "full_data/tune-own"])
def test_searches_are_of_the_methods_of_their_experiment(place: str) -> None:
    """Each in one of them, and every trial can be made."""
    config = read_config(HERE / f"{place}.toml")
    known, searched = entries(place.partition("/")[0]), config.entries
    rivals = searched if place.endswith("own") else searched[1:]
    assert searched[0].label == "FedSOUL" or rivals == searched
    assert all(known[e.label].name == e.name and e.search for e in rivals)
    model = TASK.model(0)
    for entry in rivals:
        trials = trials_of(entry, config.tune.trials, config.tune.seed)
        assert len({str(trial.build(model).describe()) for trial in trials}) == config.tune.trials == 8


def test_every_method_of_small_and_of_full_data_is_in_a_search() -> None:
    for name, places in (("small_data", ["tune"]), ("full_data", ["tune", "tune-own"])):
        searched = [e.label for place in places for e in read_config(HERE / name / f"{place}.toml").entries]
        assert len(searched) == len(set(searched))
        assert set(searched) == {n for n in entries(name) if not n.startswith("FedSOUL-")}


def test_long_runs_differ_where_the_file_says_so() -> None:
    short, long = entries("full_data"), entries("full_data", long=True)
    changed = {name for name in short if short[name].settings != long[name].settings}
    assert changed == {"FedRep", "FedAvg-FT", "Ditto"}
    assert all(long[name].settings["schedule"] == {"kind": "Cosine"} for name in changed)
    told = {row[0]: row[1] for row in settings_of("full_data").rows}
    assert told["FedRep, long runs"] == "the same, but for schedule (kind Cosine)"


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
