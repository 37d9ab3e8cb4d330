"""A federation in which every client is a site of its own that nothing but encoded messages leave.

Each site has a ``Federation`` of one, a store of its own and the key of the sites; the server has the method,
a description of one example and the names. What goes up is bytes, which ``traffic`` records; what the server
gets to see is decoded from them, or, with ``exposed=3``, sums of that over at least so many sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fedpop as fp
from fedpop.federation.participation import Active, Participation, Roster
from fedpop.keys import Key, units_of
from fedpop.message import Aggregate, Channel, Message, Payload, Tensors, Total
from fedpop.methods.base import Algorithm, Asks, Facts, Round, role_of, usual_participation
from fedpop.questions import Question
from fedpop.run.members import active_units
from fedpop.site.plan import WHOLE
from fedpop.site.sites import Sites
from fedpop.site.work import Work

CPU = torch.device("cpu")
ONE = torch.ones(1)


class Apart:
    """The same rounds as a ``Run``, across sites."""

    def __init__(
        self,
        method: Algorithm,
        clients: Mapping[str, Any],
        rounds: int = 20,
        seed: int = 0,
        rule: Participation | None = None,
        exposed: int = 1,
        weigh: bool = False,
    ) -> None:
        self.names = list(clients)
        federations = {name: fp.Federation.of({name: data}) for name, data in clients.items()}
        example = next(iter(federations.values())).example
        self.method = method.prepared(example)  # the server has seen no data, each site only its own
        for name, federation in federations.items():
            own = method.prepared(federation.example)
            assert own.describe() == self.method.describe()
            federations[name] = own.model.checked(federation)
        self.sites = {name: Sites.one(name, federation, CPU) for name, federation in federations.items()}
        self.roster = Roster(units_of(self.names))
        self.rule = usual_participation(method) if rule is None else rule
        self.facts = Facts(len(self.names), rounds, active=self.rule.expected(self.roster))
        self.key, self.secret = Key(seed), Key(seed, purpose="site")
        self.exposed, self.weigh, self.round = exposed, weigh, 0
        self.traffic: list[tuple[str, str, Payload, Tensor]] = []
        """Site, name of the vector, what was sent, and what the server makes of it."""
        known: Tensors = {}
        asks = role_of(self.method, Asks)
        for question in () if asks is None else asks.questions(self.facts, self.key):
            known |= self._asked(question, known)
        self.server = self.method.init(self.facts, self.key, known)

    def state(self, name: str) -> Tensors:
        """What a client keeps."""
        return self.sites[name].store.get(torch.tensor([0]), CPU)

    def states(self) -> Tensors:
        """What everyone keeps, stacked, where all have taken part."""
        each = [self.state(name) for name in self.names]
        return {n: torch.cat([own[n] for own in each]) for n in each[0]}

    # --- messages ----------------------------------------------------------------------------

    def _received(self, name: str, work: Work, channel: Channel) -> Message:
        """A site's message after every vector went through bytes."""
        message = replace(work.message, vectors={}, checked=False)
        if not bool(message.received):
            return message
        received = channel.receive(message, torch.float64 if self.wide else torch.float32)
        for vector, payload in message.payloads.items():
            self.traffic.append((name, vector, payload, received.vectors[vector][0]))
        return received

    @property
    def wide(self) -> bool:
        return self.method.model.initial_phi().dtype == torch.float64

    def _asked(self, question: Question[Tensors], known: Tensors) -> Tensors:
        key = self.secret.at(round=0, purpose=question.name)
        asked, messages = question.ask(known), []
        for name, site in self.sites.items():
            (work,) = site.question_work(question, asked, key, WHOLE, encode=True)
            message = self._received(name, work, Channel())
            work.settle(message.received)
            site.commit(entered=False)
            messages.append((message, 1.0))
        return question.finish(known, self._total(messages, ratio=False))

    def _total(self, messages: list[tuple[Message, float]], ratio: bool) -> Total:
        """Sums of what was decoded; the server sees nothing smaller than a sum over ``exposed`` sites."""
        groups = [Aggregate()]
        for i, (message, weight) in enumerate(messages):
            if i % self.exposed == 0 and 0 < i <= len(messages) - self.exposed:
                groups.append(Aggregate())
            groups[-1].add(message, weight * ONE)
        totals = [g.total(len(self.names), ratio) for g in groups]
        assert all(t.count >= self.exposed or t.count == 0 for t in totals)

        def added(which: str) -> Tensors:
            names = {n: None for t in totals for n in getattr(t, which)}
            return {n: sum(getattr(t, which)[n] for t in totals if n in getattr(t, which)) for n in names}

        count, weight = sum(t.count for t in totals), sum(t.weight for t in totals)
        sums = {which: added(which) for which in ("weighted", "plain", "named")}
        return Total(**sums, count=count, weight=weight, of=len(self.names), ratio=ratio)

    # --- a round -----------------------------------------------------------------------------

    def train_round(self) -> Total:
        method, shared = self.method, self.key.at(round=self.round, purpose="train")
        key = self.secret.at(round=self.round, purpose="train")

        class Everybody:
            roster = self.roster

        active = active_units(self.rule, Everybody(), self.key, self.round)  # type: ignore[arg-type]
        now = Round(self.round, method.broadcast(self.server), key, shared, weigh=self.weigh)
        messages, works = [], []
        for i, weight in zip(active.ids.tolist(), active.weights.tolist(), strict=True):
            name = self.names[i]
            own = Active(torch.tensor([0]), weight * ONE, active.ratio)
            (work,) = self.sites[name].round_work(method, now, own, WHOLE, len(active.ids), encode=True)
            messages.append((self._received(name, work, method.channel), weight))
            works.append((name, work))
        total = self._total(messages, active.ratio)
        self.server = method.server_round(self.server, total, self.facts, shared)
        for (name, work), (message, _) in zip(works, messages, strict=True):
            work.settle(message.received)
            self.sites[name].commit()
        self.round += 1
        return total
