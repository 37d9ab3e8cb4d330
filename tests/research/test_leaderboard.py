"""The leaderboard, on a set of a few small images: every method, and one from a user's own file."""

from pathlib import Path

import pytest
import torch

from fedpop.data.image_task import ImageTask
from fedpop.errors import SettingsError
from fedpop.report import terminal
from fedpop.report.results import Results, record
from research import leaderboard, small_data
from research.__main__ import main
from research.images import settings_in
from tests.data.files import mnist
from tests.research.quick import shorten

TASK = ImageTask("mnist", 2, small=3, n_small=2, large=2, n_large=4, validation=0, test=4)
OWN = '''
from dataclasses import dataclass
from typing import ClassVar

import fedpop as fp


@dataclass(frozen=True, kw_only=True)
class Halved(fp.FedAvg):
    """FedAvg that makes half of the mean move."""

    server_rate: float = 0.5
    name: ClassVar[str] = "Halved"
'''


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, leaderboard.METHODS)
    for name in set(leaderboard.METHODS) - {"FedSOUL", "FedRep", "pFedFDA", "FedAvg"}:
        monkeypatch.delitem(leaderboard.METHODS, name)
    monkeypatch.setattr(leaderboard, "PASSES", 60)
    monkeypatch.setattr(leaderboard, "TASK", TASK)
    monkeypatch.setattr(leaderboard, "NEW", 2)
    monkeypatch.setattr(leaderboard, "EXAMPLES", (0, 2))


@pytest.mark.usefixtures("few")
def test_every_row_has_its_command_and_a_users_method_joins(tmp_path: Path) -> None:
    data, out, own = mnist(tmp_path), tmp_path / "out", tmp_path / "halved_method.py"
    leaderboard.EXPERIMENT.run(out=out, seeds=1, processes=1, data=data, only="seed 0")
    own.write_text(OWN)
    words = ["leaderboard", "--out", str(out), "--seeds", "1", "--processes", "1", "--data-dir", str(data)]
    main([*words, "--method", str(own)])
    records = Results.open(out).records
    assert {r["method"] for r in records} == {*leaderboard.METHODS, "Halved"}
    for r in records:
        served = {n for n in leaderboard.EXAMPLES if f"new_{n}_accuracy" in r["metrics"]}
        assert served == ({2} if r["method"] == "FedRep" else {0, 2})
        assert r["cost"]["backbone_passes"] <= 60 * (1 + 1e-9)
    halved = next(r for r in records if r["method"] == "Halved")
    assert halved["config"]["server_rate"] == 0.5
    text = (out / "results.md").read_text()
    assert '--only "FedRep, seed" --seeds 1 |' in text
    assert "| Halved | 1 |" in text
    assert "--method FILE --seeds 1 |" in text
    assert "no model" in text
    accuracies = [r[2] for r in leaderboard.table(Results.open(out), 60).rows]
    assert accuracies == sorted(accuracies, key=lambda a: -float(a.split()[0]))
    # The page can be made again where nobody knows the user's file.
    own.unlink()
    main(["report", str(out)])
    assert (out / "results.md").read_text() == text


def test_what_is_no_method_is_refused(tmp_path: Path) -> None:
    empty, taken = tmp_path / "empty_file.py", tmp_path / "taken_name.py"
    empty.write_text("import fedpop as fp\nfrom fedpop import FedAvg\n")
    taken.write_text(OWN.replace('"Halved"', '"FedRep"'))
    with pytest.raises(SettingsError, match="defines no method"):
        leaderboard.own_methods(empty)
    with pytest.raises(SettingsError, match="FedRep is the name of a method that is there already"):
        leaderboard.own_methods(taken)
    with pytest.raises(SettingsError, match="no such file"):
        leaderboard.EXPERIMENT.asked(method=tmp_path / "nowhere.py")
    with pytest.raises(SettingsError, match="--method is for leaderboard"):
        small_data.EXPERIMENT.asked(method=empty)


def test_methods_without_a_record_are_named_and_those_that_broke_down_come_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, setting = Results(tmp_path), leaderboard.setting_of()
    for name, accuracy in (("FedAvg", 0.2), ("FedRep", None), ("FedSOUL", 0.6)):
        metrics = {} if accuracy is None else {"accuracy_worst_decile": 0.1, "nll": 1.0, "ece": 0.1}
        results.add([record("leaderboard", setting, name, 0, metrics | {"accuracy": accuracy}, {}, {})])
    assert leaderboard.ranked(results, leaderboard.PASSES) == ["FedSOUL", "FedAvg", "FedRep"]
    assert leaderboard.table(results, leaderboard.PASSES).rows[2][2] == "broke down"
    rest = leaderboard.table(results, leaderboard.PASSES).rows[3]
    assert rest[0].startswith("not run: ")
    assert "pFedFDA" in rest[0]
    assert "FedSOUL" not in rest[0]
    assert rest[-1] == "python -m research leaderboard"
    leaderboard.show(results, terminal.console())
    told = capsys.readouterr().out
    assert "60.0 %" in told
    assert "python -m" not in told
    assert "pFedFDA" in told.partition("Not run yet: ")[2]


@pytest.mark.usefixtures("few")
def test_small_datas_records_stand_in_until_newcomers_were_there(tmp_path: Path) -> None:
    """The same clients, seed and budget: a run of ours replaces the row, nothing else does."""
    data, out = mnist(tmp_path), tmp_path / "out"
    theirs = Results(tmp_path / "small-data")
    for name, accuracy in (("FedAvg", 0.3), ("FedRep", 0.4)):
        found = {"accuracy": accuracy, "accuracy_worst_decile": 0.1, "nll": 1.0, "ece": 0.1}
        cost = {"rounds": 1, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "backbone_passes": 60}
        config = settings_in(leaderboard.METHODS[name](TASK.model(0)))
        theirs.add([record("small-data", small_data.setting_of(TASK, 60), name, 0, found, cost, config)])
    words = ["leaderboard", "--out", str(out), "--seeds", "1", "--processes", "1", "--data-dir", str(data)]
    main([*words, "--only", "from small-data"])
    first, second, rest = leaderboard.table(Results.open(out), 60).rows
    assert (first[0], second[0]) == ("FedRep", "FedAvg")
    assert rest[0] == "not run: FedSOUL, pFedFDA"
    assert first[6:10] == ("not run", "-", "not run", "-")
    assert first[-1].startswith("python -m research small-data --only ")
    main([*words, "--only", "FedAvg, seed"])
    rows = {row[0]: row for row in leaderboard.table(Results.open(out), 60).rows}
    assert rows["FedAvg"][6] != "not run"
    assert rows["FedAvg"][-1].startswith("python -m research leaderboard --only ")
    assert rows["FedRep"] == first
    jobs = leaderboard.jobs(leaderboard.EXPERIMENT.asked(out, 1, data))
    done = {job.label for job in jobs if job.done(Results.open(out))}
    assert "from small-data, FedRep, seed 0" in done
    assert "leaderboard, FedAvg, seed 0" in done
    assert "leaderboard, FedRep, seed 0" not in done


def test_its_clients_are_those_of_small_data(tmp_path: Path) -> None:
    data = mnist(tmp_path)
    alone = TASK.make(data, 0)
    ours, _ = TASK.split(data, 0, 2)
    for split in ("train", "test"):
        assert torch.equal(alone.splits[split].y, ours.splits[split].y)
        assert torch.equal(alone.splits[split].x, ours.splits[split].x)
