"""Rounds as they happen, in MLflow and TensorBoard."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpop.checked import Checked
from fedpop.errors import SettingsError
from fedpop.extras import library
from fedpop.files import writable_folder
from fedpop.run.callbacks import Callback
from fedpop.run.metrics import scalars

if TYPE_CHECKING:
    from fedpop.federation.clients import Federation
    from fedpop.run.members import Members
    from fedpop.run.run import Run

WHAT = "curves in MLflow"


@dataclass
class MLflow(Checked, Callback):
    """Show every round's numbers live in MLflow: those of ``metrics.jsonl``, lists as their lengths.

    It needs ``pip install 'fedpop[mlflow]'``. A run that is resumed goes on in the same run of MLflow; rounds
    after its checkpoint are shown once more, at the same steps and with the same numbers.

    Args:
        experiment: That of MLflow in which the run is; made where it is not there. "fedpop" by default.
        tracking: Where MLflow keeps it, such as the address of a server; None (the default) leaves it to
            MLflow's settings, ``MLFLOW_TRACKING_URI`` among them.
        run_name: What the run is called; the method's name by default.

    >>> import fedpop as fp
    >>> live = fp.callbacks.MLflow(run_name="first")  # method.fit(clients, callbacks=[live])
    >>> live.experiment
    'fedpop'
    """

    experiment: str = "fedpop"
    tracking: str | None = None
    run_name: str = ""
    _client: Any = field(default=None, init=False, repr=False, compare=False)
    _id: str = field(default="", init=False, repr=False, compare=False)

    def check(self, federation: Federation | Members) -> None:
        library("mlflow", "mlflow", WHAT)

    def recorded(self, run: Run, metrics: dict[str, Any]) -> None:
        entities = library("mlflow.entities", "mlflow", WHAT)
        if self._client is None:
            self._open(run)
        now = int(1000 * time.time())
        found = [entities.Metric(name, value, now, run.round) for name, value in scalars(metrics).items()]
        self._client.log_batch(self._id, metrics=found)

    def _open(self, run: Run) -> None:
        mlflow = library("mlflow", "mlflow", WHAT)
        try:
            self._client = mlflow.MlflowClient(tracking_uri=self.tracking)
            if self._id:
                self._client.update_run(self._id, status="RUNNING")
                return
            known = self._client.get_experiment_by_name(self.experiment)
            where = known.experiment_id if known else self._client.create_experiment(self.experiment)
            name = self.run_name or run.label
            name += f", restart {run.restart}" if run.restart else ""
            self._id = self._client.create_run(where, run_name=name).info.run_id
            self._client.log_param(self._id, "method", run.label)
            self._client.log_param(self._id, "seed", run.settings.seed)
        except mlflow.exceptions.MlflowException as error:
            reason = " ".join(str(error).split())[:300]
            raise SettingsError(
                f"MLflow cannot be written to; is tracking right? It says: {reason}"
            ) from error

    def finished(self, run: Run) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id)

    def state(self) -> dict[str, Any]:
        return {"id": self._id}

    def restore(self, state: dict[str, Any]) -> None:
        self._id = str(state["id"])


if TYPE_CHECKING:
    from fedpop.federation.clients import Federation
    from fedpop.run.members import Members
    from fedpop.run.run import Run


@dataclass
class TensorBoard(Checked, Callback):
    """Show every round's numbers live in TensorBoard: those of ``metrics.jsonl``, lists as their lengths.

    It needs ``pip install 'fedpop[tensorboard]'``; ``tensorboard --logdir FOLDER`` shows the page. A run that
    is resumed goes on in the same curves.

    Args:
        folder: Where TensorBoard's files go; a folder for each run tells their curves apart.

    >>> import fedpop as fp
    >>> live = fp.callbacks.TensorBoard("runs/board/first")  # method.fit(clients, callbacks=[live])
    >>> live.folder
    'runs/board/first'
    """

    folder: str | Path
    _writer: Any = field(default=None, init=False, repr=False, compare=False)

    def check(self, federation: Federation | Members) -> None:
        library("tensorboard", "tensorboard", "curves in TensorBoard")

    def recorded(self, run: Run, metrics: dict[str, Any]) -> None:
        if self._writer is None:
            sub = f"restart-{run.restart}" if run.restart else ""
            place = writable_folder(Path(self.folder) / sub)
            boards = library("torch.utils.tensorboard", "tensorboard", "curves in TensorBoard")
            # Rounds after the checkpoint that a resumed run starts from were shown before: they go.
            self._writer = boards.SummaryWriter(str(place), purge_step=run.round)
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, run.round)
        self._writer.flush()

    def finished(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
