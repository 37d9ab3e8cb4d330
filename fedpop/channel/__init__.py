"""What happens to a message between a client and the server; here, only that its bytes are counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


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
