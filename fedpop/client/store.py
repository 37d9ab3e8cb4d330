"""Local states of clients between rounds; memory is paid only for clients that ever took part."""

from __future__ import annotations

import torch
from torch import Tensor


class LocalStore:
    """Stacked tensors, a row for each client seen so far."""

    def __init__(self, clients: int) -> None:
        self.slots = torch.full((clients,), -1, dtype=torch.int64)
        self.used = 0
        self.tensors: dict[str, Tensor] = {}

    def seen(self, ids: Tensor) -> Tensor:
        """Which of these clients have a state."""
        return self.slots[ids] >= 0

    def get(self, ids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """States of clients that were all seen before."""
        rows = self.slots[ids]
        return {name: t[rows].to(device) for name, t in self.tensors.items()}

    def put(self, ids: Tensor, states: dict[str, Tensor]) -> None:
        """Keep these states, making room for clients that are new."""
        if not states:
            return
        new = ids[self.slots[ids] < 0]
        if len(new):
            self.slots[new] = torch.arange(self.used, self.used + len(new))
            self.used += len(new)
        rows = self.slots[ids]
        for name, value in states.items():
            value = value.detach().to("cpu")
            held = self.tensors.get(name)
            if held is None or held.shape[0] < self.used:
                # Doubling keeps the total cost of growing linear.
                room = min(len(self.slots), max(self.used, 2 * (0 if held is None else len(held))))
                grown = value.new_zeros((room, *value.shape[1:]))
                if held is not None:
                    grown[: held.shape[0]] = held
                self.tensors[name] = held = grown
            held[rows] = value

    def state(self) -> dict[str, Tensor]:
        """Everything, for a checkpoint."""
        return {"slots": self.slots} | {f"local.{n}": t[: self.used] for n, t in self.tensors.items()}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor]) -> LocalStore:
        store = cls(len(tensors["slots"]))
        store.slots = tensors["slots"].clone()
        store.used = int((store.slots >= 0).sum())
        store.tensors = {n[6:]: t.clone() for n, t in tensors.items() if n.startswith("local.")}
        return store
