"""What may happen between rounds."""

from fedpop.runtime.callbacks import Callback, EarlyStop
from fedpop.runtime.mlflow import MLflow
from fedpop.runtime.tensorboard import TensorBoard
from fedpop.runtime.watch import Watch

__all__ = ["Callback", "EarlyStop", "MLflow", "TensorBoard", "Watch"]
