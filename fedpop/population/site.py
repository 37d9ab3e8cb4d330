"""One site by itself: the same work as ``Sites`` does for everyone, with a message in place of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpop.algorithms.base import Algorithm, Round
from fedpop.channel import Answer, Channel, Guard, Heard, Message, Tensors, message_of
from fedpop.channel.guard import norm_of
from fedpop.client.store import LocalStore
from fedpop.keys import Key, unit_of
from fedpop.population.sites import Sites, joined, settled
from fedpop.questions import Question


@dataclass(frozen=True)
class Worked:
    """A site's part of a round: what it sends, and its states before it and once it counts."""

    message: Message
    before: LocalStore
    after: LocalStore
    withheld: Mapping[str, float] = field(default_factory=dict)
    """Norms of vectors that were not sent, by name: the message was out of all proportion."""


def site_round(sites: Sites, method: Algorithm, round: Round, name: str, messages: int = 1) -> Worked:
    """All units' round at the site of this name, one of so many. Its states stay as they are: ``Worked`` has
    those before (which hold what units would enter with, as long as they have not) and those after."""
    channel, ids = method.channel, torch.arange(len(sites.federation))
    cohort = sites.federation.cohort(ids, sites.device)
    local = sites.states(method, ids, round.broadcast, round.key)
    done = method.local_round(replace(round, coefficients=None, omega=channel.omega), cohort, local)
    answer = done if isinstance(done, Answer) else joined(list(done), len(cohort))
    answer = replace(answer, rows=None)
    message, heard = message_of(answer, cohort.units, channel, unit_of(name), round.key)
    guard = method.guard_for(round.broadcast, messages)
    withheld = {} if guard is None else _absurd(guard, heard, int(cohort.sizes.sum()))
    if withheld:
        message, heard = Message({}, 0, cost=message.cost), Heard(torch.zeros_like(heard.heard), {})
    before, after = (LocalStore.restore(sites.store.state()) for _ in range(2))
    entered = before.entered.clone()
    before.put(ids, local)
    before.entered = entered  # what units enter with is theirs once they have taken part
    after.put(ids, local | settled(method, answer, heard, local))
    return Worked(message, before, after, withheld)


def _absurd(guard: Guard, heard: Heard, examples: int) -> dict[str, float]:
    """The norms of what a site would send, where that is far larger than what it was told is usual."""
    count = int(heard.heard.sum())
    norms = {n: count * norm_of(seen[0]) for n, seen in heard.seen.items() if n in guard.names}
    return norms if guard.suspected({"": norms}, {"": examples}) else {}


def unheard(method: Algorithm, before: LocalStore, after: LocalStore) -> LocalStore:
    """Where a site goes on whose message did not count: units have taken part, and keep of the round what is
    right in any case, such as where a chain stands."""
    store = LocalStore.restore(before.state())
    ids = torch.arange(len(store.slots))
    cpu = torch.device("cpu")
    new, old = after.get(ids, cpu), before.get(ids, cpu)
    kept = {n: t if n in method.keeps or n not in old else old[n] for n, t in new.items()}
    lost = {n: torch.zeros_like(t) for n, t in new.items() if n not in method.keeps and n not in old}
    store.put(ids, kept | lost)
    return store


def site_answer(
    sites: Sites,
    question: Question[Any],
    asked: Tensors,
    key: Key,
    name: str,
    personal: Callable[[Tensor], Tensors] | None = None,
) -> tuple[Message, Tensors]:
    """What the site of this name says to a question, and what its units keep of it."""
    ids = torch.arange(len(sites.federation))
    cohort = sites.federation.cohort(ids, sites.device)

    answer = question.answer(asked, sites.units(ids, cohort, personal, question.name), key)
    message, heard = message_of(answer, cohort.units, Channel(), unit_of(name), key)
    return message, _kept(answer, heard)


def _kept(answer: Answer, heard: Heard) -> Tensors:
    """Of units that are not in the message nothing is kept; a site of several keeps its units together."""
    return dict(answer.local) if bool(heard.heard.all()) else {}
