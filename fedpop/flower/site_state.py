"""A site's file: its units' states before and after the last round, and its last reply.

A server may ask for a round twice (it was killed), or may not receive the reply (it came late). So the states
of both sides of the last round are there, with the round's number, a digest of the theta it was made with,
and the reply itself: the same round with the same theta gives the same reply, with another theta it starts
again from before, and the next round starts from after if the last one counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedpop.errors import CheckpointError, PayloadError
from fedpop.files import read_tensors, write_tensors
from fedpop.flower.records import message_of_plain, plain_message
from fedpop.message import Message, Payload, Tensors
from fedpop.site.refusal import Code, Refusal
from fedpop.site.sites import states_if_lost
from fedpop.site.store import LocalStore

log = logging.getLogger("fedpop.site")


@dataclass
class SiteState:
    """The states of a site's units in one experiment."""

    before: LocalStore
    after: LocalStore
    round: int = -1
    """The last one that was worked on."""
    digest: str = ""
    units: list[int] | None = None
    """Positions of those that took part in it; None: all of them."""
    reply: Message | None = None
    noted: dict[str, list[str]] = field(default_factory=dict)
    """Questions that left something with the units, and the names of what they left."""
    best: LocalStore | None = None
    best_round: int = -1
    names: list[int] = field(default_factory=list)
    """Hashes of the units' names, in the order of the states."""

    @classmethod
    def empty(cls, names: list[int]) -> SiteState:
        return cls(LocalStore(len(names)), LocalStore(len(names)), names=names)

    def current(self, keeps: Sequence[str], last_counted: int) -> LocalStore:
        """The units' states when ``last_counted`` was the last round of theirs that counted."""
        counted = last_counted == self.round or self.round < 0
        if counted:
            return self.after
        every = range(len(self.after.slots)) if self.units is None else self.units
        return states_if_lost(keeps, self.before, self.after, torch.tensor(every, dtype=torch.int64))

    def start_of(self, keeps: Sequence[str], round: int, last_counted: int) -> LocalStore:
        """Where a round starts from: before it, if it was worked on already (or an earlier one is asked)."""
        if round < self.round and last_counted < 0:  # the server begins anew: as if no round had been
            return self._noted()
        if round <= self.round:
            return LocalStore.restore(self.before.state())
        return LocalStore.restore(self.current(keeps, last_counted).state())

    def _noted(self) -> LocalStore:
        """What questions left with the units, and nothing else."""
        every = torch.arange(len(self.before.slots))
        states = self.before.get(every, torch.device("cpu"))
        left = {n: states[n] for names in self.noted.values() for n in names if n in states}
        fresh = LocalStore(len(every))
        if left:
            fresh.put(every, left, entered=False)
        return fresh

    # --- a file ------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        """All of it or nothing; a Refusal where the disk is full."""
        tensors = _under("before.", self.before) | _under("after.", self.after)
        tensors |= {} if self.best is None else _under("best.", self.best)
        plain: dict[str, Any] = {
            "round": self.round,
            "digest": self.digest,
            "units": self.units,
            "noted": self.noted,
            "best_round": self.best_round,
            "names": self.names,
        }
        if self.reply is not None:
            plain["message"] = plain_message(self.reply)
            plain["payloads"] = {n: [p.codec, p.length] for n, p in self.reply.payloads.items()}
            tensors |= {f"reply.{n}": _bytes(p.data) for n, p in self.reply.payloads.items()}
        try:
            write_tensors(path, tensors | {"plain": _bytes(json.dumps(plain).encode())})
        except CheckpointError as error:
            log.error("%s", error)
            why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else "its log says more"
            raise Refusal(f"the site cannot write its state ({why})", Code.DISK) from error

    @classmethod
    def read(cls, path: Path, names: list[int] | None = None) -> SiteState:
        """What was written. Of other units than these, or in another order, is a CheckpointError."""
        tensors = read_tensors(path)
        try:
            plain = json.loads(bytes(tensors["plain"].tolist()))
            before, after = (LocalStore.restore(_part(side, tensors)) for side in ("before.", "after."))
            best = _part("best.", tensors)
            reply = None
            if "message" in plain:
                payloads = {
                    n: Payload(codec, length, tensors[f"reply.{n}"].numpy().tobytes())
                    for n, (codec, length) in plain["payloads"].items()
                }
                reply = message_of_plain(plain["message"], payloads)
            state = cls(
                before,
                after,
                round=plain["round"],
                digest=plain["digest"],
                units=plain["units"],
                reply=reply,
                noted=plain["noted"],
                best=LocalStore.restore(best) if best else None,
                best_round=plain["best_round"],
                names=plain["names"],
            )
        except (KeyError, ValueError, TypeError, PayloadError) as error:
            raise CheckpointError(f"{path} is not a site's state of this version ({error})") from error
        if names is not None and state.names != names:
            how = "in another order" if set(state.names) == set(names) else "not all of them the same"
            raise CheckpointError(f"{path} is of {len(state.names)} units, the data have {len(names)}, {how}")
        return state


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _under(prefix: str, store: LocalStore) -> Tensors:
    return {f"{prefix}{n}": t for n, t in store.state().items()}


def _part(prefix: str, tensors: Tensors) -> Tensors:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
