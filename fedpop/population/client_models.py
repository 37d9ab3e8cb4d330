"""Where clients' models come from: the final pass, run when one is asked for, and cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor

from fedpop.blocks import CLIENTS_AT_ONCE
from fedpop.errors import CheckpointError, DataError
from fedpop.federation.clients import Federation, position
from fedpop.federation.cohort import Cohort
from fedpop.files import parse_bytes
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm, hierarchy_of
from fedpop.site.plan import Plan, final_plan, plan_for
from fedpop.site.sites import Sites
from fedpop.site.store import LocalStore
from fedpop.threads import threads

MEMORY = "1GiB"
"""What making them may take, about."""
CACHED_MODEL_BYTES = 2**28
"""Bytes that models of clients may take while all of them are gone through: 100 heads of 100 classes, 560
draws each, would take three gigabytes."""


class ClientModels:
    """What ``Population`` has of clients' personal models; its fields are there."""

    algorithm: Algorithm
    published: Tensors
    key: Key
    federation: Federation | None
    store: LocalStore | None
    names: list[str]
    threads: int | None
    _personal: dict[int, Tensors]

    @property
    def device(self) -> torch.device:
        return self.published["phi"].device

    @cached_property
    def sites(self) -> Sites | None:
        """Those who have the data, where they are here."""
        return None if self.federation is None else Sites(self.federation, self.device, self.store)

    def _index(self, client: str | int) -> int:
        here = self.federation
        return position(client, self._places, "population") if here is None else here.index(client)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def _model_of(self, i: int) -> Tensors:
        self._personalise(torch.tensor([i]))
        return self._personal[i]

    def _models_of(self, ids: Tensor) -> Tensors:
        self._personalise(ids)
        each = [self._personal[i] for i in ids.tolist()]
        return {n: torch.cat([own[n] for own in each]) for n in each[0]}

    def _personalise(self, ids: Tensor) -> None:
        """The final pass for these clients, as few cohorts as fit."""
        missing = torch.tensor([i for i in ids.tolist() if i not in self._personal], dtype=torch.int64)
        if not len(missing):
            return
        if self.sites is None:
            name = self.names[int(missing[0])]
            raise CheckpointError(
                f"nothing was saved for client {name!r} and there are no data to sample from; load the "
                "population with clients=..."
            )
        plan, key = self._final_plan, self.key
        with threads(self.threads):
            made = personal_models(self.algorithm, self.published, self.sites, plan, missing, key)
            self._personal |= made

    def _one_by_one(self, ids: Tensor) -> Iterator[int]:
        """These clients one after the other, their models made for many at a time, and forgotten where all of
        them would take too much; made when they are asked for where somebody cannot be served."""
        method, z, phi = (
            self.algorithm,
            self.algorithm.model.z_layout.size,
            self.algorithm.model.phi_layout.size,
        )
        each = 4 * (z + phi if hierarchy_of(method) is None else method.footprint.final_draws * z)
        for group in ids.split(max(1, min(CLIENTS_AT_ONCE, CACHED_MODEL_BYTES // each))):
            new = [i for i in group.tolist() if i not in self._personal]
            with suppress(DataError):
                self._personalise(group)
            yield from group.tolist()
            if each * len(self._personal) > CACHED_MODEL_BYTES:
                for i in new:
                    self._personal.pop(i, None)

    def _cohort(self, ids: Tensor) -> Cohort:
        if self.federation is None:
            raise CheckpointError("this needs the clients' data; load the population with clients=...")
        return self.federation.cohort(ids, self.device)

    @cached_property
    def _final_plan(self) -> Plan:
        """Cohorts of clients whose personal models, or diagnostics, fit the memory budget together."""
        assert self.federation is not None
        method, foot = self.algorithm, self.algorithm.footprint
        base = plan_for(method.model, self.federation, parse_bytes(MEMORY), foot.draws, foot.phi_copies)
        return final_plan(base, method.model, foot.final_draws)


def personal_models(
    method: Algorithm, published: Tensors, sites: Sites, plan: Plan, ids: Tensor, key: Key
) -> Iterator[tuple[int, Tensors]]:
    """The models of these clients, each with its position."""
    store, federation = sites.store, sites.federation
    # Clients with a state and clients without go apart: what is made for one depends on no other.
    seen = store.seen(ids)
    for some, there in ((ids[seen], True), (ids[~seen], False)):
        for part in plan.cut(some, federation.train.sizes):
            local = store.get(part, sites.device) if there else None
            made = method.personalise(published, federation.cohort(part, sites.device), local, key)
            for row, i in enumerate(part.tolist()):
                yield i, {n: t[row : row + 1] for n, t in made.items()}
