"""Local states of clients between rounds; memory is paid only for clients that ever took part."""

from __future__ import annotations

import torch
from torch import Tensor


class LocalStore:
    """Stacked tensors, a row for each unit seen so far; a unit that has only answered a question holds what
    that left behind, and has not ``entered`` a round yet."""

    def __init__(self, clients: int) -> None:
        self.slots = torch.full((clients,), -1, dtype=torch.int64)
        self.entered = torch.zeros(clients, dtype=torch.bool)
        self.used = 0
        self.noted: set[str] = set()
        """Names of what questions left behind."""
        self.tensors: dict[str, Tensor] = {}

    def seen(self, ids: Tensor) -> Tensor:
        """Which of these units have taken part in a round."""
        return self.entered.index_select(0, ids)

    def all_seen(self, ids: Tensor) -> bool:
        """Whether all of them have."""
        everyone = len(ids) == len(self.entered)
        return bool((self.entered if everyone else self.seen(ids)).all())

    def get(self, ids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """States of units all of which have taken part before."""
        if self._all(ids):
            return {name: t.to(device) for name, t in self.tensors.items()}
        rows = self.slots.index_select(0, ids)
        known = self.tensors if bool((rows >= 0).all()) else {}
        return {name: t.index_select(0, rows).to(device) for name, t in known.items()}

    def _all(self, ids: Tensor) -> bool:
        """These are all units, in the order in which they are stored."""
        return len(ids) == self.used == len(self.slots) and torch.equal(self.slots, ids)

    def put(self, ids: Tensor, states: dict[str, Tensor], entered: bool = True) -> None:
        """Keep these states, making room for units that are new."""
        everyone = self._all(ids)
        if not entered:
            self.noted |= set(states)
        elif everyone:
            self.entered.fill_(True)
        else:
            self.entered[ids] = True
        if not states:
            return
        if not everyone:
            new = ids[self.slots.index_select(0, ids) < 0]
            self.slots[new] = torch.arange(self.used, self.used + len(new))
            self.used += len(new)
        if everyone or self._all(ids):
            self.tensors |= {name: value.detach().to("cpu") for name, value in states.items()}
            return
        rows = self.slots.index_select(0, ids)
        for name, value in states.items():
            value = value.detach().to("cpu")
            stored = self.tensors.get(name)
            if stored is None or stored.shape[0] < self.used:
                # Doubling keeps the total cost of growing linear.
                room = min(len(self.slots), max(self.used, 2 * (0 if stored is None else len(stored))))
                grown = value.new_zeros((room, *value.shape[1:]))
                if stored is not None:
                    grown[: stored.shape[0]] = stored
                self.tensors[name] = stored = grown
            stored.index_copy_(0, rows, value)

    def state(self) -> dict[str, Tensor]:
        """Everything, for a checkpoint."""
        noted = {f"noted.{name}": torch.zeros(0) for name in self.noted}
        return (
            {"slots": self.slots, "entered": self.entered}
            | noted
            | {f"local.{n}": t[: self.used] for n, t in self.tensors.items()}
        )

    @classmethod
    def restore(cls, tensors: dict[str, Tensor]) -> LocalStore:
        """The same again; a ValueError where these tensors do not belong together."""
        slots, entered = tensors["slots"], tensors["entered"]
        store = cls(len(slots))
        if any(
            (t.dtype, t.shape) != (e.dtype, e.shape)
            for t, e in ((slots, store.slots), (entered, store.entered))
        ):
            raise ValueError("slots and entered are of other types, or of different numbers of units")
        store.slots, store.entered = slots.clone(), entered.clone()
        store.noted = {n[6:] for n in tensors if n.startswith("noted.")}
        taken = slots[slots >= 0]
        store.used = len(taken)
        if not torch.equal(taken.sort().values, torch.arange(store.used)):
            raise ValueError("slots are not the rows of different units")
        store.tensors = {n[6:]: t.clone() for n, t in tensors.items() if n.startswith("local.")}
        if odd := [n for n, t in store.tensors.items() if t.ndim == 0 or len(t) > store.used]:
            raise ValueError(f"{odd[0]} is of more than the {store.used} units that have rows")
        return store
