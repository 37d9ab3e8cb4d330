"""What image experiments share: a run that breaks down is recorded as such, and some need everybody."""

from pathlib import Path

import pytest
import torch

from fedpop.client.local_sgd import LocalSGD
from fedpop.data.image_task import FullImageTask
from fedpop.errors import CheckpointError, FedpopWarning
from fedpop.methods.fedavg import FedAvg
from fedpop.methods.fedrep import FedRep
from fedpop.methods.l2gd import L2GD
from fedpop.report.results import Results
from fedpop.run.lock import locked_folder
from research.images import COLUMNS, Cell, Run, rows, trained
from tests.data.files import mnist

TASK = FullImageTask("mnist", 2, b=5)
SETTING = {"dataset": "mnist", "passes": 1000}


def test_a_run_that_breaks_down_has_a_record_without_scores(tmp_path: Path) -> None:
    wild = FedAvg(TASK.model(0, "mlp"), local=LocalSGD(5, 1e30))
    federation = TASK.make(mnist(tmp_path), 0)
    run = Run("test", Cell(TASK, SETTING, "wild", "wild"), 0, None, tmp_path / "out")
    (found,) = run.measured(wild, federation)
    assert found["metrics"] == {"accuracy": None}
    assert not list((tmp_path / "out").glob("runs/*"))
    results = Results(tmp_path, [found])
    (wild_row, other) = rows(results, SETTING, {"wild": None, "other": None})
    assert wild_row == ("wild", "1", "broke down", *["-"] * (len(COLUMNS) - 3))
    assert other == ("other", "0", "not run", *["-"] * (len(COLUMNS) - 3))


def test_a_method_that_needs_everybody_has_everybody(tmp_path: Path) -> None:
    federation, model = TASK.make(mnist(tmp_path), 0), TASK.model(0, "mlp")
    everyone = trained(L2GD(model), federation, 100, 0, tmp_path / "one", active=2)
    assert {m["active"] for m in everyone.history} == {5}
    some = trained(FedAvg(model), federation, 100, 0, tmp_path / "two", active=2)
    assert {m["active"] for m in some.history} == {2}


def test_a_run_that_others_settings_left_behind_is_begun_anew(tmp_path: Path) -> None:
    federation, model, out = TASK.make(mnist(tmp_path), 0), TASK.model(0, "mlp"), tmp_path / "run"
    trained(FedAvg(model, local=LocalSGD(rate=0.02)), federation, 100, 0, out, active=2)
    with pytest.warns(FedpopWarning, match="begun anew"):
        found = trained(FedAvg(model), federation, 100, 0, out, active=2)
    clean = trained(FedAvg(model), federation, 100, 0, tmp_path / "clean", active=2)
    assert all(torch.equal(found.published[k], v) for k, v in clean.published.items())


def test_a_run_that_is_in_use_stays(tmp_path: Path) -> None:
    federation, model, out = TASK.make(mnist(tmp_path), 0), TASK.model(0, "mlp"), tmp_path / "run"
    trained(FedAvg(model), federation, 100, 0, out, active=2)
    before = sorted(out.rglob("*"))
    with locked_folder(out), pytest.raises(CheckpointError, match="process"):
        trained(FedAvg(model, local=LocalSGD(rate=0.02)), federation, 100, 0, out, active=2)
    assert sorted(p for p in out.rglob("*") if p.name != ".lock") == [p for p in before if p.name != ".lock"]


def test_a_run_with_several_budgets_makes_what_each_alone_would(tmp_path: Path) -> None:
    """To the bit, where no rate falls."""
    federation, small = TASK.make(mnist(tmp_path), 0), SETTING | {"passes": 400}
    method = FedRep(TASK.model(0, "mlp"), head=LocalSGD(2, 0.1), body=LocalSGD(2, 0.1, 10, momentum=0.9))
    both = Run("test", Cell(TASK, SETTING, "both", "both", smaller=(small,)), 0, None, tmp_path / "out")
    found = both.measured(method, federation, active=2)
    assert [r["setting"]["passes"] for r in found] == [400, 1000]
    assert found[0]["cost"]["rounds"] < found[1]["cost"]["rounds"]
    for r in found:
        alone = Run("test", Cell(TASK, r["setting"], "both", "one"), 0, None, tmp_path / "alone")
        (one,) = alone.measured(method, federation, active=2)
        assert one["metrics"] == r["metrics"]
        assert one["config"] == r["config"]
        assert {k: v for k, v in one["cost"].items() if k != "seconds"} == {
            k: v for k, v in r["cost"].items() if k != "seconds"
        }
