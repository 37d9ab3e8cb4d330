"""Sites: units with their data and states, and what they do with a round or a question.

This is the one place where a round or a question is worked on. In the simulator one of these holds the units
of all sites, and messages have a row for each; across machines each site has one for its own units, and its
message has one row. Fusing a backward pass over units is an optimisation behind the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpop.errors import EstimateError, SettingsError
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation import Active, Everyone
from fedpop.keys import Key, unit_of
from fedpop.message import Aggregate, Answer, Channel, Guard, Message, Tensors, Total
from fedpop.message.declared import require_declared
from fedpop.message.message import NAMED, PLAIN, only
from fedpop.methods.base import Algorithm, Round
from fedpop.questions import Question, Table, Units
from fedpop.questions.schema import Ask
from fedpop.site.plan import Plan
from fedpop.site.store import LocalStore

R = TypeVar("R")

Lost = Callable[[int, Tensor], Tensor]
"""Which of these units' messages never arrive in a round: ``lost(round, units)`` is ``[C]``."""
Update = tuple[Tensor, Tensors]
"""Positions of units, and what they keep from now on."""


@dataclass(frozen=True)
class Work:
    """A message as the server sees it, and the units that it is of."""

    message: Message
    ids: Tensor
    """Positions of the units behind it, ``[C]``."""
    row: Tensor | None
    """Of each unit, the row of the message that it is in; None: each unit is a row."""
    good: Tensor
    """Which of them are in it, ``[C]``."""
    weights: Tensor
    """Participation weights of the rows, ``[S]``."""
    examples: Tensor
    """How many examples the rows are made of, ``[S]``."""
    settle: Callable[[Tensor], None]
    """To be called with the rows that the server received, ``[S]``: units' states follow from that."""

    def settled(self, received: Tensor) -> Tensor:
        """Settle; which units are in what was received, ``[C]``."""
        self.settle(received)
        return self.good & self.of_units(received)

    def of_units(self, rows: Tensor) -> Tensor:
        """Of each unit what its row has."""
        return rows if self.row is None else rows[self.row]


