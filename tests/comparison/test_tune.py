"""The search: the same number of trials for all, on validation examples, to the same choice every time."""

import json
import tomllib
from pathlib import Path

import pytest

import fedpop as fp
from fedpop.cli import main
from fedpop.comparison import tune as search
from fedpop.comparison.config import config_from, read_config, to_toml
from fedpop.comparison.run import fitted
from fedpop.errors import DataError, SettingsError
from fedpop.keys import Key
from fedpop.population import evaluate
from fedpop.report.results import Results, record

RAW = {
    "task": {"kind": "synthetic", "b": 6, "k": 4, "d": 2, "held_out": 4, "validation": 5},
    "run": {"rounds": 4, "participation": 3, "last": 2},
    "tune": {"trials": 3},
    "method": [
        {
            "name": "FedAvg",
            "local": {"epochs": 2, "rate": 0.001},
            "search": {"local.rate": {"log": [1e-3, 1e-2]}, "local.epochs": [1, 3]},
        },
        {"name": "FedRep", "heads": "exact", "search": {"body.rate": {"log": [1e-4, 1e-2]}}},
        {"name": "FedSOUL"},
    ],
}


def config(**tables):
    return config_from(json.loads(json.dumps(RAW)) | tables, Path("small.toml"))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    return search.tune(config(), folder, 0, show=False), folder


def test_every_method_with_a_search_has_as_many_trials(tuned):
    _, folder = tuned
    counts = {}
    for r in Results.open(folder).records:
        counts[r["method"]] = counts.get(r["method"], 0) + 1
        assert not any(name.startswith(("test_", "last_", "new_")) for name in r["metrics"])
    assert counts == {"FedAvg": 3, "FedRep": 3, "FedSOUL": 1}


def test_the_best_on_validation_is_chosen_and_written(tuned):
    choices, folder = tuned
    records = [r for r in Results.open(folder).records if r["method"] == "FedAvg"]
    best = min(records, key=lambda r: r["metrics"]["validation_nll"])
    chosen = next(c for c in choices if c.label == "FedAvg")
    assert chosen.settings == best["config"]["settings"]
    written = tomllib.loads((folder / "tuned.toml").read_text())
    assert written["method"][0] == {"name": "FedAvg"} | chosen.settings
    assert "tune" not in written
    again = read_config(folder / "tuned.toml")
    assert again.entries[0].build(again.task.task.model(0)).local.rate == chosen.settings["local"]["rate"]


def test_a_trial_is_the_run_it_says(tuned):
    choices, _ = tuned
    chosen = next(c for c in choices if c.label == "FedAvg")
    subject = config().task.make(0)
    method = fp.FedAvg(subject.model, local=fp.LocalSGD(**chosen.settings["local"]))
    population = fitted(method, subject.clients, config().terms, 0)
    assert evaluate(population, "validation").summary()["nll"] == chosen.score


def test_no_trial_sees_a_test_example(monkeypatch, tmp_path):
    seen = []
    inner = search.fitted

    def spy(method, clients, *rest, **more):
        seen.append(sorted(clients.splits))
        return inner(method, clients, *rest, **more)

    monkeypatch.setattr(search, "fitted", spy)
    c = config()
    search.run_trial(c.task, c.entries[0], c.terms, 0, {"trial": 0}, str(tmp_path))
    assert seen == [["train", "validation"]]


def scores(values, metric="nll"):
    """Records of trials with a validation score, and a test score that says the opposite."""
    return [
        record("tune", {"trial": t}, "m", seed, {f"validation_{metric}": v, f"test_{metric}": -(v or 0)}, {},
               {"settings": {"rate": t}})
        for t, row in enumerate(values)
        for seed, v in enumerate(row)
    ]  # fmt: skip


def test_choices_follow_validation_and_not_test():
    assert search.choose(scores([[3.0], [1.0], [2.0]]), "m", "nll").trial == 1
    assert search.choose(scores([[0.3], [0.1], [0.2]], "accuracy"), "m", "accuracy").trial == 0
    assert search.choose(scores([[3.0, 1.0], [1.5, 2.0]]), "m", "nll").score == 1.75  # mean over seeds


def test_a_trial_that_diverged_is_never_chosen():
    assert search.choose(scores([[None], [5.0]]), "m", "nll").trial == 1
    assert search.choose(scores([[None, -9.0], [5.0, 5.0]]), "m", "nll").trial == 1
    with pytest.raises(SettingsError, match="none of its 2 trials"):
        search.choose(scores([[None], [None]]), "m", "nll")


