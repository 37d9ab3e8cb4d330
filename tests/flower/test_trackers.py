"""MLflow and TensorBoard by settings: what is wrong with these is said at once, and no run ends because of
them."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fedpop.errors import ExtraError, SettingsError
from fedpop.flower import trackers
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from fedpop.flower.trackers import RETRY_SECONDS, Tracked, trackers_of
from fedpop.run.callbacks import Callback, EarlyStop
from fedpop.run.trackers import MLflow, TensorBoard
from tests.flower.commands import Made


class Unwell(Callback):
    """A tracker whose server is away in some rounds."""

    def __init__(self, away: set[int]) -> None:
        self.away, self.seen = away, list[int]()

    def recorded(self, run: Any, metrics: dict[str, Any]) -> None:
        if metrics["round"] in self.away:
            raise ConnectionError("nobody\nanswers")
        self.seen.append(metrics["round"])

    def finished(self, run: Any) -> None:
        raise RuntimeError("closed already")


def test_a_tracker_that_fails_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    inner = Unwell({2, 3, 4})
    tracked: Any = Tracked(inner, "MLflow", clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(1, 8):
            tracked.recorded(None, {"round": number})
            now[0] += RETRY_SECONDS / 2
        tracked.finished(None)
    assert inner.seen == [1, 6, 7]  # away in round 2, left alone in 3, away in 4, left alone in 5
    told = [r.getMessage() for r in caplog.records]
    assert told[:2] == ["MLflow cannot be written to, and the run goes on without it: nobody answers"] * 2
    assert "closed already" in told[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if both packages were here."""
    monkeypatch.setattr(trackers, "find_spec", lambda package: types.SimpleNamespace())


@pytest.mark.usefixtures("installed")
def test_what_settings_name(tmp_path: Path) -> None:
    made = Made(tmp_path)
    file, text = made.server / "app" / "federation.toml", ""
    text = file.read_text()
    more = 'tensorboard = "board"\nmlflow = {experiment = "ours", tracking = "http://127.0.0.1:5000"}\n'
    file.write_text(text.replace("[run]\n", f"[run]\n{more}"))
    early, board, flow = deployment(ServerFolder(made.server)).callbacks
    assert type(early) is Callback
    assert isinstance(board, Tracked)
    assert board.shows == TensorBoard(made.server / "run" / "board")
    assert isinstance(flow, Tracked)
    assert flow.shows == MLflow("ours", "http://127.0.0.1:5000")
    file.write_text(text.replace("[run]\n", "[run]\nearly_stop = {every = 2}\n"))
    assert [type(c) for c in deployment(ServerFolder(made.server)).callbacks] == [
        EarlyStop,
        Callback,
        Callback,
    ]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensorboard": True}, "tensorboard is a folder"),
        ({"tensorboard": ""}, "tensorboard is a folder"),
        ({"mlflow": "http://127.0.0.1:5000"}, "mlflow is a table of experiment, tracking, run_name"),
        ({"mlflow": {"tracker": "x"}}, "mlflow is a table of"),
        ({"mlflow": {"experiment": 3}}, "experiment"),
    ],
)
def test_what_settings_cannot_be(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        trackers_of(given, tmp_path, "federation.toml, [run]")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_what_is_not_installed_is_said_before_anybody_is_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(ExtraError, match=rf"pip install 'fedpop\[{name}\]'"):
        trackers_of({name: "board" if name == "tensorboard" else {}}, tmp_path, "federation.toml")


def test_a_tracker_may_be_named_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its place in checkpoints, and one that was not there before starts afresh."""
    made = Made(tmp_path, rounds=2)
    made.run_deployment()
    shown = list[int]()

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, round: int) -> None:
            shown.extend([round] if name == "loss" else [])

        def flush(self) -> None: ...

        def close(self) -> None: ...

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setattr(trackers, "find_spec", lambda package: module)
    file = made.server / "app" / "federation.toml"
    file.write_text(file.read_text().replace("rounds = 2", 'rounds = 4\ntensorboard = "board"'))
    population = made.run_deployment()
    assert population.rounds == 4
    assert shown == [3, 4]
