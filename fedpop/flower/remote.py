"""Members at other sites: they receive the study, rounds and questions as requests."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from fedpop.checked import Count, NotNegative, OneOf, Positive, require
from fedpop.errors import DataError, EstimateError, SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Active, Participation, Roster
from fedpop.flower.aggregation import Aggregated, Aggregator
from fedpop.flower.requests import TRIAL, Request, digest_for, digest_of, versions
from fedpop.flower.secure_sums import SecureSums, SecureTerms, total_of
from fedpop.flower.site_records import (
    ActivePart,
    SiteRecord,
    active_parts,
    examples_in,
    positions,
    roster_of_sites,
)
from fedpop.flower.transport import Enough, Transport
from fedpop.keys import Key
from fedpop.message import Channel, Message, Tensors, Total
from fedpop.methods.asking import describe_question
from fedpop.methods.base import Algorithm, Round, guard_for, units_guard_for
from fedpop.run.members import Asking, Members
from fedpop.run.settings import Settings
from fedpop.settings import describe
from fedpop.site.store import LocalStore
from fedpop.site.study import Study
from fedpop.site.work import WITHHELD_UNITS

log = logging.getLogger("fedpop.server")

R = TypeVar("R")
WEIGHTS = ("rule", "observed")
QUIET_SECONDS, GREETED_SECONDS = 30.0, 5.0
"""Seconds after which it is said again for whom one waits, and after a greeting said for the first time."""


@dataclass(frozen=True)
class RoundTerms:
    """When a round is over, and how sites count.

    >>> RoundTerms(quorum=0.5, timeout=120.0).enough(2, of=4)
    True
    """

    sites: int = 1
    """Sites that can be asked before a round is begun, at least: they are there, have answered what comes
    before the rounds, and are not busy with an earlier request. With fewer the server waits."""
    begin: int | None = None
    """Sites that must be there when the run begins, or goes on; as many as ``sites`` by default."""
    quorum: float = 1.0
    """The share of those asked whose replies close a round."""
    grace: float = 0.0
    """Seconds that it waits for the others once it has them."""
    timeout: float = 600.0
    """Seconds after which it is closed in any case, unless the method needs everyone."""
    unheard: int = 10
    """Rounds that may go by, at most, in which a site that is there was asked, or busy, and not heard: then
    one waits for it, and ends without it after ``timeout`` only."""
    weights: str = "rule"
    """``observed``: each site counts one over the share of rounds in which its message was received."""

    def __post_init__(self) -> None:
        require(Count, sites=self.sites, begin=self.first, unheard=self.unheard)
        require(Positive, quorum=self.quorum, timeout=self.timeout)
        require(NotNegative, grace=self.grace)
        require(Annotated[str, OneOf(*WEIGHTS)], weights=self.weights)
        if self.quorum > 1:
            raise SettingsError(f"quorum is a share of the sites asked, at most 1, not {self.quorum}")

    @property
    def first(self) -> int:
        """Sites of the first round, at least."""
        return self.sites if self.begin is None else self.begin

    @property
    def waits(self) -> bool:
        """Rounds wait for everyone who was asked."""
        return self.quorum >= 1

    def enough(self, received: int, of: int) -> bool:
        """Whether so many replies are a quorum."""
        return received >= self.quorum * of

    def closing(self, asked: Collection[str], overdue: Collection[str], now: Callable[[], float]) -> Enough:
        """Whether replies close a round: a quorum and its grace, and everyone who is ``overdue``."""
        reached: list[float] = []

        def closed(replies: Mapping[str, Message]) -> bool:
            if not self.enough(sum(r.refused is None for r in replies.values()), len(asked)):
                return False
            reached.append(now())
            return reached[-1] - reached[0] >= self.grace and set(overdue) <= replies.keys()

        return closed


def never(replies: Mapping[str, Message]) -> bool:
    """Everyone who was asked is waited for."""
    return False


class RemoteMembers(Members):
    """Sites that are reached by requests."""

    def __init__(
        self,
        study: Study,
        transport: Transport,
        experiment: str,
        terms: RoundTerms,
        settings: Settings,
        *,
        before: Mapping[str, SiteRecord] | None = None,
        secure: SecureTerms | None = None,
        folder: Path | None = None,
    ) -> None:
        if secure is not None:
            secure.check_quorum(terms.quorum)
            terms = replace(terms, sites=max(terms.sites, secure.policy.minimum_sites))
        self._secure = None if secure is None else SecureSums(secure, transport, experiment, folder)
        self._before = dict(before or {})
        """Sites of the run that this one goes on with: who else comes is new to it."""
        self._transport, self._terms, self._settings = transport, terms, settings
        self._study, self.experiment = study, experiment
        transport.hello = self._hello()
        self.sites: dict[str, SiteRecord] = {}
        self._begun = False
        self._anew = False
        """Sites are greeted about another study: for a moment all of them are away."""
        self._refused: dict[str, str] = {}
        """Sites that the settings have no place for, and why."""
        self._outside: frozenset[str] = frozenset()
        """Sites that are not asked about the present study."""
        self._passed_over: set[str] = set()
        """Sites that could not be asked for the last round: they were busy with an earlier one."""
        self._asked: set[str] = set()
        self._messages = Aggregator(self.device)
        self._lasting: dict[str, Total] = {}
        """Sums of everyone's answers to questions that whoever comes later is asked, too."""
        self._again: dict[str, float] = {}
        """When a site that did not answer them is asked again."""
        self._at_the_door: list[str] = []
        """Sites that wait for others, so that their sum is nobody's alone."""
        self._part: dict[str, int] = {}
        """Sites that are in the last total, and how many units of theirs."""
        self._drawn_among: tuple[list[Any], Roster] = ([], Roster(torch.zeros(0, dtype=torch.int64)))
        self._round, self._best, self._recall, self._trials = -1, -1, False, 0
        self._metrics: dict[str, Any] = {}

    # --- what sites receive first --------------------------------------------------------------

    def _hello(self) -> Request:
        """What the experiment is about."""
        plain, tensors = self._study.description()
        description = {"kind": type(self._study).__name__} | plain
        text = json.dumps([description, digest_of(tensors)], sort_keys=True)
        header: dict[str, Any] = versions() | {"experiment": self.experiment}
        header["study"] = description
        header |= {"study_digest": hashlib.sha256(text.encode()).hexdigest()[:32]}
        header |= {} if self._secure is None else {"secure": self._secure.terms.plain()}
        header["drawn"] = self._study.drawn(self._settings.participation)
        return Request("hello", header, tensors)

    def update_study(self, study: Study, without: Collection[str] = ()) -> None:
        """Everyone is greeted anew, and says anew how many units there are; these sites stay outside."""
        here = {name: site.node for name, site in self._transport.sites.items()}
        if study.fixed and self._begun:
            self._before = dict(self.sites)  # nobody else, and nobody less
        self._study, self.sites, self._begun, self._refused, self._anew = study, {}, False, {}, True
        self._messages, self._outside = Aggregator(self.device), frozenset(without)
        self._transport.greet_all(self._hello())
        self.wait()
        self._settle(here)

    def _settle(self, nodes: Mapping[str, int]) -> None:
        """Wait until each of these sites has said whether it can take part, or is gone, or time is up."""
        end = self._transport.now() + self._terms.timeout
        while self._transport.now() < end:
            settled = {*self.wait(), *self.refused, *self._refused, *self._outside}
            if not any(self._transport.alive(node) for n, node in nodes.items() if n not in settled):
                return
            self._transport.pause()

    @property
    def refused(self) -> dict[str, str]:
        """Sites that say that they cannot take part, and why."""
        return dict(self._transport.refused)

    def update_method(self, method: Algorithm) -> None:
        """Everyone is greeted anew: what a method left open has been found."""
        self._study = self._study.by(method)
        here = list(self._transport.sites)
        self._transport.greet_all(self._hello())
        self.wait(here, patience=self._terms.timeout)

    # --- who there is ------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return self._terms.waits

    @property
    def quorum(self) -> float:
        return self._terms.quorum

    @property
    def device(self) -> torch.device:
        return self._study.device

    @property
    def names(self) -> list[str]:
        return sorted(self.sites)

    @property
    def units(self) -> int:
        return sum(site.units for name, site in self.sites.items() if self._ready(name))

    @property
    def roster(self) -> Roster:
        """Units of all sites, in the order of the sites' names."""
        now = [(n, self.sites[n].units, self.sites[n].hashes) for n in self.names]
        if now != self._drawn_among[0]:
            self._drawn_among = (now, roster_of_sites(self.sites))
        return self._drawn_among[1]

    def names_of(self, ids: Iterable[int]) -> list[str]:
        whose = self.roster.names
        return list(dict.fromkeys(whose[i] for i in ids))

    @property
    def examples(self) -> int:
        return sum(site.examples for site in self.sites.values())

    @property
    def _needed(self) -> list[str]:
        """Sites without whom there is no round."""
        return self.names if self._study.needs_everyone else []

    @property
    def federation(self) -> Federation | None:
        return None

    @property
    def splits(self) -> Collection[str]:
        return {split for site in self.sites.values() for split in site.splits}

    @property
    def store(self) -> LocalStore | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"experiment": self.experiment}

    def fresh(self, method: Algorithm) -> Members:
        """The same sites in an experiment beside this one, which they forget when this one is over. All who
        are here are waited for: likelihoods of different sites cannot be compared."""
        self._trials += 1
        log.info("trial rounds, %d: they take as long as any rounds", self._trials)
        name, terms = (
            f"{self.experiment}{TRIAL}{self._trials}",
            replace(self._terms, sites=len(self.sites), begin=None),
        )
        secure = None if self._secure is None else self._secure.terms
        sibling = self._transport.sibling()
        trial = RemoteMembers(self._study.by(method), sibling, name, terms, self._settings, secure=secure)
        trial.wait()
        return trial

    def wait(
        self, whom: Collection[str] = (), patience: float = math.inf, *, asked: bool = False
    ) -> list[str]:
        """Who is there, once it is enough of them and these are among them, or patience is at its end; says
        for whom it waits. ``asked``: only those count, and are given, who can be asked for a round now."""
        least = self._terms.sites if self._begun else self._terms.first
        logged = self._transport.now() - QUIET_SECONDS + GREETED_SECONDS if self._anew else -math.inf
        whom = sorted({*whom, *self._before}) if self._study.fixed and not self._begun else whom
        end = self._transport.now() + patience
        while True:
            if asked:
                self._transport.drop_late()
            here = [name for name in self._transport.present() if self._admitted(name)]
            for name in here:
                self.sites.setdefault(name, SiteRecord()).greeted(self._transport.sites[name].header)
            self._require_all(whom)
            if asked:
                here = [n for n in here if self._ready(n) and not self._transport.busy(n)]
            missing = sorted(set(whom) - set(here))
            if (len(here) >= least and not missing) or self._transport.now() > end:
                self._begun = True
                return here
            if self._transport.now() - logged >= QUIET_SECONDS:
                log.info("waiting for %s; here: %s", self._lacking(here, missing, least), _listed(here))
                logged = self._transport.now()
            self._transport.pause()

    def _lacking(self, here: Collection[str], missing: Collection[str], least: int) -> str:
        """For whom it waits, and where they are."""
        if missing:
            return ", ".join(f"{n} ({self._where(n)})" for n in missing)
        known = sorted({*self.sites, *self._before, *self.refused, *self._transport.unconfirmed} - set(here))
        of = f" ({'; '.join(f'{n}: {self._where(n)}' for n in known)})" if known else ""
        return f"{least - len(here)} more site(s){of}"

    def _where(self, name: str) -> str:
        """Why a site cannot be asked now."""
        if name in self._refused or name in self.refused:
            return f"it cannot take part: {(self._refused | self.refused)[name]}"
        if name in self._transport.unconfirmed:
            return self._transport.unconfirmed[name]
        if self._transport.busy(name):
            return "busy with an earlier request"
        if name in self._transport.sites and not self._ready(name):
            return "it has not answered the questions before the rounds"
        return "away"

    def _require_all(self, whom: Collection[str]) -> None:
        """Raise where a site says that it cannot take part, of those without whom nothing makes sense."""
        refused = sorted(self._transport.refused.items()) if self._study.fixed else []
        open_ = not self._begun and not self._before
        why = [f"{n}: {w}" for n, w in refused if open_ or n in {*self.sites, *whom}]
        if why:
            raise DataError(f"not every site can take part ({'; '.join(why)})")

    def _admitted(self, name: str) -> bool:
        """Whether settings that are given by site have one for a site that comes after the start."""
        if name in self._outside:
            return False
        if self._secure is not None and name not in self._secure.terms.admitted:
            if name not in self._refused:
                self._refused[name] = "it was admitted after the server began: start the server again"
                log.warning("%s cannot take part: %s", name, self._refused[name])
            return False
        if not (self._begun or self._before) or name in self.sites or name in self._before:
            return True
        if self._study.fixed:
            if name not in self._refused:
                self._refused[name] = "it came after the start"
                log.warning("%s cannot take part: %s", name, self._refused[name])
            return False
        if name not in self._refused:
            new = SiteRecord()
            new.greeted(self._transport.sites[name].header)
            try:
                every = self._before | self.sites | {name: new}
                self._settings.participation.check(roster_of_sites(every))
                self._study.check(sorted(every))
            except SettingsError as error:
                self._refused[name] = str(error)
                log.warning("%s cannot take part: %s", name, error)
        return name not in self._refused

    def active(self, rule: Participation, key: Key, round: int) -> Active:
        """As in the simulator, by units' names, among those whose sites are there and not busy with another
        round."""
        if self._secure is not None and (begun := self._secure.begun(round)) is not None:
            self.wait(sorted(begun["parts"]["sites"]), self._terms.timeout, asked=True)
            return self._active_again(begun["parts"])
        free = self.wait(self._needed, asked=True)
        if busy := sorted(self.overdue - set(free)):
            free = self.wait(busy, self._terms.timeout, asked=True) or free
        self._passed_over = {n for n in self._transport.present() if self._transport.busy(n)}
        roster, key = self.roster, key.at(round=round, purpose="participation")
        active = rule.draw_among(roster, torch.tensor([n in free for n in roster.names]), key)
        if self._terms.weights == "rule":
            return active
        each = [self.sites[roster.names[i]] for i in active.ids.tolist()]
        weights = torch.tensor([(s.rounds + 1) / (s.times + 1) for s in each], dtype=torch.float32)
        return Active(active.ids, weights, ratio=False)

    def _active_again(self, parts: Mapping[str, Any]) -> Active:
        """Who was to take part in a round that was begun before the server was killed."""
        place, ids, weights = positions(self.sites), list[Tensor](), list[Tensor]()
        for name, (units, weight) in sorted(parts["sites"].items()):
            some = place[name] if units is None else place[name][units]
            ids.append(some)
            weights.append(torch.full((len(some),), weight))
        return Active(torch.cat(ids), torch.cat(weights), parts["ratio"])

    @property
    def overdue(self) -> set[str]:
        """Sites that are there and have not been heard for too long."""
        here = self._transport.present()
        return {n for n in here if n in self.sites and self.sites[n].missed >= self._terms.unheard}

    # --- rounds ------------------------------------------------------------------------------

    def _header(self, name: str, **more: Any) -> dict[str, Any]:
        """What every request has: which round of the site's counted last, among others."""
        site = self.sites[name]
        common = {"heard": site.heard, "noted": site.noted, "best": self._best, "seed": self._settings.seed}
        return versions() | {"experiment": self.experiment} | common | more

    def round(self, method: Algorithm, round: Round, active: Active) -> Total:
        parts, digest = active_parts(self.sites, active), digest_of(round.broadcast)
        # How many take part is for nobody who reads theta, as sites do.
        active_sites = len(parts) if round.private is None else len(self.sites)
        shared: dict[str, Any] = {"round": round.number, "active": active_sites}
        shared |= {} if round.private is None else {"private": round.private.plain()}
        requests = {}
        for name, part in parts.items():
            its: dict[str, Any] = {"units": part.units, "digest": digest_for(digest, part.units)}
            its |= {"weight": part.weight} if round.weigh else {}
            its |= {} if round.secure is None else {"secure": {"bits": round.secure.bits}}
            requests[name] = Request("train", self._header(name, **shared, **its), round.broadcast)
        weights = {name: part.weight for name, part in parts.items()}
        everyone = self._study.needs_everyone
        timeout = None if everyone else self._terms.timeout
        overdue = self.overdue & requests.keys()
        if overdue and not self._terms.waits:
            log.info(
                "this round waits for %s, not heard for %d rounds", _listed(overdue), self._terms.unheard
            )
        enough = never if everyone else self._terms.closing(requests, overdue, self._transport.now)
        if round.secure is not None:
            return self._secure_round(method, round, active, parts, requests, enough)
        replies = self._transport.send(requests, timeout, enough)
        if everyone:
            replies = self._transport.retry_lost(
                requests, replies, timeout, lambda lost: bool(self.wait(lost))
            )
        self._round, self._asked = round.number, set(requests)
        private = round.private is not None
        guard = None if private else guard_for(method, round.broadcast, len(requests))
        units = None if private else units_guard_for(method, round.broadcast, self.units)
        kind = method.model.initial_phi().dtype
        aggregated = self._messages.aggregate(
            "train",
            method.channel,
            kind,
            requests,
            replies,
            of=self.units,
            weights=weights,
            ratio=active.ratio,
            guard=guard,
            units=units,
            examples={n: examples_in(self.sites[n], part) for n, part in parts.items()},
            sends=method.sends,
        )
        return self._located({name: part.ids for name, part in parts.items()}, aggregated)

    def _secure_round(
        self,
        method: Algorithm,
        round: Round,
        active: Active,
        parts: Mapping[str, ActivePart],
        requests: Mapping[str, Request],
        enough: Enough,
    ) -> Total:
        """A round of which nothing is seen but the sum; one that cannot be opened is of nobody."""
        assert self._secure is not None and round.secure is not None
        sharing = 0 if round.private is None else round.private.sharing
        timeout = self._terms.timeout
        if self._study.needs_everyone:
            found = self._secure.everyone(requests, timeout, self._back, True, sharing)
        else:
            again = {"ratio": active.ratio, "sites": {n: (p.units, p.weight) for n, p in parts.items()}}
            found = self._secure.round(round.number, requests, again, sharing, timeout, enough, self._back)
        self._round, self._asked = round.number, set(requests)
        guard = None if round.private else guard_for(method, round.broadcast, len(requests), True)
        ids = {name: part.ids for name, part in parts.items()}
        message, ratio = found.message, active.ratio
        if message is None:  # no step, whatever the weights
            message, ratio = Message(torch.zeros(1), torch.zeros(1, dtype=torch.int64), checked=True), True
        weights = {name: part.weight for name, part in parts.items()}
        margin = round.secure.margin
        total = total_of(
            message,
            weights,
            self.units,
            ratio,
            self.device,
            guard=guard,
            broadcast=round.broadcast,
            margin=margin,
        )
        return self._located(ids, Aggregated(total, dict(found.reasons), frozenset(found.heard)))

    def _back(self, names: Collection[str], patience: float) -> bool:
        return set(names) <= set(self.wait(sorted(names), patience))

    def _located(self, asked: Mapping[str, Tensor], aggregated: Aggregated) -> Total:
        """A total with the positions of units that were asked and are not in it."""
        seen = {} if self._secure is not None else self._transport.reasons
        reasons = dict(sorted((seen | aggregated.reasons).items()))
        for name, why in reasons.items():
            log.warning("%s was left out: %s", name, why)
        received = [n for n in asked if n not in reasons]
        self._metrics = {"heard": received, "reasons": reasons, "late": sum(self._transport.late.values())}
        if self._transport.late:
            self._metrics["late_from"] = dict(sorted(self._transport.late.items()))
        left_out = tuple(i for n in asked if n in reasons for i in asked[n].tolist())
        suspects = tuple(i for n in aggregated.suspects for i in asked[n].tolist())
        self._metrics |= {"asked": len(asked), "units_left_out": len(left_out)}
        self._part = {n: len(asked[n]) for n in received}
        return replace(aggregated.total, left_out=left_out, suspects=suspects)

    def commit(self, entered: bool = True) -> None:
        """A round counts: the next request to the sites that are in it says so."""
        if not entered:
            return
        for name, site in self.sites.items():
            site.rounds += 1
            site.times += self._part.get(name, 0) / max(1, site.units)
            site.heard = self._round if name in self._part else site.heard
            self._count_missed(name, site)

    def _count_missed(self, name: str, site: SiteRecord) -> None:
        """Rounds that went by without a site's message; one that was waited for in vain is again in time."""
        if name in self._part:
            site.missed = 0
        elif name in self._asked and site.missed >= self._terms.unheard:
            log.warning(
                "%s has not been heard for %d rounds, nor now within %g s: give rounds a longer timeout, "
                "or the site less work",
                name,
                site.missed,
                self._terms.timeout,
            )
            site.missed = 0
        elif name in self._asked | self._passed_over:
            site.missed += 1

    def bytes_down(self, broadcast: Tensors, ids: Tensor) -> int:
        return len(self.names_of(ids.tolist())) * sum(
            t.numel() * t.element_size() for t in broadcast.values()
        )

    def metrics(self) -> dict[str, Any]:
        return self._metrics

    # --- questions ---------------------------------------------------------------------------

    def ask(self, asking: Asking[R]) -> tuple[R, Total]:
        question, known = asking.question, asking.known
        if not self._begun:
            self.wait()
        names = [n for n in self.names if asking.split is None or asking.split in self.sites[n].splits]
        names = list(asking.late) or names
        parts = dict[str, ActivePart]()
        if asking.among is not None:
            some = Active(asking.among, torch.ones(len(asking.among)), ratio=False)
            parts = active_parts(self.sites, some)
            names = [n for n in names if n in parts]
        asked = {f"known.{n}": t for n, t in known.items()} if asking.models else {}
        asked |= {} if asking.models else {f"asked.{n}": t for n, t in question.ask(known).items()}
        asked |= {f"broadcast.{n}": t for n, t in asking.broadcast.items()}
        description, more = describe_question(question, asked)
        asked |= more
        header = {
            "question": question.name,
            "description": description,
            "key": [asking.key.round, asking.key.purpose],
            "models": describe(asking.models),
        }
        patience = math.inf if self._study.fixed else self._terms.timeout
        if question.quorum == 1.0 and not asking.late:
            self.wait(self.names, patience)
        elif question.closes:
            names = [n for n in self.wait(asked=True) if n in names]
        elif not asking.late:
            here = self._transport.present()
            names = [n for n in names if n in here] or names
        requests = {}
        for name in names:
            its = header | ({"units": parts[name].units} if parts else {})
            requests[name] = Request("ask", self._header(name, **its), asked)
        if self._secure is not None:
            aggregated = self._secure_answers(asking, requests)
            names = [n for n in names if n in aggregated.read]
            return self._answered(asking, aggregated, names, parts, asked)
        enough = never if not question.closes else self._terms.closing(self.names, (), self._transport.now)
        replies = self._transport.send(requests, self._terms.timeout, enough)
        if question.closes and not replies:  # nothing comes of nobody: whoever answers first will do
            one = lambda there: bool(there)  # noqa: E731
            replies = self._transport.retry_lost(
                requests, replies, self._terms.timeout, lambda lost: bool(self.wait(asked=True)), True, one
            )
        if question.quorum == 1.0 and not asking.late:
            back = lambda lost: set(lost) <= set(self.wait(lost, patience))  # noqa: E731
            replies = self._transport.retry_lost(
                requests, replies, self._terms.timeout, back, silent=self._study.fixed
            )
        if question.varied:
            for name, reply in sorted(replies.items()):  # whose vectors are not everyone's
                log.info("%s, %s: %s", name, question.name, "; ".join(reply.payloads))
        everyone = self.units + sum(self.sites[n].units for n in asking.late)
        multiple = None if asking.method is None else asking.method.guard
        guard = question.guard(multiple) if multiple is not None and question.guarded else None
        aggregated = self._messages.aggregate(
            question.name,
            Channel(),
            torch.float64,
            requests,
            replies,
            of=everyone,
            varied=question.varied,
            sends=question.sends,
            guard=guard,
            examples={n: self.sites[n].examples for n in names},
            possible=None if guard is None else question.possible,
        )
        return self._answered(asking, aggregated, names, parts, asked, replies)

    def _answered(
        self,
        asking: Asking[R],
        aggregated: Aggregated,
        names: Sequence[str],
        parts: Mapping[str, ActivePart],
        asked: Tensors,
        replies: Mapping[str, Message] | None = None,
    ) -> tuple[R, Total]:
        """What is made of the answers of those who were asked."""
        question, known = asking.question, asking.known
        place = positions(self.sites) | {name: part.ids for name, part in parts.items()}
        total = self._located({name: place[name] for name in names}, aggregated)
        reasons = aggregated.reasons if self._secure else self._transport.reasons | aggregated.reasons
        of = sum(len(place[n]) for n in names)
        withheld = len(total.suspects) + total.numbers.get(WITHHELD_UNITS, 0.0)
        if not asking.late and total.count + withheld < question.quorum * of:
            whose = "; ".join(f"{n}: {why}" for n, why in sorted(reasons.items())[:5])
            raise EstimateError(
                f"{question.name}: {total.count} of {of} units could answer, not enough ({whose})"
            )
        for name in names:
            self.sites[name].answer(question.name, counted=name not in reasons, read=name in aggregated.read)
        if question.excludes:
            self._leave_out(aggregated.suspects)
        if question.lasting:
            total = self._lasting[question.name] = _together(self._lasting.get(question.name), total)
        numbers = {**total.numbers, "bytes_down": float(len(names) * _size(asked))}
        try:
            return question.finish(known, total), replace(total, numbers=numbers)
        except (DataError, SettingsError) as error:
            unlike = _unlike(replies) if replies and question.varied else ""
            raise type(error)(f"{error}{unlike}") from error

    def _secure_answers(self, asking: Asking[Any], requests: Mapping[str, Request]) -> Aggregated:
        """Answers of which nothing is seen but the sum. Where vectors differ between sites everyone says
        first what they are called."""
        assert self._secure is not None
        question, terms = asking.question, {"bits": self._secure.terms.form.bits, "messages": len(requests)}
        names: dict[str, tuple[str, int]] = {}
        if question.varied:
            plain = {n: replace(r, header={**r.header, "secure": terms}) for n, r in requests.items()}
            replies = self._transport.send(plain, self._terms.timeout, never)
            replies = self._transport.retry_lost(
                plain, replies, self._terms.timeout, lambda lost: self._back(lost, self._terms.timeout), True
            )
            for _, reply in sorted(replies.items()):
                names |= {str(n): (str(kind), int(size)) for n, kind, size in reply.header.get("names", ())}
            requests = {n: r for n, r in requests.items() if n in replies}
        also = [[n, *about] for n, about in sorted(names.items())]
        asked = {
            n: replace(r, header={**r.header, "secure": terms | {"names": also}}) for n, r in requests.items()
        }
        early = asking.models is None and self._round < 0
        required = question.quorum == 1.0 or early
        found = self._secure.everyone(asked, self._terms.timeout, self._back, required)
        assert found.message is not None
        total = total_of(found.message, {}, self.units, False, self.device)
        return Aggregated(total, {}, frozenset(found.heard))

    def _leave_out(self, names: Collection[str]) -> None:
        """These sites take no further part."""
        self._outside |= frozenset(names)
        for name in names:
            del self.sites[name]

    def newcomers(self) -> list[str]:
        """Who is here and has not answered what lasts of the questions before the rounds, until enough of
        those who are here have; one that could not is asked again when a round's time is over."""
        while True:
            here, now = self.wait(self._needed), self._transport.now()
            due = [n for n in here if not self._ready(n) and self._again.get(n, -math.inf) <= now]
            if self._secure is not None and 0 < len(due) < self._secure.terms.policy.minimum_sites:
                few = self._secure.terms.policy.minimum_sites
                if due != self._at_the_door:
                    log.info("%s wait(s) outside: secure sums take sites in by %d or more", _listed(due), few)
                self._at_the_door, due = due, []
            if due or sum(map(self._ready, here)) >= self._terms.sites:
                self._again |= dict.fromkeys(due, now + self._terms.timeout)
                return due
            self._transport.pause()

    def _ready(self, name: str) -> bool:
        """It may take part in rounds."""
        return self._lasting.keys() <= set(self.sites[name].answered)

    def finish(self, published: Tensors, rounds: int, how: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Give everyone who is there the theta that was learned; says who has it."""
        here = self._transport.present()
        last: dict[str, Any] = {"recall": self._recall, "rounds": rounds, "learned_from": self.units}
        last["how"] = [list(row) for row in how]
        requests = {n: Request("finish", self._header(n, **last), published) for n in here if n in self.sites}
        replies = self._transport.send(requests, self._terms.timeout, never)
        if self._study.fixed:
            back = lambda lost: set(lost) <= set(self.wait(lost))  # noqa: E731
            replies = self._transport.retry_lost(requests, replies, self._terms.timeout, back)
        return sorted(replies)

    # --- checkpoints -------------------------------------------------------------------------

    def state(self) -> Tensors:
        plain = {
            "sites": {n: asdict(s) for n, s in self.sites.items()},
            "forms": self._messages.forms,
            "best": self._best,
            "outside": sorted(self._outside),
            "late": self._transport.late,
            "lasting": {question: total.count for question, total in self._lasting.items()},
        }
        sums = {f"lasting.{q}.{n}": v for q, total in self._lasting.items() for n, v in total.plain.items()}
        return sums | {"elsewhere": torch.tensor(list(json.dumps(plain).encode()), dtype=torch.uint8)}

    def restore(self, state: Tensors) -> None:
        plain, known = json.loads(bytes(state["elsewhere"].tolist())), site_records_of(state)
        self._outside = frozenset(plain["outside"])
        self.sites = known | {n: s for n, s in self.sites.items() if n not in known}
        self._messages.forms, self._best, self._transport.late = plain["forms"], plain["best"], plain["late"]
        for question, count in plain["lasting"].items():
            begin = f"lasting.{question}."
            sums = {n.removeprefix(begin): v.to(self.device) for n, v in state.items() if n.startswith(begin)}
            self._lasting[question] = Total(sums, sums, {}, count, float(count), count, False)

    def remember(self) -> Tensors:
        self._best = self._round
        return {"round": torch.tensor(self._best)}

    def recall(self, remembered: Tensors) -> None:
        self._best, self._recall = int(remembered["round"]), True


def site_records_of(state: Tensors) -> dict[str, SiteRecord]:
    """The sites of a checkpoint."""
    return {n: SiteRecord(**s) for n, s in json.loads(bytes(state["elsewhere"].tolist()))["sites"].items()}


def _together(earlier: Total | None, new: Total) -> Total:
    """Answers of those who were asked first and of those who came later."""
    if earlier is None or not new.count:
        return new if earlier is None else earlier
    sums = {n: earlier.plain[n] + v if n in earlier.plain else v for n, v in new.plain.items()}
    count = earlier.count + new.count
    return replace(new, weighted=earlier.plain | sums, plain=earlier.plain | sums, count=count)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"


def _size(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _unlike(replies: Mapping[str, Message]) -> str:
    """Which sites answered with other vectors than most."""
    kinds = Counter(tuple(sorted(reply.payloads)) for reply in replies.values())
    usual = kinds.most_common(1)[0][0] if kinds else ()
    odd = [name for name, reply in sorted(replies.items()) if tuple(sorted(reply.payloads)) != usual]
    return f"; unlike the others: {', '.join(odd)}" if odd else ""