def test_a_run_that_fails_is_recorded_with_its_reason(monkeypatch, tmp_path):
    def fails(*_, **more):
        raise DataError("too few rows")

    monkeypatch.setattr(search, "fitted", fails)
    c = config()
    (item,) = search.run_trial(c.task, c.entries[0], c.terms, 0, {"trial": 0}, str(tmp_path))
    assert item["metrics"] == {}
    assert item["config"]["failed"] == "too few rows"


def test_trials_are_keyed_and_begin_with_what_is_written():
    entry = config().entries[0]
    one, again, other = ([t.settings for t in search.trials_of(entry, 5, seed)] for seed in (0, 0, 1))
    assert one == again
    assert one[0] == {"local": RAW["method"][0]["local"]}
    assert one[1:] != other[1:]
    assert len({t["local"]["rate"] for t in one}) == 5
    # A longer search begins with the shorter one's trials.
    assert [t.settings for t in search.trials_of(entry, 8, 0)][:5] == one


def test_draws_cover_their_spaces():
    keys = [Key(0, round=t) for t in range(200)]
    logs = [search.draw({"log": [1e-4, 1.0]}, k, "") for k in keys]
    assert min(logs) < 1e-3 < 1e-1 < max(logs) <= 1.0
    # Half of 200 lie below the geometric mean, within six standard deviations.
    assert abs(sum(v < 1e-2 for v in logs) - 100) < 6 * 200**0.5 / 2
    assert {search.draw({"whole": [2, 4]}, k, "") for k in keys} == {2, 3, 4}
    assert {search.draw(["a", "b"], k, "") for k in keys} == {"a", "b"}
    assert all(3 <= search.draw({"linear": [3, 5]}, k, "") <= 5 for k in keys)


@pytest.mark.parametrize(
    "space", [{"log": [0, 1]}, {"log": [1]}, {"linear": [2, 1]}, {"whole": [1.5, 2]}, [], 3]
)
def test_impossible_spaces_are_named(space):
    with pytest.raises(SettingsError, match=r"small.toml: method FedAvg: search 'local.rate'"):
        search.trials_of(
            config(method=[{"name": "FedAvg", "search": {"local.rate": space}}]).entries[0], 3, 0
        )


def test_mistakes_are_told_before_any_trial_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "run_jobs", lambda *_: pytest.fail("a trial was run"))
    with pytest.raises(SettingsError, match=r"unknown setting 'local\.speed'"):
        search.tune(config(method=[{"name": "FedAvg", "search": {"local.speed": [1]}}]), tmp_path, 0)
    with pytest.raises(SettingsError, match="metric is one of rmse, nll, coverage, not 'accuracy'"):
        search.tune(config(tune={"metric": "accuracy"}), tmp_path, 0)
    with pytest.raises(DataError, match="validation examples, and there are none"):
        search.tune(config(task=RAW["task"] | {"validation": 0}), tmp_path, 0)


def test_a_search_goes_on_where_it_stopped(tuned, monkeypatch):
    before, folder = tuned
    ran = []
    inner = search.run_trial
    monkeypatch.setattr(search, "run_trial", lambda *a: (ran.append(a[4]["trial"]), inner(*a))[1])
    assert search.tune(config(), folder, 0, show=False) == before
    assert ran == []
    search.tune(config(tune={"trials": 4}), folder, 0, show=False)
    assert ran == [3, 3]


def test_the_command_writes_a_file_that_compare_takes(tmp_path, capsys):
    path = tmp_path / "small.toml"
    path.write_text(to_toml(RAW | {"tune": {"trials": 2}, "method": RAW["method"][:1]}))
    main(["tune", str(path), "--out", str(tmp_path / "t"), "--processes", "1"])
    assert "local (" in capsys.readouterr().out
    assert "rate 0.0" in (tmp_path / "t" / "results.md").read_text()
    assert "FedAvg" in (tmp_path / "t" / "report.html").read_text()
    tuned = tmp_path / "t" / "tuned.toml"
    main(["compare", str(tuned), "--out", str(tmp_path / "c"), "--processes", "1"])
    assert len(Results.open(tmp_path / "c").records) == 1


def test_the_best_coverage_is_the_one_that_was_promised():
    records = [
        record("tune", {"trial": t}, "a", 0, {"validation_coverage": c}, {}, {"settings": {"t": t}})
        for t, c in enumerate((0.7, 0.88, 1.0))
    ]
    assert search.choose(records, "a", "coverage").trial == 1