@dataclass(frozen=True)
class Sending:
    """How messages of a round, or of a question, are made."""

    channel: Channel
    key: Key
    guard: Guard | None = None
    weigh: bool = False
    """Participation weights act at the site."""
    plain: tuple[str, ...] = ()
    """Vectors that are wanted without weights, too."""
    encode: bool = False
    sends: Mapping[str, Any] = field(default_factory=dict)

    def sent(self, message: Message, weights: Tensor, examples: Tensor) -> Message:
        """What becomes of a message on its way."""
        require_declared(chain(message.vectors, message.sums), message.numbers, self.sends)
        own = weights if self.weigh else None
        message = self.channel.send(message, self.key, own, self.plain, self.encode)
        return message if self.guard is None else self.guard.held_back(message, examples)


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
    ) -> None:
        self.federation, self.device, self.lost, self.tables = federation, device, lost, tables
        self.store = LocalStore(len(federation)) if store is None else store
        self.sites = None if sites is None else site_of_each(sites, federation)
        self._everyone: tuple[Tensor, Cohort] | None = None
        self.updates: list[Update] = []
        """What units will keep once the last round, or question, counts."""

    @classmethod
    def one(
        cls,
        name: str,
        federation: Federation,
        device: torch.device,
        store: LocalStore | None = None,
        tables: Sequence[Table] | None = None,
    ) -> Sites:
        """The one site of this name, which all units are at."""
        return cls(federation, device, store, {name: federation.names}, tables=tables)

    # --- states ------------------------------------------------------------------------------

    def commit(self, entered: bool = True) -> None:
        """The last round, or question, counts: units keep what followed from it."""
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
        fresh = method.enter(self.federation.units[ids].to(self.device), broadcast, key)
        holding = self.store.slots[ids] >= 0
        stored = self.store.get(ids[holding], self.device) if bool(holding.any()) else {}
        for name, value in stored.items():
            # Of units that never took part only what a question left is theirs.
            known = holding if name in self.store.noted else entered
            if name not in fresh:
                fresh[name] = value.new_zeros((len(ids), *value.shape[1:]))
            fresh[name][known.to(self.device)] = value[known[holding].to(self.device)]
        return fresh

    def units(
        self, ids: Tensor, cohort: Cohort, personal: Callable[[Tensor], Tensors] | None, what: str
    ) -> Units:
        """The units at these positions as a question sees them."""

        def models() -> Tensors:
            if personal is None:
                raise EstimateError(f"{what} needs units' own models, which are made after training")
            return personal(ids)

        def split(which: str) -> Cohort:
            if which in self.federation.splits:
                return self.federation.cohort(ids, self.device, which)
            return cohort.take(slice(0, 0), cohort.units, torch.zeros_like(cohort.sizes))

        tables, units = self.tables, Units(cohort, self.store.get(ids, self.device), models, split)
        return units if tables is None else replace(units, tables=lambda: [tables[i] for i in ids.tolist()])

    # --- work --------------------------------------------------------------------------------

    def _cohort(self, group: Tensor) -> Cohort:
        """Units together; a cohort of everyone is cached."""
        if self._everyone is not None and torch.equal(self._everyone[0], group):
            return self._everyone[1]
        cohort = self.federation.cohort(group, self.device)
        if len(group) == len(self.federation):
            self._everyone = (group, cohort)
        return cohort

    def bytes_down(self, broadcast: Tensors, ids: Tensor) -> int:
        """What it takes to send this to the sites of these units, to each of them once."""
        sites = len(ids) if self.sites is None else len(torch.unique(self.sites[ids]))
        return sites * sum(t.numel() * t.element_size() for t in broadcast.values())

    def round_work(
        self, method: Algorithm, round: Round, active: Active, plan: Plan, messages: int, encode: bool = False
    ) -> Iterator[Work]:
        """The active units' work in a round of so many ``messages``, as the server sees it."""
        channel = method.channel
        fused = channel.transparent and self.sites is None and self.lost is None
        guard = method.guard_for(round.broadcast, messages)
        sending = Sending(channel, round.key, guard, round.weigh, method.plain_sums, encode, method.sends)
        paced = method.at_pace(round.broadcast)

        def answers(group: Tensor, cohort: Cohort, weights: Tensor) -> tuple[Tensors, Iterable[Answer]]:
            local = self.states(method, group, round.broadcast, round.key)
            now = replace(round, coefficients=weights if fused else None, omega=channel.omega)
            done = paced.local_round(now, cohort, local)
            found: Iterable[Answer] = [done] if isinstance(done, Answer) else done
            if guard is not None and fused:
                sound = _in_proportion(found, guard, cohort.sizes)
                if sound is None:  # made again, each unit by itself
                    done = paced.local_round(replace(now, coefficients=None), cohort, local)
                    sound = [done] if isinstance(done, Answer) else done
                found = sound
            return local, found

        def settled(answer: Answer, local: Tensors, good: Tensor, seen: Tensors) -> Tensors:
            return settled_states(method, answer, local, good, seen)

        remembered = method.remembered
        yield from self._work(active.ids, active.weights_of, plan, sending, answers, settled, remembered)

    def question_work(
        self,
        question: Question[Any],
        asked: Tensors,
        key: Key,
        plan: Plan,
        personal: Callable[[Tensor], Tensors] | None = None,
        among: Tensor | None = None,
        encode: bool = False,
    ) -> Iterator[Work]:
        """Answers to a question of everyone, or of those at these positions, as the server sees them."""
        ids = torch.arange(len(self.federation)) if among is None else among
        sending = Sending(Channel(), key, encode=encode, sends=question.sends)

        def answers(group: Tensor, cohort: Cohort, weights: Tensor) -> tuple[Tensors, Iterable[Answer]]:
            return {}, [question.answer(asked, self.units(group, cohort, personal, question.name), key)]

        yield from self._work(ids, lambda group: torch.ones(len(group)), plan, sending, answers, None, ())

    def _work(
        self,
        ids: Tensor,
        weights_of: Callable[[Tensor], Tensor],
        plan: Plan,
        sending: Sending,
        answers: Callable[[Tensor, Cohort, Tensor], tuple[Tensors, Iterable[Answer]]],
        settled: Callable[[Answer, Tensors, Tensor, Tensors], Tensors] | None,
        remembered: tuple[str, ...],
    ) -> Iterator[Work]:
        """Messages as they are ready; what follows for states is in ``updates`` once all were settled. Of a
        question (``settled`` is None) only units that were received keep anything."""
        self.updates = []
        if self.sites is None:
            for group in plan.cut(ids, self.federation.train.sizes):
                cohort, weights = self._cohort(group), weights_of(group).to(self.device)
                local, found = answers(group, cohort, weights)
                states = _States(group, local, settled, remembered, self.updates)
                for answer in found:
                    yield states.work(answer, cohort, weights, sending)
                states.done()
            return
        sites = self.sites
        for site, groups in groupby(
            plan.cut(ids, self.federation.train.sizes, sites), key=lambda group: int(sites[group[0]])
        ):
            whole = SiteSum(site, settled, remembered, self.updates)
            for group in groups:
                cohort, weights = self._cohort(group), weights_of(group).to(self.device)
                local, found = answers(group, cohort, weights)
                whole.add(group, cohort.sizes, weights, local, joined(list(found), len(cohort)))
            yield whole.work(sending)

    # --- the simulator: many sites in one process ----------------------------------------------

    def round(self, method: Algorithm, round: Round, active: Active, plan: Plan) -> Total:
        """The active units' work, added up; nobody's state changes before ``commit``."""
        messages = len(active.ids if self.sites is None else torch.unique(self.sites[active.ids]))
        guard = method.guard_for(round.broadcast, messages)
        work = self.round_work(method, round, active, plan, messages)
        lost = None if self.lost is None else lambda ids: self._lost(round.number, ids)
        return self._total(work, guard, active.ratio, lost)

    def _lost(self, number: int, ids: Tensor) -> Tensor:
        assert self.lost is not None
        return self.lost(number, self.federation.units[ids].to(self.device))

    def ask(
        self,
        question: Question[R],
        known: Tensors,
        key: Key,
        plan: Plan,
        personal: Callable[[Tensor], Tensors] | None = None,
        among: Tensor | None = None,
    ) -> tuple[R, Total]:
        """Ask everyone (or those at these positions) and make of the sum what the question makes of it."""
        asked = question.ask(known)
        ids = Everyone().draw(self.federation.roster, key).ids if among is None else among
        total = self._total(self.question_work(question, asked, key, plan, personal, ids), None, False)
        if total.count < question.quorum * len(ids):
            names = ", ".join(repr(self.federation.names[i]) for i in total.left_out[:5])
            raise EstimateError(
                f"{question.name}: {total.count} of {len(ids)} clients could be heard, not enough; left out "
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
    ) -> Total:
        """The sum over messages; the server's own look at single ones included."""
        aggregate, left_out, suspects = Aggregate(), list[int](), list[int]()
        for work in works:
            message, gone = work.message, None
            if lost is not None:  # that of one unit is that of its site
                units = lost(work.ids)
                gone = units if work.row is None else units.any().expand(1)
            absurd = message.withheld
            if guard is not None and guard.names and not message.sums:
                counts = _added(aggregate.numbers, message.numbers)
                found = guard.suspects(message, work.examples, counts)
                if bool(found.any()):
                    message = message.without(found)
                    absurd = found if absurd is None else absurd | found
            received = aggregate.add(message, work.weights, gone)
            inside = work.settled(received)
            if absurd is not None:
                suspects += work.ids[(work.good & work.of_units(absurd)).cpu()].tolist()
            if not bool(inside.all()):
                left_out += work.ids[(~inside).cpu()].tolist()
        usual = {} if guard is None else guard.learned(aggregate.numbers)
        of = len(self.federation)
        return aggregate.total(of, ratio, left_out=tuple(left_out), suspects=tuple(suspects), usual=usual)


