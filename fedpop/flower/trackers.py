"""Rounds across sites, live in MLflow and TensorBoard, as ``[run]`` says. No run ends because of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpop.errors import ExtraError, SettingsError
from fedpop.run.callbacks import Callback
from fedpop.run.trackers import MLflow, TensorBoard

if TYPE_CHECKING:
    from fedpop.federation.clients import Federation
    from fedpop.run.members import Members
    from fedpop.run.run import Run

log = logging.getLogger("fedpop.server")
TRACKERS = ("mlflow", "tensorboard")
RETRY_SECONDS = 60.0
"""What could not be written to is left alone for so long: rounds must not wait for it."""
MLFLOW = ("experiment", "tracking", "run_name")


@dataclass
class Tracked(Callback):
    """A callback that only shows what happens: where it fails the log says so, and the run goes on."""

    shows: Callback
    name: str
    clock: Callable[[], float] = time.monotonic
    _again: float = field(default=0.0, init=False)

    def check(self, federation: Federation | Members) -> None:
        self.shows.check(federation)

    def recorded(self, run: Run, metrics: dict[str, Any]) -> None:
        if self.clock() >= self._again:
            self._tried(lambda: self.shows.recorded(run, metrics))

    def finished(self, run: Run) -> None:
        self._tried(lambda: self.shows.finished(run))

    def _tried(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a server of somebody else's answers
            self._again = self.clock() + RETRY_SECONDS
            words = " ".join(str(error).split())[:300]
            log.warning("%s cannot be written to, and the run goes on without it: %s", self.name, words)

    def state(self) -> dict[str, Any]:
        return self.shows.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.shows.restore(state)


def trackers_of(run: dict[str, Any], folder: Path, where: str) -> list[Callback]:
    """Those that ``[run]`` names, which are taken out of it; where one is not named something that does
    nothing, so that each has its place in checkpoints."""
    found = [Callback(), Callback()]
    board, flow = run.pop("tensorboard", None), run.pop("mlflow", None)
    if board is not None:
        if not isinstance(board, str) or not board:
            raise SettingsError(f'{where}: tensorboard is a folder, such as "board", not {board!r}')
        _require("tensorboard", "tensorboard")
        found[0] = Tracked(TensorBoard(folder / board), "TensorBoard")
    if flow is not None:
        if not isinstance(flow, Mapping) or any(name not in MLFLOW for name in flow):
            raise SettingsError(f"{where}: mlflow is a table of {', '.join(MLFLOW)}, not {flow!r}")
        _require("mlflow", "mlflow")
        found[1] = Tracked(MLflow(**flow), "MLflow")
    return found


def _require(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ExtraError(f"curves of a run need {package}: pip install 'fedpop[{extra}]'")
