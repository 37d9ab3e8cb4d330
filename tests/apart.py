"""A federation in which every client is a site of its own that nothing but encoded messages leave.

Each site has a ``Federation`` of one, a store of its own and the key of the sites; the server has the method,
a description of one example and the names. What goes up is bytes, which ``traffic`` records; what the server
gets to see is decoded from them, or, with ``exposed=3``, sums of that over at least so many sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fedpop as fp
from fedpop.algorithms.base import Algorithm, Facts, Round
from fedpop.channel import Answer, Channel, Payload, Tally, Tensors, Total
from fedpop.federation.participation import Participation, Roster
from fedpop.keys import Key, units_of
from fedpop.site.sites import Sites, settled
from fedpop.questions import Question, Units
from fedpop.runtime.members import active_units

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
    ) -> None:
        self.names = list(clients)
        federations = {name: fp.Federation.of({name: data}) for name, data in clients.items()}
        example = next(iter(federations.values())).example
        self.method = method.prepared(example)  # the server has seen no data, each site only its own
        for name, federation in federations.items():
            own = method.prepared(federation.example)
            assert own.describe() == self.method.describe()
            federations[name] = own.model.checked(federation)
        self.sites = {name: Sites(federation, CPU) for name, federation in federations.items()}
        self.roster = Roster(units_of(self.names))
        self.rule = method.usual_participation() if rule is None else rule
        self.facts = Facts(len(self.names), rounds, active=self.rule.expected(self.roster))
        self.key, self.secret = Key(seed), Key(seed, purpose="site")
        self.exposed, self.round = exposed, 0
        self.traffic: list[tuple[str, str, Payload, Tensor]] = []
        """Site, name of the vector, what was sent, and what the server makes of it."""
        known: Tensors = {}
        for question in self.method.questions(self.facts, self.key):
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

    def _sent(self, name: str, answer: Answer, channel: Channel, key: Key) -> Answer:
        """The answer of a site of one, after every vector went through bytes."""
        assert len(answer.good) == 1
        unit = int(units_of([name])[0])
        if not bool(answer.good):
            return replace(
                answer, vectors={n: torch.zeros_like(v) for n, v in answer.vectors.items()}, sums={}
            )
        vectors = dict(answer.vectors) | {n: v.unsqueeze(0) for n, v in answer.sums.items()}
        arrived = {}
        for n, v in vectors.items():
            payload = channel.encode(n, v[0], unit, key)
            seen = channel.decode(n, payload, unit).to(v.dtype)
            self.traffic.append((name, n, payload, seen))
            arrived[n] = seen.unsqueeze(0)
        return replace(answer, vectors=arrived, sums={})

    def _asked(self, question: Question[Tensors], known: Tensors) -> Tensors:
        key = self.secret.at(round=0, purpose=question.name)
        asked = question.ask(known)
        answers = []
        for name, site in self.sites.items():
            cohort = site.federation.cohort(torch.tensor([0]), CPU)
            units = Units(cohort, {}, dict, lambda split, own=cohort: own)
            answer = self._sent(name, question.answer(asked, units, key), Channel(), key)
            if bool(answer.good) and answer.local:
                site.keep([(torch.tensor([0]), answer.local)], entered=False)
            answers.append((name, answer, 1.0))
        return question.finish(known, self._total(answers, ratio=False)[0])

    def _total(
        self, answers: Iterable[tuple[str, Answer, float]], ratio: bool, remembered: tuple[str, ...] = ()
    ) -> tuple[Total, dict[str, Any]]:
        """Sums of what was decoded; the server sees nothing smaller than a sum over ``exposed`` sites."""
        heard, groups, answers = {}, [Tally(Channel(), Key(0), remembered)], list(answers)
        for i, (name, answer, weight) in enumerate(answers):
            if i % self.exposed == 0 and 0 < i <= len(answers) - self.exposed:
                groups.append(Tally(Channel(), Key(0), remembered))
            heard[name] = groups[-1].add(answer, units_of([name]), weight * ONE)
        totals = [g.total(len(self.names), ratio) for g in groups]
        assert all(t.count >= self.exposed or t.count == 0 for t in totals)

        def added(which: str) -> Tensors:
            names = {n: None for t in totals for n in getattr(t, which)}
            return {n: sum(getattr(t, which)[n] for t in totals if n in getattr(t, which)) for n in names}

        count, weight = sum(t.count for t in totals), sum(t.weight for t in totals)
        sums = {which: added(which) for which in ("weighted", "plain", "named")}
        return Total(**sums, count=count, weight=weight, of=len(self.names), ratio=ratio), heard

    # --- a round -----------------------------------------------------------------------------

    def train_round(self) -> Total:
        method, shared = self.method, self.key.at(round=self.round, purpose="train")
        key = self.secret.at(round=self.round, purpose="train")

        class Everybody:
            roster = self.roster

        active = active_units(self.rule, Everybody(), self.key, self.round)  # type: ignore[arg-type]
        now = Round(self.round, method.broadcast(self.server), key, shared, omega=method.channel.omega)
        answers, before = [], {}
        for i, weight in zip(active.ids.tolist(), active.weights.tolist(), strict=True):
            name = self.names[i]
            site = self.sites[name]
            cohort = site.federation.cohort(torch.tensor([0]), CPU)
            before[name] = site.states(method, torch.tensor([0]), now.broadcast, key)
            done = method.local_round(now, cohort, before[name])
            (answer,) = [done] if isinstance(done, Answer) else list(done)
            answers.append((name, self._sent(name, replace(answer, rows=None), method.channel, key), weight))
        total, heard = self._total(answers, active.ratio, method.remembers)
        self.server = method.server_round(self.server, total, self.facts, shared)
        for name, answer, _ in answers:
            new = settled(method, answer, heard[name], before[name])
            self.sites[name].keep([(torch.tensor([0]), before[name] | new)])
        self.round += 1
        return total