class _States:
    """A cohort in which every unit is a site: its answers as messages, and the states that follow."""

    def __init__(
        self,
        group: Tensor,
        local: Tensors,
        settled: Callable[[Answer, Tensors, Tensor, Tensors], Tensors] | None,
        remembered: tuple[str, ...],
        updates: list[Update],
    ) -> None:
        self.group, self.local, self.settled, self.remembered = group, local, settled, remembered
        self.new, self.updates = dict(local), updates

    def work(self, answer: Answer, cohort: Cohort, weights: Tensor, sending: Sending) -> Work:
        rows, units, sizes, ids = answer.rows, cohort.units, cohort.sizes, self.group
        if rows is not None:
            units, sizes, weights, ids = units[rows], sizes[rows], weights[rows], ids[rows.cpu()]
        message = Message.of(answer, units)
        message = sending.sent(message, weights, sizes)

        def settle(received: Tensor) -> None:
            self._settle(answer, received, message)

        return Work(message, ids, None, answer.good, weights, sizes, settle)

    def _settle(self, answer: Answer, received: Tensor, message: Message) -> None:
        if self.settled is None:
            if answer.local:
                some = received.cpu()
                self.updates.append((self.group[some], {n: v[received] for n, v in answer.local.items()}))
            return
        states = self.settled(answer, self.local, received, _seen(message, self.remembered))
        if answer.rows is None:
            self.new = self.new | states
            return
        for name, value in states.items():
            if name not in self.new:
                self.new[name] = value.new_zeros((len(self.group), *value.shape[1:]))
            elif self.new[name] is self.local.get(name):
                self.new[name] = self.local[name].clone()  # once, for all blocks
            self.new[name].index_copy_(0, answer.rows, value)

    def done(self) -> None:
        if self.settled is not None:
            self.updates.append((self.group, self.new))


