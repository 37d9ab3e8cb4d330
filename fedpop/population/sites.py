"""Where units live: their data, what they keep between rounds, and the work that is asked of them.

On one machine all of them are here. Across machines each site has one of these for its own units, and what
``round`` and ``ask`` add up is added up by the server instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpop.algorithms.base import Algorithm, Round
from fedpop.channel import Answer, Channel, Guard, Heard, Tally, Tensors, Total
from fedpop.client.plan import Plan
from fedpop.client.store import LocalStore
from fedpop.errors import EstimateError, SettingsError
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation import Active, Everyone
from fedpop.keys import Key, unit_of
from fedpop.questions import Question, Table, Units
from fedpop.questions.schema import Ask

R = TypeVar("R")

Lost = Callable[[int, Tensor], Tensor]
"""Which of these units' messages never arrive in a round: ``lost(round, units)`` is ``[C]``."""
Update = tuple[Tensor, Tensors]
"""Positions of units, and what they keep from now on."""


@dataclass(frozen=True)
class Outcome:
    """A round or a question, done: what the server sees, what it cost, and what units keep once it counts."""

    total: Total
    cost: Mapping[str, float]
    left_out: tuple[int, ...]
    """Positions of units that were not heard."""
    bytes_up: int
    updates: Sequence[Update]
    suspects: tuple[int, ...] = ()
    """Positions of those among them whose messages were out of all proportion."""
    usual: Mapping[str, Tensor] = field(default_factory=dict)
    """What the guard has learned is usual."""


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

    @classmethod
    def of_tables(cls, tables: Mapping[str, Table]) -> Sites:
        """Tables whose rows are not examples yet: it has to be asked first how they are coded."""
        sizes = torch.tensor([len(next(iter(t.values()), ())) for t in tables.values()], dtype=torch.int64)
        rows = torch.zeros(int(sizes.sum()))
        packed = Packed(rows.unsqueeze(1)[:, :0], rows, torch.cumsum(sizes, 0) - sizes, sizes)
        federation = Federation(list(tables), {"train": packed})
        return cls(federation, torch.device("cpu"), tables=list(tables.values()))

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

        held, units = self.tables, Units(cohort, self.store.get(ids, self.device), models, split)
        return units if held is None else replace(units, tables=lambda: [held[i] for i in ids.tolist()])

    # --- states ------------------------------------------------------------------------------

    def keep(self, updates: Iterable[Update], entered: bool = True) -> None:
        """What units do once a round, or a question, has counted."""
        for ids, states in updates:
            self.store.put(ids, states, entered)

    def snapshot(self) -> LocalStore:
        """A copy of everyone's state, kept on order."""
        return LocalStore.restore(self.store.state())

    def states(self, method: Algorithm, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        """States of units, those entering for the first time included."""
        if self.store.all_seen(ids):
            return self.store.get(ids, self.device)
        entered = self.store.seen(ids)
        fresh = method.enter(self.federation.units[ids].to(self.device), broadcast, key)
        holding = self.store.slots[ids] >= 0
        held = self.store.get(ids[holding], self.device) if bool(holding.any()) else {}
        for name, value in held.items():
            # Of units that never took part only what a question left is theirs.
            known = holding if name in self.store.noted else entered
            if name not in fresh:
                fresh[name] = value.new_zeros((len(ids), *value.shape[1:]))
            fresh[name][known.to(self.device)] = value[known[holding].to(self.device)]
        return fresh

    # --- work --------------------------------------------------------------------------------

    def cohorts(self, ids: Tensor, plan: Plan) -> Iterator[tuple[Tensor, Cohort]]:
        """Units in cohorts that fit the plan; a single one of everyone is kept for the next time."""
        if self._everyone is not None and torch.equal(self._everyone[0], ids):
            yield self._everyone
            return
        for group in plan.cut(ids, self.federation.train.sizes, self.sites):
            cohort = self.federation.cohort(group, self.device)
            if len(group) == len(self.federation):
                self._everyone = (group, cohort)
            yield group, cohort

    def bytes_down(self, told: Tensors, ids: Tensor) -> int:
        """What it takes to tell this to the sites of these units, to each of them once."""
        sites = len(ids) if self.sites is None else len(torch.unique(self.sites[ids]))
        return sites * sum(t.numel() * t.element_size() for t in told.values())

    def round(self, method: Algorithm, round: Round, active: Active, plan: Plan) -> Outcome:
        """The active units' work, through the method's channel; nobody's state changes yet."""
        channel = method.channel
        messages = active.ids if self.sites is None else torch.unique(self.sites[active.ids])
        guard = method.guard_for(round.broadcast, len(messages))
        tally = Tally(channel, round.key, method.remembered, guard)
        sums = channel.transparent and self.sites is None and self.lost is None
        cost: dict[str, float] = {}
        updates: list[Update] = []
        left_out: list[int] = []
        suspects: list[int] = []
        for ids, cohort in self.cohorts(active.ids, plan):
            weights = active.weights_of(ids).to(self.device)
            local = self.states(method, ids, round.broadcast, round.key)
            now = replace(round, coefficients=weights if sums else None, omega=channel.omega)
            silent, absurd = self._work(method, now, ids, cohort, local, weights, tally, cost, updates, guard)
            suspects += absurd
            left_out += silent
        total = tally.total(len(self.federation), active.ratio)
        usual = {} if guard is None else guard.learned()
        return Outcome(total, cost, tuple(left_out), tally.bytes_up, updates, tuple(suspects), usual)

    def _work(
        self,
        method: Algorithm,
        round: Round,
        ids: Tensor,
        cohort: Cohort,
        local: Tensors,
        weights: Tensor,
        tally: Tally,
        cost: dict[str, float],
        updates: list[Update],
        guard: Guard | None,
    ) -> tuple[list[int], list[int]]:
        """One cohort's round; gives who was not heard, and whose message was absurd."""
        sites = None if self.sites is None else self.sites[ids].to(self.device)
        lost = None if self.lost is None else self.lost(round.number, cohort.units)
        paced = method.at_pace(round.broadcast)
        done = paced.local_round(round, cohort, local)
        answers: Iterable[Answer] = [done] if isinstance(done, Answer) else done
        if guard is not None and round.coefficients is not None:
            sound = _in_proportion(answers, guard, cohort.sizes)
            if sound is None:  # made again, each unit by itself
                done = paced.local_round(replace(round, coefficients=None), cohort, local)
                sound = [done] if isinstance(done, Answer) else done
            answers = sound
        if sites is not None and not isinstance(done, Answer):
            answers = [joined(list(answers), len(cohort))]
        new, left_out, absurd = dict(local), list[int](), list[int]()
        for answer in answers:
            rows = answer.rows
            units, counts, own, gone, sizes = (
                t if t is None or rows is None else t[rows]
                for t in (cohort.units, weights, sites, lost, cohort.sizes)
            )
            assert units is not None and counts is not None
            heard = tally.add(answer, units, counts, own, gone, examples=sizes)
            if heard.suspects is not None and bool(heard.suspects.any()):
                here = ids if rows is None else ids[rows.cpu()]
                absurd += here[heard.suspects.cpu()].tolist()
            states = settled(method, answer, heard, local)
            add_up(cost, answer.cost)
            if not heard.everyone:
                silent = ~heard.heard if rows is None else rows[~heard.heard]
                left_out += ids[silent.cpu()].tolist()
            if rows is None:
                new = new | states
                continue
            for name, value in states.items():
                if name not in new:
                    new[name] = value.new_zeros((len(cohort), *value.shape[1:]))
                elif new[name] is local.get(name):
                    new[name] = local[name].clone()  # once, for all blocks
                new[name].index_copy_(0, rows, value)
        updates.append((ids, new))
        return sorted(left_out), absurd

    def ask(
        self,
        question: Question[R],
        known: Tensors,
        key: Key,
        plan: Plan,
        personal: Callable[[Tensor], Tensors] | None = None,
        among: Tensor | None = None,
    ) -> tuple[R, Outcome]:
        """Ask everyone (or those at these positions) and make of the sum what the question makes of it."""
        tally, cost, updates, left_out = (
            Tally(Channel(), key),
            dict[str, float](),
            list[Update](),
            list[int](),
        )
        asked = question.ask(known)
        ids = Everyone().draw(self.federation.roster, key).ids if among is None else among
        for group, cohort in self.cohorts(ids, plan):
            answer = question.answer(asked, self.units(group, cohort, personal, question.name), key)
            sites = None if self.sites is None else self.sites[group].to(self.device)
            heard = tally.add(
                answer, cohort.units, torch.ones(len(group), device=self.device), sites
            ).heard.cpu()
            left_out += group[~heard].tolist()
            if answer.local:
                updates.append((group[heard], {n: v[heard.to(v.device)] for n, v in answer.local.items()}))
            add_up(cost, answer.cost)
        total = tally.total(len(self.federation), ratio=False)
        if total.count < question.quorum * len(ids):
            names = ", ".join(repr(self.federation.names[i]) for i in left_out[:5])
            raise EstimateError(
                f"{question.name}: {total.count} of {len(ids)} clients could be heard, not enough; left out "
                f"were {names}{', ...' if len(left_out) > 5 else ''}"
            )
        down = self.bytes_down(asked, ids)
        cost["bytes_down"] = cost.get("bytes_down", 0.0) + down
        return question.finish(known, total), Outcome(total, cost, tuple(left_out), tally.bytes_up, updates)


def _in_proportion(answers: Iterable[Answer], guard: Guard, sizes: Tensor) -> Iterable[Answer] | None:
    """The answers, or None where a sum that was made for all at once is out of proportion."""
    stream = iter(answers)
    first = next(stream, None)
    if first is None or not first.sums:
        return () if first is None else chain((first,), stream)
    fused = [first, *stream]
    owns = [sizes if a.rows is None else sizes[a.rows] for a in fused]
    odd = [guard.odd(a, own) for a, own in zip(fused, owns, strict=True)]
    return None if any(odd) else fused


def settled(method: Algorithm, answer: Answer, heard: Heard, local: Tensors) -> Tensors:
    """What units keep of an answer: all of it once it was heard; else what is right in any case."""
    new, rows = answer.local, answer.rows
    if method.remembered:
        new = method.after_send(new, heard.seen)
    if heard.everyone:
        return dict(new)
    out = {}
    for name, value in new.items():
        if name in method.keeps:
            out[name] = value
            continue
        old = local[name] if name in local else torch.zeros_like(value)
        old = old if rows is None or name not in local else old[rows]
        wide = heard.heard.reshape(-1, *[1] * (value.dim() - 1))
        out[name] = torch.where(wide, value, old)
    return out


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
        add_up(cost, answer.cost)
    return Answer(
        good=whole([a.good for a in answers]),
        vectors={n: whole([a.vectors[n] for a in answers]) for n in answers[0].vectors},
        local={n: whole([a.local[n] for a in answers]) for n in answers[0].local},
        cost=cost,
    )


def add_up(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add numbers to those of the same names."""
    for name, number in more.items():
        total[name] = total.get(name, 0.0) + number


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


def asked_of(tables: Mapping[str, Table]) -> Ask:
    """Carries questions to tables at sites of these names, all on this machine."""
    sites = Sites.of_tables(tables)

    def ask(question: Question[Any], known: Tensors) -> Any:
        return sites.ask(question, known, Key(0, purpose=question.name), Plan(0.0, 0.0, 1))[0]

    return ask
