"""Experiments: one place to add one, the same words for all, and words that make no sense refused."""

import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import research
from fedpop.comparison.runner import run_jobs
from fedpop.comparison.truth import setting_of
from fedpop.data.synthetic import SyntheticTask
from fedpop.report.records import Report
from fedpop.report.results import Record, Results, record
from fedpop.version import __version__
from research import EXPERIMENTS, drift, experiment, small_data
from research.__main__ import main
from research.experiment import Asked, Experiment, Job
from research.images import settings_in
from research.synthetic import TASKS

NAMES = [found.name for found in iter_modules(research.__path__) if found.ispkg]
MODULES = {name: import_module(f"research.{name}") for name in NAMES}


def instance(name: str) -> Experiment:
    found = MODULES[name.replace("-", "_")].EXPERIMENT
    assert isinstance(found, Experiment)
    return found


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the jobs of every experiment can be built: no images are read; one folder has records."""
    monkeypatch.setattr(experiment, "prepare", lambda *_: None)
    there = record("synthetic", setting_of(TASKS[0]), "FedSOUL", 4, {"local_optimum": 1.0}, {}, {})
    Results(tmp_path / "synthetic").add([there])
    return tmp_path


def words(name: str, room: Path) -> list[str]:
    """All the words that make sense for an experiment."""
    own = instance(name)
    out = [name, "--out", str(room / name), "--processes", "3"]
    out += [] if own.seeds is None else ["--seeds", "2"]
    out += ["--passes", "40000"] if own.budgets else []
    return out + (["--data-dir", str(room)] if own.data else [])


# --- one place ---------------------------------------------------------------------------------


def test_every_experiment_is_listed_under_its_own_name_and_nothing_else_is() -> None:
    assert {n.replace("_", "-") for n, m in MODULES.items() if hasattr(m, "EXPERIMENT")} == set(EXPERIMENTS)
    assert all(instance(name).name == name for name in EXPERIMENTS)
    assert all(sentence.endswith(".") for sentence in EXPERIMENTS.values())


def test_everything_of_an_experiment_is_in_its_folder() -> None:
    for name in EXPERIMENTS:
        own = instance(name)
        assert own.folder.parent == Path(MODULES[name.replace("-", "_")].__file__ or "").parent
        assert {"results.json", "results.md", "report.html"} <= {path.name for path in own.folder.iterdir()}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_jobs_are_told_apart_and_can_go_to_another_process(name: str, room: Path) -> None:
    own = instance(name)
    jobs = own.jobs(Asked(room / name, own.seeds or 0, room))
    assert len({job.label for job in jobs}) == len(jobs) > 0
    assert len({(str(job.setting), job.seed, job.methods) for job in jobs}) == len(jobs)
    assert all(getattr(sys.modules[job.call.__module__], job.call.__name__) is job.call for job in jobs)
    assert not any(job.done(Results(room)) for job in jobs)


# --- the same words ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_experiments_take_the_same_words(name: str, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(experiment, "run_jobs", lambda *told: ran.append(told))
    monkeypatch.setattr(Report, "tell", lambda self, results: ran.append(results.folder))
    main([*words(name, room), "--only", "seed"])
    (jobs, results, processes, title), folder = ran
    assert (folder, results.folder, processes, title) == (room / name, room / name, 3, name)
    assert all(job.setting.get("passes", 40000) in (40000, 10000, 2500) for job in jobs)
    assert {job.seed for job in jobs} == ({0, 1, 3, 4} if name == "restarts" else {0, 1})
    ran.clear()
    main([*words(name, room), "--only", jobs[-1].label])
    assert [job.label for job in ran[0][0]] == [jobs[-1].label]


def test_only_main_are_the_six_settings_of_the_paper(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(experiment, "run_jobs", lambda jobs, *_: ran.extend(jobs))
    monkeypatch.setattr(Report, "tell", lambda *_: None)
    main(["synthetic", "--out", str(room / "new"), "--seeds", "1", "--only", "main"])
    assert [job.setting for job in ran] == [setting_of(task) for task in TASKS[:6]]


def test_a_part_is_run_told_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "ROUNDS", 2)
    monkeypatch.setattr(drift, "METHODS", (drift.PLAIN, "20 epochs"))
    monkeypatch.setattr(drift, "SyntheticTask", lambda: SyntheticTask(b=6, k=4, held_out=2))
    asked = ["drift", "--out", str(tmp_path), "--seeds", "1", "--processes", "1", "--only"]
    main([*asked, "constant"])
    records = Results.open(tmp_path).records
    assert {r["setting"]["steps"] for r in records} == {"constant"}
    assert "| constant | 20 epochs | 1 |" in (tmp_path / "results.md").read_text()
    assert "decreasing" not in (tmp_path / "results.md").read_text()
    assert "local epochs a round" in (tmp_path / "report.html").read_text()
    monkeypatch.setattr(drift, "job", lambda *_: pytest.fail("it was run again"))
    main([*asked, "constant"])
    assert Results.open(tmp_path).records == records


def test_without_a_name_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    told = capsys.readouterr().out
    assert all(name in told and sentence in told for name, sentence in EXPERIMENTS.items())


def test_a_budget_that_was_asked_for_is_told_beside_the_experiments_own(tmp_path: Path) -> None:
    task, results, own = small_data.TASKS[0], Results(tmp_path), small_data.EXPERIMENT

    def add(passes: int) -> str:
        setting, scores = small_data.setting_of(task, passes), {"accuracy": 0.5}
        results.add([record("small-data", setting, "FedSOUL", 0, scores, {}, {})])
        return own.made(results).partition("The command is: ")[2]

    assert own.command(results) == "python -m research small-data"
    assert add(1000) == "python -m research small-data --passes 1000"
    assert all(", 1,000 passes" in title for title in own.sheets(results))
    assert add(small_data.PASSES) == ""  # no one command makes both
    titles = list(own.sheets(results))
    assert len(titles) == 2 * len([title for title in titles if ", 1,000 passes" in title])


def made(method: str) -> list[Record]:
    return [record("synthetic", {"b": 1}, method, 0, {"angle": 1.0}, {}, {})]


def test_what_another_version_made_is_made_again_on_request(tmp_path: Path) -> None:
    ran: list[str] = []

    def work(method: str) -> list[Record]:
        ran.append(method)
        return made(method)

    results = Results.open(tmp_path / "results")
    results.add([old | {"version": "0.0.1"} for m in "ab" for old in made(m)])
    results.add(made("c"))
    jobs = [Job(work, (m,), m, {"b": 1}, 0, (m,)) for m in "abc"]
    run_jobs(jobs, results, 0, "test")
    assert ran == []
    run_jobs([replace(job, again=True) for job in jobs], results, 0, "test")
    assert ran == ["a", "b"]
    assert {r["version"] for r in results.records} == {__version__}


def test_the_page_of_a_search_beside_an_experiment_is_made_again_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(small_data.EXPERIMENT.folder.parent / "tuning" / "results.json", tmp_path)
    main(["report", str(tmp_path)])
    assert "Chosen on validation examples" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


# --- words that make no sense ------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *told: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*told])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_wrong_name_lists_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "theorie")
    assert told.startswith("research: there is no experiment 'theorie'")
    assert all(name in told and sentence in told for name, sentence in EXPERIMENTS.items())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_word_that_an_experiment_cannot_use_is_refused(
    name: str, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(room / name))
    if not instance(name).data:
        told = refused(capsys, name, *out, "--data-dir", str(room))
        assert told == f"research: {name} draws its own data: leave out --data-dir\n"
    if not instance(name).budgets:
        told = refused(capsys, name, *out, "--passes", "9")
        assert told == f"research: {name} counts rounds, not backbone passes: leave out --passes\n"
    if instance(name).seeds is None:
        assert "leave out --seeds" in refused(capsys, name, *out, "--seeds", "2")
    assert not (room / name / "results.md").exists()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (("--seeds", "0"), "--seeds must be at least 1, not 0"),
        (("--processes", "0"), "--processes must be at least 1, not 0"),
        (("--only", "nothing"), "--only nothing: no job of drift is called so; the first is 'constant steps"),
    ],
)
def test_impossible_words_are_told(
    told: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(capsys, "drift", "--out", str(tmp_path), *told)


def test_missing_images_are_told_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = str(tmp_path / "none")
    told = refused(capsys, "defaults", "--out", str(tmp_path / "out"), "--data-dir", none)
    assert f"in {none}/cifar10 (the folder given)" in told
    assert not (tmp_path / "out" / "results.md").exists()


def test_a_folder_of_another_experiment_is_left_alone(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (room / "synthetic" / "results.json").read_bytes()
    told = refused(capsys, "drift", "--out", str(room / "synthetic"))
    assert "holds records of synthetic; use another --out" in told
    assert (room / "synthetic" / "results.json").read_bytes() == before


def test_what_remains_is_told_in_hours_by_the_seconds_of_earlier_runs(tmp_path: Path) -> None:
    """The same method's on the same images; on any; and everybody's where it has none."""
    results = Results(tmp_path)
    for name, images, passes, seconds in (
        ("FedRep", "cifar10", 1000.0, 3.6),
        ("FedRep", "cifar100", 1000.0, 7.2),
        ("FedAvg", "cifar10", 1000.0, 36.0),
    ):
        cost = {"backbone_passes": passes, "seconds": seconds}
        results.add([record("full-data", {"dataset": images}, name, 0, {}, cost, {})])

    def hours(name: str, images: str) -> float | None:
        return experiment.hours([_of(name, {"dataset": images, "passes": 1_000_000})], results)

    assert hours("FedRep", "cifar10") == pytest.approx(1.0)
    assert hours("FedRep", "mnist") == pytest.approx(1.5)
    assert hours("Ditto", "cifar10") == pytest.approx(2.0)
    jobs = [_of("FedRep", {"dataset": "cifar10", "passes": 500_000}), _of("FedRep", {"rounds": 3})]
    assert experiment.ahead(jobs[:1], 4, results) == (
        "1 of 4 runs are to be made: about 0.5 hours of one core, as runs took before"
    )
    assert experiment.ahead(jobs, 4, results) == "2 of 4 runs are to be made"
    assert experiment.hours(jobs[:1], Results(tmp_path / "none")) is None


def _of(method: str, setting: dict[str, object]) -> Job:
    return Job(list, (), method, setting, 0, (method,))


def test_pages_say_whose_records_were_made_with_other_settings(tmp_path: Path) -> None:
    """Budgets other than the experiment's own are looked at, too."""
    own = small_data.EXPERIMENT
    config = settings_in(small_data.METHODS["APFL"](small_data.TASKS[0].model(0)))
    results = Results(tmp_path)
    for passes, alpha in ((small_data.PASSES, config["alpha"]), (500, 0.123)):
        setting = small_data.setting_of(small_data.TASKS[0], passes)
        held = config | {"alpha": alpha}
        results.add([record("small-data", setting, "APFL", 0, {"accuracy": 0.5}, {}, held)])
    assert own.outdated(Results(tmp_path, results.of(small_data.setting_of(small_data.TASKS[0])))) == ""
    told = "Made with other settings than they have now, and anew by the command: APFL (1)."
    assert own.outdated(results) == told
    assert told in own.made(results)