class SiteSum:
    """One site's message, added up cohort by cohort: no more than one cohort's vectors are ever there."""

    def __init__(
        self,
        site: int,
        settled: Callable[[Answer, Tensors, Tensor, Tensors], Tensors] | None,
        remembered: tuple[str, ...],
        updates: list[Update],
    ) -> None:
        self.site, self.settled, self.remembered, self.updates = site, settled, remembered, updates
        self.sums: Tensors = {}
        self.numbers: dict[str, float] = {}
        self.named: dict[str, tuple[str, list[Tensor]]] = {}
        self.parts: list[tuple[Tensor, Tensors, Answer]] = []
        self.weights: list[Tensor] = []
        self.examples = 0

    def add(self, group: Tensor, sizes: Tensor, weights: Tensor, local: Tensors, answer: Answer) -> None:
        """One cohort's answer; who is not good is left out."""
        good = answer.good
        for name, vectors in answer.vectors.items():
            # One unit after the other: where cohorts are cut changes no bit of a sum.
            so_far = self.sums[name] if name in self.sums else vectors.new_zeros(vectors.shape[1])
            one = torch.zeros(len(good), dtype=torch.int64, device=vectors.device)
            self.sums[name] = so_far.unsqueeze(0).index_add(0, one, only(good, vectors))[0]
        for name, total in answer.sums.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, (of, coefficients) in answer.named.items():
            self.named.setdefault(name, (of, []))[1].append(coefficients[good])
        self.numbers = _added(self.numbers, answer.cost)
        self.weights.append(weights)
        self.examples += int(sizes.sum())
        self.parts.append((group, local, replace(answer, vectors={}, sums={}, named={})))

    def work(self, sending: Sending) -> Work:
        good = torch.cat([answer.good for _, _, answer in self.parts])
        weights = torch.cat(self.weights)
        weight = alike(weights, "take part with different probabilities")
        count, device = int(good.sum()), good.device
        named = {}
        for name, (of, each) in self.named.items():
            own = torch.cat(each)
            named[name] = (of, alike(own, f"count differently in {name!r}") if count else own.new_zeros(1))
        message = Message(
            torch.tensor([self.site], device=device),
            torch.tensor([count], device=device),
            {n: v.unsqueeze(0) for n, v in self.sums.items()},
            self.numbers,
            named,
        )
        examples = torch.tensor([self.examples], device=device)
        message = sending.sent(message, weight, examples)

        def settle(received: Tensor) -> None:
            self._settle(received, message, count)

        ids = torch.cat([group for group, _, _ in self.parts])
        return Work(message, ids, torch.zeros_like(good, dtype=torch.int64), good, weight, examples, settle)

    def _settle(self, received: Tensor, message: Message, count: int) -> None:
        spoke, shares = bool(received.all()), {}
        if spoke:  # units of one site share evenly what the server saw of it
            shares = {n: v[0] / max(count, 1) for n, v in _seen(message, self.remembered).items()}
        for group, local, answer in self.parts:
            good = answer.good & spoke
            if self.settled is None:
                some = good.cpu()
                if answer.local and bool(some.any()):
                    self.updates.append((group[some], {n: v[good] for n, v in answer.local.items()}))
                continue
            own = {n: v.expand(len(group), -1) for n, v in shares.items()}
            self.updates.append((group, local | self.settled(answer, local, good, own)))


def _seen(message: Message, remembered: tuple[str, ...]) -> Tensors:
    """What the server saw of vectors that units remember, without participation weights."""
    if not message.weighted:
        return {n: message.vectors[n] for n in remembered if n in message.vectors}
    seen = {n: message.vectors[PLAIN + n] for n in remembered if PLAIN + n in message.vectors}
    for name, (of, coefficients) in message.named.items():
        if of in remembered:
            v = message.vectors[NAMED + name]
            by = torch.where(coefficients == 0, 1.0, coefficients).to(v.dtype)
            seen[of] = v / by.unsqueeze(1)
    return seen


