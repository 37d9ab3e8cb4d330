"""What may happen between rounds."""

from fedpop.run.callbacks import Callback, EarlyStop
from fedpop.run.trackers import MLflow, TensorBoard
from fedpop.run.watch import Watch

__all__ = ["Callback", "EarlyStop", "MLflow", "TensorBoard", "Watch"]
