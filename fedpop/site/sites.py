"""Sites: units with their data and states, and what they do with a round or a question.

This is the one place where a round or a question is worked on. In the simulator one of these holds the units
of all sites, and messages have a row for each; across machines each site has one for its units, and its
message has one row. Fusing a backward pass over units is an optimisation behind the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpop.errors import EstimateError, SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort, Shelf
from fedpop.federation.inputs import as_text
from fedpop.federation.participation import Active, Everyone
from fedpop.keys import Key, unit_of
from fedpop.message import Aggregate, Answer, Channel, Guard, Tensors, Total
from fedpop.message.fixed_point import FixedPoint, learned
from fedpop.message.guard import MESSAGES_FOR_A_MEDIAN, UNITS
from fedpop.methods.base import Algorithm, Remembers, Round, guard_for, role_of, units_guard_for
from fedpop.questions import Question, Table, Units
from fedpop.server.robust import RobustAggregate
from fedpop.site.plan import Plan
from fedpop.site.store import LocalStore
from fedpop.site.work import (
    Exchange,
    Sending,
    SiteMessage,
    UnitMessages,
    Update,
    Work,
    added,
    joined,
    private_answer,
)

R = TypeVar("R")
OUTSIDE = "outside"
"""State of a unit that takes no further part: what it has is out of all proportion."""

Lost = Callable[[int, Tensor], Tensor]
"""Which of these units' messages never arrive in a round: ``lost(round, units)`` is ``[C]``."""
ModelMaker = Callable[[Tensor], Tensors] | None
"""Makes the personal models of the units at some positions, where there are any yet."""