def _in_proportion(answers: Iterable[Answer], guard: Guard, sizes: Tensor) -> Iterable[Answer] | None:
    """The answers, or None where a sum that was made for all at once is out of proportion."""
    stream = iter(answers)
    first = next(stream, None)
    if first is None or not first.sums:
        return () if first is None else chain((first,), stream)
    fused = [first, *stream]
    for answer in fused:
        own = sizes if answer.rows is None else sizes[answer.rows]
        if guard.odd(answer, own):
            return None
    return fused


def settled_states(
    method: Algorithm, answer: Answer, local: Tensors, received: Tensor, seen: Tensors
) -> Tensors:
    """What units keep of an answer: all of it once it was received; else what is right in any case."""
    new, rows = answer.local, answer.rows
    if method.remembered and seen:
        new = method.after_send(new, seen)
    if bool(received.all()):
        return dict(new)
    out = {}
    for name, value in new.items():
        if name in method.keeps:
            out[name] = value
            continue
        old = local[name] if name in local else torch.zeros_like(value)
        old = old if rows is None or name not in local else old[rows]
        wide = received.reshape(-1, *[1] * (value.dim() - 1))
        out[name] = torch.where(wide, value, old)
    return out


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


def joined(answers: Sequence[Answer], units: int) -> Answer:
    """Blocks of one cohort as one answer."""
    if len(answers) == 1 and answers[0].rows is None:
        return answers[0]
    rows = torch.cat([torch.arange(units) if a.rows is None else a.rows for a in answers])

    def whole(pieces: list[Tensor]) -> Tensor:
        """Rows of all blocks, in the cohort's order."""
        stacked = torch.cat(pieces)
        return torch.zeros_like(stacked).index_copy(0, rows, stacked)

    cost: dict[str, float] = {}
    for answer in answers:
        cost = _added(cost, answer.cost)
    return Answer(
        good=whole([a.good for a in answers]),
        vectors={n: whole([a.vectors[n] for a in answers]) for n in answers[0].vectors},
        local={n: whole([a.local[n] for a in answers]) for n in answers[0].local},
        cost=cost,
    )


def _added(numbers: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Numbers and those of the same names, added up."""
    return {**numbers, **{name: numbers.get(name, 0.0) + number for name, number in more.items()}}


def alike(values: Tensor, otherwise: str) -> Tensor:
    """The one value that units of a site have in common, ``[1]``."""
    if not bool((values == values[0]).all()):
        raise SettingsError(
            f"units of one site {otherwise}: a site sends one sum, which can have one weight only; give its "
            "units the same"
        )
    return values[:1]


def site_of_each(sites: Mapping[str, Sequence[str]], federation: Federation) -> Tensor:
    """For each unit, the hash of its site's name, ``[b]``."""
    out = torch.full((len(federation),), -1, dtype=torch.int64)
    for site, names in sites.items():
        for name in names:
            i = federation.index(name)
            if int(out[i]) != -1:
                raise SettingsError(f"client {name!r} is at two sites; a unit is at one")
            out[i] = unit_of(site)
    missing = (out == -1).nonzero().squeeze(1).tolist()
    if missing:
        raise SettingsError(f"client {federation.names[missing[0]]!r} is at no site; every unit is at one")
    return out


# --- tables, before it is agreed what examples look like ---------------------------------------


def table_units(tables: Mapping[str, Table]) -> Federation:
    """Tables as units whose rows are not examples yet: it has to be asked first how they are coded."""
    sizes = torch.tensor([len(next(iter(t.values()), ())) for t in tables.values()], dtype=torch.int64)
    rows = torch.zeros(int(sizes.sum()))
    packed = Packed(rows.unsqueeze(1)[:, :0], rows, torch.cumsum(sizes, 0) - sizes, sizes)
    return Federation(list(tables), {"train": packed})


def asked_of(tables: Mapping[str, Table]) -> Ask:
    """Asks questions of tables at sites of these names, all on this machine."""
    sites = Sites(table_units(tables), torch.device("cpu"), tables=list(tables.values()))

    def ask(question: Question[Any], known: Tensors) -> Any:
        return sites.ask(question, known, Key(0, purpose=question.name), WHOLE)[0]

    return ask


WHOLE = Plan(0.0, 0.0, 1)
"""All units together."""
