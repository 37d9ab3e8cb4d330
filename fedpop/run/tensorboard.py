"""Rounds as they happen, in TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpop.checked import Checked
from fedpop.extras import library
from fedpop.files import writable_folder
from fedpop.run.callbacks import Callback
from fedpop.run.metrics import scalars

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
