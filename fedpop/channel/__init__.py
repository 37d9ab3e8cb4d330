"""What happens to a message between a client and the server: compression, and the count of its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedpop.channel.base import Compressor
from fedpop.channel.identity import Identity
from fedpop.channel.natural import Natural
from fedpop.channel.qsgd import QSGD
from fedpop.channel.rand_k import RandK

__all__ = ["QSGD", "Channel", "Compressor", "Identity", "Natural", "RandK"]


@dataclass
class Channel:
    """The way up. ``fusable``: one backward pass may serve all clients, since only sums matter."""

    fusable: bool = True
    bytes_up: int = field(default=0)

    def __call__(self, name: str, per_client: Tensor) -> Tensor:
        """What the server will see of each client's vector ``[C, D]``."""
        self.bytes_up += per_client.numel() * per_client.element_size()
        return per_client

    def fused(self, name: str, total: Tensor, clients: int) -> Tensor:
        """The same when only the sum was computed; every client still sends its own vector."""
        self.bytes_up += clients * total.numel() * total.element_size()
        return total
