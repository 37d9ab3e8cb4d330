"""One site by itself: the same work as ``Sites`` does for everyone, with a message in place of sums.

Its units are worked on in cohorts that fit the site's memory; what they have to say is added up as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpop.algorithms.base import Algorithm, Round
from fedpop.channel import Answer, Channel, Guard, Heard, Message, SiteSum, Tensors
from fedpop.channel.guard import norm_of
from fedpop.client.plan import Plan
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


def site_round(
    sites: Sites,
    method: Algorithm,
    round: Round,
    name: str,
    plan: Plan,
    ids: Tensor | None = None,
    messages: int = 1,
) -> Worked:
    """A round of the units at these positions (None: of all) at the site of this name, one of so many. Its
    states stay as they are: ``Worked`` has those before (which hold what units would enter with, as long as
    they have not) and those after."""
    channel, parts = method.channel, list[tuple[Tensor, Tensors, Answer]]()
    ids = torch.arange(len(sites.federation)) if ids is None else ids
    now, said = replace(round, coefficients=None, omega=channel.omega), SiteSum()
    for group, cohort in sites.cohorts(ids, plan):
        local = sites.states(method, group, round.broadcast, round.key)
        done = method.at_pace(round.broadcast).local_round(now, cohort, local)
        answer = done if isinstance(done, Answer) else joined(list(done), len(cohort))
        said.add(answer)
        parts.append((group, local, replace(answer, rows=None, vectors={}, sums={}, named={})))
    message, heard = said.message(channel, unit_of(name), round.key)
    guard = method.guard_for(round.broadcast, messages)
    withheld = {}
    if guard is not None and message.units:
        kind = method.model.initial_phi().dtype
        seen = message.vectors(channel, unit_of(name), kind)
        withheld = _absurd(guard, seen, int(sites.federation.train.sizes[ids].sum()))
    if withheld:
        message = Message({}, 0, cost=message.cost)
        heard = [Heard(torch.zeros_like(own.heard), {}) for own in heard]
    before, after = (LocalStore.restore(sites.store.state()) for _ in range(2))
    entered = before.entered.clone()
    for (group, local, answer), own in zip(parts, heard, strict=True):
        before.put(group, local)
        after.put(group, local | settled(method, answer, own, local))
    before.entered = entered  # what units enter with is theirs once they have taken part
    return Worked(message, before, after, withheld)


def _absurd(guard: Guard, seen: Tensors, examples: int) -> dict[str, float]:
    """The norms of what a site would send, where that is far larger than what it was told is usual."""
    norms = {n: norm_of(v) for n, v in seen.items() if n in guard.names}
    return norms if guard.suspected({"": norms}, {"": examples}) else {}


def unheard(method: Algorithm, before: LocalStore, after: LocalStore, ids: Tensor) -> LocalStore:
    """Where a site goes on whose message did not count: the units at these positions have taken part, and
    keep of the round what is right in any case, such as where a chain stands."""
    store = LocalStore.restore(before.state())
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
    plan: Plan,
    personal: Callable[[Tensor], Tensors] | None = None,
) -> tuple[Message, Tensors]:
    """What the site of this name says to a question, and what its units keep of it."""
    said, kept = SiteSum(), list[Tensors]()
    for group, cohort in sites.cohorts(torch.arange(len(sites.federation)), plan):
        answer = question.answer(asked, sites.units(group, cohort, personal, question.name), key)
        said.add(answer)
        kept.append(dict(answer.local))
    message, heard = said.message(Channel(), unit_of(name), key)
    # Of units that are not in the message nothing is kept; a site of several keeps its units together.
    if not all(own.everyone for own in heard):
        return message, {}
    return message, {n: torch.cat([own[n] for own in kept]) for n in kept[0]}
