"""What may happen between rounds."""

from fedpop.runtime.callbacks import Callback, EarlyStop
from fedpop.runtime.watch import Watch

__all__ = ["Callback", "EarlyStop", "Watch"]
