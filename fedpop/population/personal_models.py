"""Clients' personal models at the returned theta, made in cohorts that fit the memory budget."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedpop.federation.clients import Federation
from fedpop.files import parse_bytes
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm
from fedpop.site.plan import Plan, final_plan, plan_for
from fedpop.site.sites import Sites

MEMORY = "1GiB"
"""What making them may take, about."""


def planned(method: Algorithm, federation: Federation) -> Plan:
    """Cohorts of clients whose personal models, or diagnostics, fit the memory budget together."""
    foot = method.footprint
    base = plan_for(method.model, federation, parse_bytes(MEMORY), foot.draws, foot.phi_copies)
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