class Sites:
    """Units of a federation with their states; ``sites`` maps a site's name to those of its units, where a
    site holds several."""

    def __init__(
        self,
        federation: Federation,
        device: torch.device,
        store: LocalStore | None = None,
        sites: Mapping[str, Sequence[str]] | None = None,
        lost: Lost | None = None,
        tables: Sequence[Table] | None = None,
        secure: FixedPoint | None = None,
    ) -> None:
        self.federation, self.device, self.lost, self.tables = federation, device, lost, tables
        self.secure = secure
        """Answers to questions become whole numbers of this form; so do messages of rounds that say so."""
        self.store = LocalStore(len(federation)) if store is None else store
        self.sites = None if sites is None else site_of_each(sites, federation)
        self._everyone: tuple[Tensor, Cohort] | None = None
        self._shelf = Shelf()
        self.updates: list[Update] = []
        """States that replace units' present ones once the last round, or question, counts."""

    @classmethod
    def one(
        cls,
        name: str,
        federation: Federation,
        device: torch.device,
        store: LocalStore | None = None,
        tables: Sequence[Table] | None = None,
        secure: FixedPoint | None = None,
    ) -> Sites:
        """The one site of this name, which all units are at."""
        return cls(federation, device, store, {name: federation.names}, tables=tables, secure=secure)

    # --- states ------------------------------------------------------------------------------

    def commit(self, entered: bool = True) -> None:
        """The last round, or question, counts: units store what followed from it."""
        for ids, states in self.updates:
            self.store.put(ids, states, entered)
        self.updates = []

    def snapshot(self) -> LocalStore:
        """A copy of everyone's state."""
        return LocalStore.restore(self.store.state())

    def states(self, method: Algorithm, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        """States of units, those entering for the first time included."""
        if self.store.all_seen(ids):
            return self.store.get(ids, self.device)
        entered = self.store.seen(ids)
        fresh = method.enter(self.federation.units.index_select(0, ids).to(self.device), broadcast, key)
        holding = self.store.slots.index_select(0, ids) >= 0
        stored = self.store.get(ids[holding], self.device) if bool(holding.any()) else {}
        for name, value in stored.items():
            # Of units that never took part only what a question left is theirs.
            known = holding if name in self.store.noted else entered
            if name not in fresh:
                fresh[name] = value.new_zeros((len(ids), *value.shape[1:]))
            fresh[name][known.to(self.device)] = value[known[holding].to(self.device)]
        return fresh

    def check_states(self, method: Algorithm, broadcast: Tensors, key: Key) -> None:
        """Raise a ValueError where stored states are not of the form in which units enter."""
        if not bool(self.store.entered.any()):
            return
        for name, value in method.enter(self.federation.units[:1].to(self.device), broadcast, key).items():
            stored = self.store.tensors.get(name)
            if stored is None or (stored.dtype, stored.shape[1:]) != (value.dtype, value.shape[1:]):
                raise ValueError(f"units' states have no {name} of the form that this method gives it")

    def outside(self, ids: Tensor) -> Tensor:
        """Which of these units take no part: a question has found them out of all proportion, ``[C]``."""
        flags, slots = self.store.tensors.get(OUTSIDE), self.store.slots[ids]
        if flags is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        return (slots >= 0) & flags[slots.clamp(min=0, max=len(flags) - 1)].bool()

    def _inside(self, active: Active) -> Active:
        out = self.outside(active.ids)
        return Active(active.ids[~out], active.weights[~out], active.ratio) if bool(out.any()) else active

    def units(
        self, ids: Tensor, cohort: Cohort, personal: ModelMaker, what: str, guard: Guard | None = None
    ) -> Units:
        """The units at these positions as a question sees them."""

        def models() -> Tensors:
            if personal is None:
                raise EstimateError(f"{what} needs personal models, which are made after training")
            return personal(ids)

        def split(which: str) -> Cohort:
            if which in self.federation.splits:
                return self.federation.cohort(ids, self.device, which)
            return cohort.take(slice(0, 0), cohort.units, torch.zeros_like(cohort.sizes))

        tables, units = (
            self.tables,
            Units(cohort, self.store.get(ids, self.device), models, split, guard=guard),
        )
        return units if tables is None else replace(units, tables=lambda: [tables[i] for i in ids.tolist()])

    # --- work --------------------------------------------------------------------------------

    def count(self, ids: Tensor) -> int:
        """How many sites have units at these positions: so many messages are added up."""
        return len(ids) if self.sites is None else len(torch.unique(self.sites[ids]))

    def _cohort(self, group: Tensor) -> Cohort:
        """Units together; a cohort of everyone is cached."""
        if self._everyone is not None and torch.equal(self._everyone[0], group):
            return self._everyone[1]
        cohort = replace(self.federation.cohort(group, self.device), shelf=self._shelf)
        if len(group) == len(self.federation):
            self._everyone = (group, cohort)
        return cohort

    def bytes_down(self, broadcast: Tensors, ids: Tensor) -> int:
        """What it takes to send this to the sites of these units, to each of them once."""
        return self.count(ids) * sum(t.numel() * t.element_size() for t in broadcast.values())

    def round_work(
        self, method: Algorithm, round: Round, active: Active, plan: Plan, messages: int, encode: bool = False
    ) -> Iterator[Work]:
        """The active units' work in a round of so many ``messages``, as the server sees it."""
        active = self._inside(active)
        exchange = _RoundExchange(self, method, round, active, messages, encode)
        yield from self._work(active.ids, plan, exchange)

    def question_work(
        self,
        question: Question[Any],
        asked: Tensors,
        key: Key,
        plan: Plan,
        *,
        personal: ModelMaker = None,
        among: Tensor | None = None,
        encode: bool = False,
        guard: float | None = None,
        messages: int | None = None,
    ) -> Iterator[Work]:
        """Answers to a question of everyone, or of those at these positions, as the server sees them; of one
        that is guarded without units that are so many times above the median here. So many ``messages`` are
        added up; those of the sites here by default."""
        ids = torch.arange(len(self.federation)) if among is None else among
        ids = ids[~self.outside(ids)]
        sending = Sending(
            Channel(), key, encode=encode, sends=question.sends, secure=self.secure,
            messages=messages or self.count(ids),
        )  # fmt: skip
        plan = plan.taking(question.memory(asked))
        several = None if guard is None or self.secure else question.guard(guard, UNITS)
        yield from self._work(ids, plan, _QuestionExchange(self, question, asked, personal, sending, several))

    def _work(self, ids: Tensor, plan: Plan, exchange: Exchange) -> Iterator[Work]:
        """Messages as they are ready; what follows for states is in ``updates`` once all were settled."""
        self.updates = []
        if self.sites is None:
            for group in plan.cut(ids, self.federation.train.sizes):
                cohort, weights = self._cohort(group), exchange.weights_of(group).to(self.device)
                local, found = exchange.answers(group, cohort, weights)
                states = UnitMessages(group, local, exchange, self.updates)
                for answer in found:
                    yield states.work(answer, cohort, weights)
                states.done()
            return
        sites = self.sites
        for site, groups in groupby(
            plan.cut(ids, self.federation.train.sizes, sites), key=lambda group: int(sites[group[0]])
        ):
            whole = SiteMessage(site, exchange, self.updates, int((sites == site).sum()))
            for group in groups:
                cohort, weights = self._cohort(group), exchange.weights_of(group).to(self.device)
                local, found = exchange.answers(group, cohort, weights)
                whole.add(group, cohort.sizes, weights, local, joined(list(found), len(cohort)))
            yield whole.work()

    # --- the simulator: many sites in one process ----------------------------------------------

    def round(self, method: Algorithm, round: Round, active: Active, plan: Plan) -> Total:
        """The active units' work, added up; nobody's state changes before ``commit``."""
        active = self._inside(active)
        messages = self.count(active.ids)
        exchange = _RoundExchange(self, method, round, active, messages, encode=False)
        lost = None if self.lost is None else lambda ids: self._lost(round.number, ids)
        works, into = self._work(active.ids, plan, exchange), None
        if round.robust is not None:
            into = RobustAggregate(round.robust)
        total = self._total(works, exchange.guard, active.ratio, lost, into)
        if (units := exchange.units_guard) is not None:
            total = replace(total, usual=total.usual | units.learned(total.numbers))
        if round.secure is None or exchange.guard is None:
            return total
        scales = learned(exchange.guard.names, total.numbers, round.broadcast, round.secure.margin)
        return replace(total, usual=total.usual | scales)

    def _lost(self, number: int, ids: Tensor) -> Tensor:
        assert self.lost is not None
        return self.lost(number, self.federation.units[ids].to(self.device))

    def ask(
        self,
        question: Question[R],
        known: Tensors,
        key: Key,
        plan: Plan,
        personal: ModelMaker = None,
        among: Tensor | None = None,
        guard: float | None = None,
    ) -> tuple[R, Total]:
        """Ask everyone (or those at these positions) and make of the sum what the question makes of it.
        Answers that cannot be, or are so many times above the median, are left out."""
        asked = question.ask(known)
        ids = Everyone().draw(self.federation.roster, key).ids if among is None else among
        ids = ids[~self.outside(ids)]
        works: Iterable[Work] = self.question_work(
            question, asked, key, plan, personal=personal, among=ids, guard=guard
        )
        if guard is not None and self.secure is None and question.guarded:
            works = _sound(works, question, question.guard(guard))
        total = self._total(works, None, False)
        if question.excludes:
            self.updates.append((ids, {OUTSIDE: torch.isin(ids, torch.tensor(total.suspects))}))
        if total.count + len(total.suspects) < question.quorum * len(ids):
            names = ", ".join(repr(self.federation.names[i]) for i in total.left_out[:5])
            raise EstimateError(
                f"{question.name}: {total.count} of {len(ids)} clients could answer, not enough; left out "
                f"were {names}{', ...' if len(total.left_out) > 5 else ''}"
            )
        down = {"bytes_down": float(self.bytes_down(asked, ids))}
        return question.finish(known, total), replace(total, numbers={**total.numbers, **down})

    def _total(
        self,
        works: Iterable[Work],
        guard: Guard | None,
        ratio: bool,
        lost: Callable[[Tensor], Tensor] | None = None,
        into: Aggregate | None = None,
    ) -> Total:
        """The sum over messages; the server's check of single ones included."""
        aggregate = Aggregate() if into is None else into
        left_out, suspects = list[int](), list[int]()
        for work in works:
            message, gone = work.message, None
            if lost is not None:  # that of one unit is that of its site
                units = lost(work.ids)
                gone = units if work.row is None else units.any().expand(1)
            absurd = message.withheld
            if guard is not None and guard.names and not message.sums:
                counts = added(aggregate.numbers, message.numbers)
                found = guard.suspects(message, work.examples, counts)
                if bool(found.any()):
                    message = message.without(found)
                    absurd = found if absurd is None else absurd | found
            received = aggregate.add(message, work.weights, gone)
            inside = work.settled(received)
            if absurd is not None:
                suspects += work.ids[(work.good & work.of_units(absurd)).cpu()].tolist()
            if work.outliers is not None:
                suspects += work.ids[work.outliers.cpu()].tolist()
            if not bool(inside.all()):
                left_out += work.ids[(~inside).cpu()].tolist()
        usual = {} if guard is None else guard.learned(aggregate.numbers)
        of = len(self.federation)
        return aggregate.total(of, ratio, left_out=tuple(left_out), suspects=tuple(suspects), usual=usual)


class _RoundExchange(Exchange):
    """Units' work in a round of so many messages; fused over units where each is a site of its own and
    messages arrive as they were sent."""

    def __init__(
        self, sites: Sites, method: Algorithm, round: Round, active: Active, messages: int, encode: bool
    ) -> None:
        self.sites, self.method, self.round, self.active = sites, method, round, active
        hidden, channel = round.secure is not None, method.channel
        # Norms are data: under privacy nothing looks at them.
        self.guard = None if round.private else guard_for(method, round.broadcast, messages, hidden)
        if sites.sites is not None and not hidden and round.private is None:
            self.units_guard = units_guard_for(method, round.broadcast, len(active.ids))
        alone = sites.sites is None and sites.lost is None
        self.fused = (
            alone and channel.transparent and not hidden and round.private is None and round.robust is None
        )
        remembers = role_of(method, Remembers)
        self.remembered = () if remembers is None else remembers.remembered
        self.sending = Sending(
            channel, round.key, self.guard, round.weigh, method.plain_sums, encode, method.sends,
            round.secure, messages, round.broadcast, round.private, round.number,
        )  # fmt: skip

    def weights_of(self, group: Tensor) -> Tensor:
        return self.active.weights_of(group)

    def answers(self, group: Tensor, cohort: Cohort, weights: Tensor) -> tuple[Tensors, Iterable[Answer]]:
        round, guard = self.round, self.guard
        local = self.sites.states(self.method, group, round.broadcast, round.key)
        now = replace(round, coefficients=weights if self.fused else None, omega=self.method.channel.omega)
        found = self._worked(now, cohort, local)
        if guard is not None and self.fused:
            sound = _in_proportion(found, guard, cohort.sizes)
            if sound is None:  # made again, each unit by itself
                sound = self._worked(replace(now, coefficients=None), cohort, local)
            found = sound
        return local, found

    def _worked(self, now: Round, cohort: Cohort, local: Tensors) -> Iterable[Answer]:
        done = self.method.local_round(now, cohort, local)
        found = [done] if isinstance(done, Answer) else done
        private = self.round.private
        if private is None:
            return found
        return (private_answer(self.method, answer, now.broadcast, private.adaptive) for answer in found)

    def settled(self, answer: Answer, local: Tensors, received: Tensor, seen: Tensors) -> Tensors:
        return settled_states(self.method, answer, local, received, seen)


class _QuestionExchange(Exchange):
    """Units' answers to a question."""

    def __init__(
        self,
        sites: Sites,
        question: Question[Any],
        asked: Tensors,
        personal: ModelMaker,
        sending: Sending,
        units_guard: Guard | None,
    ) -> None:
        self.sites, self.question, self.asked, self.units_guard = sites, question, asked, units_guard
        self.personal, self.sending = personal, sending

    def answers(self, group: Tensor, cohort: Cohort, weights: Tensor) -> tuple[Tensors, Iterable[Answer]]:
        units = self.sites.units(group, cohort, self.personal, self.question.name, self.units_guard)
        return {}, [self.question.answer(self.asked, units, self.sending.key)]


def _sound(works: Iterable[Work], question: Question[Any], guard: Guard) -> Iterator[Work]:
    """Works without rows that cannot be an answer, or are out of proportion; the first ones wait until there
    are enough for a median."""
    counts, held, rows = dict[str, float](), list[Work](), 0

    def judged() -> Iterator[Work]:
        for work in held:
            out = guard.beyond(work.message, work.examples, counts)
            if bool(out.any()):
                before = work.message.withheld
                withheld = out if before is None else out | before
                work = replace(work, message=replace(work.message.without(out), withheld=withheld))
            yield work
        held.clear()

    for work in works:
        message = work.message
        possible = question.possible(message.vectors) if message.vectors else None
        if possible is not None and not bool(possible.all()):
            wrong = message.received & ~possible
            work = replace(work, message=replace(message.without(wrong), withheld=wrong))
        counts = added(counts, guard.counted(work.message, work.examples))
        rows += int(work.message.received.sum())
        held.append(work)
        if rows >= MESSAGES_FOR_A_MEDIAN:
            yield from judged()
    yield from judged()


def _in_proportion(answers: Iterable[Answer], guard: Guard, sizes: Tensor) -> Iterable[Answer] | None:
    """The answers, or None where a sum that was made for all at once is out of proportion."""
    stream = iter(answers)
    first = next(stream, None)
    if first is None or not first.sums:
        return () if first is None else chain((first,), stream)
    fused = [first, *stream]
    for answer in fused:
        rows = sizes if answer.rows is None else sizes[answer.rows]
        if guard.finds_outliers(answer, rows):
            return None
    return fused


def settled_states(
    method: Algorithm, answer: Answer, local: Tensors, received: Tensor, seen: Tensors
) -> Tensors:
    """New states of an answer's units: all once it was received; else those that are right in any case."""
    new, rows = answer.local, answer.rows
    remembers = role_of(method, Remembers)
    if remembers is not None and remembers.remembered and seen:
        new = remembers.after_send(new, seen)
    if bool(received.all()):
        return dict(new)
    out = {}
    for name, value in new.items():
        if remembers is not None and name in remembers.keeps:
            out[name] = value
            continue
        old = local[name] if name in local else torch.zeros_like(value)
        old = old if rows is None or name not in local else old[rows]
        wide = received.reshape(-1, *[1] * (value.dim() - 1))
        out[name] = torch.where(wide, value, old)
    return out


def states_if_lost(keeps: Sequence[str], before: LocalStore, after: LocalStore, ids: Tensor) -> LocalStore:
    """States of a site whose message was not received: the units at these positions have taken part, and
    keep of the round what is right in any case, such as where a chain stands."""
    store = LocalStore.restore(before.state())
    cpu = torch.device("cpu")
    new, old = after.get(ids, cpu), before.get(ids, cpu)
    valid = {n: t if n in keeps or n not in old else old[n] for n, t in new.items()}
    lost = {n: torch.zeros_like(t) for n, t in new.items() if n not in keeps and n not in old}
    store.put(ids, valid | lost)
    return store


def site_of_each(sites: Mapping[str, Sequence[str]], federation: Federation) -> Tensor:
    """For each unit, the hash of its site's name, ``[b]``."""
    out = torch.full((len(federation),), -1, dtype=torch.int64)
    for site, names in sites.items():
        for name in names:
            i = federation.index(name)
            if int(out[i]) != -1:
                raise SettingsError(f"client {name!r} is at two sites; a unit is at one")
            out[i] = unit_of(as_text(site, "a site's name"))
    missing = (out == -1).nonzero().squeeze(1).tolist()
    if missing:
        raise SettingsError(f"client {federation.names[missing[0]]!r} is at no site; every unit is at one")
    return out
