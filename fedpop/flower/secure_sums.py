"""The server's part in secure sums: attempts, who was heard, and what opens their sum.

It relays keys and shares, and learns sums. What it has to know after it was killed, the attempt of the
present round and the list by which that is opened, is on the disk before anybody is asked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpop.errors import EstimateError, PayloadError, SecureSumError, SettingsError
from fedpop.files import read_sealed, write_sealed
from fedpop.flower.requests import Request, digest_for_all, require_answer, versions
from fedpop.flower.secure_site import MASKED, UNMASKED, index_of, kind_of
from fedpop.flower.transport import Enough, Transport
from fedpop.message import Aggregate, Guard, Message, Tensors, Total
from fedpop.message.fixed_point import FixedPoint, learned
from fedpop.message.summed import SumForm, summed
from fedpop.privacy import secure
from fedpop.privacy.secure import Attempt, Masked, Mode, Offer, Policy

log = logging.getLogger("fedpop.server")

RECORD = "attempt.json"
"""In the run's folder: the attempt of its last round."""
UNMASK_SECONDS = 5.0
"""Seconds that answers which are not needed any more are waited for: who still works is not asked next."""
Back = Callable[[Collection[str], float], bool]
"""Whether these sites are there again, before so many seconds are over."""


@dataclass(frozen=True)
class SecureTerms:
    """That sums are secure, between whom, and how."""

    admitted: Mapping[str, bytes]
    """Public keys of all sites that may take part: the list that people confirm at each of them."""
    form: FixedPoint = field(default_factory=FixedPoint)
    policy: Policy = field(default_factory=Policy)
    """Sites have their own, of which the server can ask for more."""

    def __post_init__(self) -> None:
        least, there = self.policy.minimum_sites, len(self.admitted)
        if there < least:
            raise SettingsError(f"secure sums need {least} sites or more, and {there} are admitted")

    def threshold(self, sites: int) -> int:
        """Of so many sites, how many must be heard."""
        return max(secure.threshold(sites, self.policy.colluders(sites)), self.policy.minimum_sites)

    def check_quorum(self, quorum: float) -> None:
        """Raise where a round would close before its sum can be opened."""
        sites = len(self.admitted)
        least = self.threshold(sites)
        if quorum < least / sites:
            raise SettingsError(
                f"[sites] quorum = {quorum:g} closes a round before its secure sum can be opened: of {sites} "
                f"sites {least} must be heard, so quorum is {least / sites:.3g} or more"
            )

    def plain(self) -> dict[str, Any]:
        """What a site is told when it is greeted."""
        return {"admitted": {n: key.hex() for n, key in sorted(self.admitted.items())}}


@dataclass(frozen=True)
class Sum:
    """A sum that was opened, or why it was not, and who is not in it."""

    message: Message | None
    heard: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


class SecureSums:
    """Secure sums of one run."""

    def __init__(self, terms: SecureTerms, transport: Transport, run: str, folder: Path | None) -> None:
        self.terms, self._transport, self._run = terms, transport, run
        self._file = None if folder is None else folder / RECORD
        self._number = -1

    # --- what a killed server goes on with ---------------------------------------------------

    def begun(self, index: int) -> dict[str, Any] | None:
        """What was recorded of this round, where it was begun before."""
        if self._file is None or not self._file.exists():
            return None
        found = read_sealed(self._file, "an attempt at a secure sum")
        return found if found["index"] == index and found["run"] == self._run else None

    def _record(self, index: int, parts: Any, attempt: Attempt, heard: list[str] | None = None) -> None:
        if self._file is not None:
            about = {"run": self._run, "index": index, "parts": parts, "attempt": attempt.plain()}
            write_sealed(self._file, about | {"heard": heard})

    # --- attempts ----------------------------------------------------------------------------

    def _offers(self, names: Collection[str]) -> tuple[Offer, ...]:
        there = self._transport.sites
        return tuple(Offer.of(there[n].header["offer"]) for n in sorted(names) if n in there)

    def _same(self, name: str, attempt: Attempt) -> bool:
        """A site is in the session in which it was asked."""
        return self._offers([name]) != () and self._offers([name])[0] in attempt.offers

    def _attempt(self, mode: Mode, requests: Mapping[str, Request], sharing: int) -> Attempt:
        """A new attempt over those who are asked."""
        first = next(iter(requests.values()))
        numbers = [
            int(self._transport.sites[n].header["attempt"]) for n in requests if n in self._transport.sites
        ]
        self._number = max([self._number, *numbers]) + 1
        colluders = self.terms.policy.colluders(len(requests))
        minimum = max(self.terms.policy.minimum_sites, sharing + colluders)
        return Attempt(
            self._run, kind_of(first), index_of(first, mode), self._number, mode, digest_for_all(first),
            self._offers(requests), colluders, minimum,
        )  # fmt: skip

    def round(
        self,
        index: int,
        requests: Mapping[str, Request],
        parts: Any,
        sharing: int,
        timeout: float,
        enough: Enough,
        back: Back,
    ) -> Sum:
        """A round's sum in mode drop-out. ``parts`` is what its server is to know of it after a kill."""
        before, heard = self.begun(index), None
        attempt = None if before is None else Attempt.of(before["attempt"])
        if before is not None and attempt is not None and requests:
            if attempt.broadcast == digest_for_all(next(iter(requests.values()))):
                heard = before["heard"]
                self._number = max(self._number, attempt.number)
                requests = {n: r for n, r in requests.items() if n in (heard or attempt.sites)}
            else:
                attempt = None  # the run was put back: sites that answered then will refuse
        if attempt is None:
            requests = {n: r for n, r in requests.items() if n in self._transport.sites}
        if len(requests) < self.terms.policy.minimum_sites:
            return _unopened(requests, f"{len(requests)} site(s) are too few for a secure sum")
        if attempt is None:
            attempt = self._attempt(Mode.DROP_OUT, requests, sharing)
            self._record(index, parts, attempt)
        whole = len(heard) if heard else attempt.least
        found = self._heard(attempt, requests, timeout, enough, back, whole)
        replies, reasons = _alike(found[0], found[1])
        if len(replies) < whole:
            few = f"{len(replies)} of {len(attempt.offers)} sites were heard, and {whole} must be"
            return _unopened(requests, f"the round is given up: {few}", reasons)
        self._record(index, parts, attempt, sorted(replies))
        answers = self._unmasked(attempt, replies, timeout, back)
        try:
            words = secure.opened(attempt, replies, answers)
            message = _message(words, replies)
        except (SecureSumError, PayloadError) as error:
            return _unopened(requests, f"the round is given up: {error}", reasons)
        size = sum(len(b) for b in answers.values())
        return Sum(replace(message, bytes=message.bytes + size), tuple(sorted(replies)), reasons)

    def _heard(
        self,
        attempt: Attempt,
        requests: Mapping[str, Request],
        timeout: float,
        enough: Enough,
        back: Back,
        least: int,
    ) -> tuple[dict[str, Masked], dict[str, str]]:
        """Replies that can be read, and why others are not there; waited for until enough can be opened."""
        end, asked = self._transport.now() + timeout, _with(requests, attempt)

        def closed(replies: Mapping[str, Message]) -> bool:
            return sum(r.refused is None for r in replies.values()) >= least and enough(replies)

        replies = self._transport.send(asked, timeout, closed)
        reasons = dict(self._transport.reasons)
        while len(replies) < least:
            away = sorted((self._transport.lost | self._transport.silent) & asked.keys() - replies.keys())
            left = end - self._transport.now()
            if not away or left <= 0 or not back(away, left):
                break
            if not (more := {n: asked[n] for n in away if self._same(n, attempt)}):
                break
            replies |= self._transport.send(more, max(end - self._transport.now(), 1.0), closed)
            reasons = {n: why for n, why in reasons.items() if n not in away} | self._transport.reasons
        return _read(attempt, replies, asked, reasons), reasons

    def _unmasked(
        self, attempt: Attempt, replies: Mapping[str, Masked], timeout: float, back: Back
    ) -> dict[str, bytes]:
        """What the heard answer to the list of them."""
        heard, end = sorted(replies), self._transport.now() + timeout
        least = len(heard) if len(heard) < len(attempt.offers) else attempt.threshold
        requests = {}
        for name in heard:
            shares = {
                n: torch.from_numpy(np.frombuffer(b, dtype=np.uint8).copy())
                for n, b in secure.shares_for(name, replies).items()
            }
            header = versions() | {"experiment": self._run, "attempt": attempt.plain(), "heard": heard}
            requests[name] = Request("unmask", header, shares)
        found, missing = dict[str, Message](), set(heard)

        reached: list[float] = []

        def enough(more: Mapping[str, Message]) -> bool:
            if len(found.keys() | {n for n, r in more.items() if r.refused is None}) < least:
                return False
            reached.append(self._transport.now())
            return reached[-1] - reached[0] >= UNMASK_SECONDS

        while len(found) < least and missing:
            left = max(end - self._transport.now(), 1.0)
            found |= self._transport.send({n: requests[n] for n in sorted(missing)}, left, enough)
            missing = (self._transport.lost | self._transport.silent) & missing - found.keys()
            left = end - self._transport.now()
            if len(found) < least and missing and (left <= 0 or not back(missing, left)):
                break
            missing = {n for n in missing if self._same(n, attempt)}
        for name, why in sorted(self._transport.reasons.items()) if len(found) < least else ():
            log.warning("%s did not unmask: %s", name, why)
        return {n: m.payloads[UNMASKED].data for n, m in found.items() if UNMASKED in m.payloads}

    def everyone(
        self,
        requests: Mapping[str, Request],
        timeout: float,
        back: Back,
        required: bool,
        sharing: int = 0,
    ) -> Sum:
        """A sum in mode everyone: repeated until all have answered; where they are not all ``required``,
        those who do not in time, or refuse, are left out of a further attempt, which the sites refuse unless
        they are enough."""
        asked, reasons = dict(requests), dict[str, str]()
        while True:
            if len(asked) < self.terms.policy.minimum_sites:
                why = f"{len(asked)} site(s) are too few for a secure sum"
                raise EstimateError(f"{why}{_because(reasons)}")
            away = [n for n in asked if n not in self._transport.sites]
            if away and not back(away, timeout):
                if required:
                    continue
                reasons |= dict.fromkeys(away, "it is not there")
                asked = {n: r for n, r in asked.items() if n not in away}
                continue
            attempt = self._attempt(Mode.EVERYONE, asked, sharing)
            replies, out, again = self._everyones(attempt, asked, timeout, back, required)
            if again:
                continue
            if out:
                reasons |= out
                if required:
                    raise EstimateError(f"a secure sum needs everyone{_because(reasons)}")
                asked = {n: r for n, r in asked.items() if n not in out}
                continue
            sound, reasons = _alike(replies, reasons)
            if len(sound) < len(asked):
                raise EstimateError(f"sites do not agree on what they send{_because(reasons)}")
            return Sum(_message(secure.opened(attempt, sound), sound), tuple(sorted(sound)), reasons)

    def _everyones(
        self, attempt: Attempt, asked: Mapping[str, Request], timeout: float, back: Back, required: bool
    ) -> tuple[dict[str, Masked], dict[str, str], bool]:
        """Replies to an attempt, why others are out of the question, and whether a new attempt is needed:
        somebody has begun another session. Who is not ``required`` is asked twice at most."""
        requests, found, again = _with(asked, attempt), dict[str, Masked](), False
        while missing := sorted(asked.keys() - found.keys()):
            wanted = {n: requests[n] for n in missing}
            replies = self._transport.send(wanted, timeout, lambda replies: False)
            reasons = dict(self._transport.reasons)
            away = (self._transport.lost | self._transport.silent) & wanted.keys()
            found |= _read(attempt, replies, wanted, reasons)
            out = {n: why for n, why in reasons.items() if n not in away}
            if out:
                return found, out, False
            if not away:
                continue
            if again and not required:
                return found, {n: reasons[n] for n in away}, False
            again = True
            log.info("%s must answer, and went away or was silent for long", ", ".join(sorted(away)))
            while not back(sorted(away), timeout):
                if not required:
                    return found, {n: reasons[n] for n in away}, False
            if self._offers(asked) != attempt.offers:
                return found, {}, True
        return found, {}, False


# --- replies -------------------------------------------------------------------------------------


def _with(requests: Mapping[str, Request], attempt: Attempt) -> dict[str, Request]:
    plain = attempt.plain()
    return {
        n: replace(r, header={**r.header, "secure": {**r.header["secure"], "attempt": plain}})
        for n, r in requests.items()
    }


def _read(
    attempt: Attempt,
    replies: Mapping[str, Message],
    requests: Mapping[str, Request],
    reasons: dict[str, str],
) -> dict[str, Masked]:
    """Those that can be read; why the others cannot is added to ``reasons``."""
    found = {}
    for name, message in sorted(replies.items()):
        try:
            payload = require_answer(message, requests[name], name).payloads.get(MASKED)
            if payload is None:
                raise PayloadError("it sent no masked words")
            found[name] = secure.read(payload.data, attempt, name)
            if found[name].layout != SumForm.of(found[name].about).layout:
                raise PayloadError("its words are not of the form that it says")
        except (PayloadError, SecureSumError) as error:
            found.pop(name, None)
            reasons[name] = str(error)
    return found


def _alike(
    replies: Mapping[str, Masked], reasons: Mapping[str, str]
) -> tuple[dict[str, Masked], dict[str, str]]:
    """Replies of the form that most have, and why the others are none."""
    forms = {n: str(m.about) for n, m in replies.items()}
    usual = Counter(forms.values()).most_common(1)
    odd = [n for n, form in forms.items() if form != usual[0][0]]
    kept = {n: m for n, m in replies.items() if n not in odd}
    return kept, {**reasons, **dict.fromkeys(odd, "it sent words of another form than most")}


def _message(words: bytes, replies: Mapping[str, Masked]) -> Message:
    form = SumForm.of(next(iter(replies.values())).about)
    found = summed(words, form, len(replies))
    return replace(
        found, bytes=sum(len(m.words) + sum(map(len, m.shares.values())) for m in replies.values())
    )


def _unopened(requests: Mapping[str, Request], why: str, reasons: Mapping[str, str] | None = None) -> Sum:
    log.warning("%s%s", why, _because(reasons or {}))
    return Sum(None, (), {**dict.fromkeys(requests, why), **(reasons or {})})


def _because(reasons: Mapping[str, str]) -> str:
    words = "; ".join(f"{n}: {why}" for n, why in sorted(reasons.items())[:5])
    return f" ({words})" if words else ""


# --- totals --------------------------------------------------------------------------------------


def total_of(
    message: Message,
    weights: Mapping[str, float],
    of: int,
    ratio: bool,
    device: torch.device,
    *,
    guard: Guard | None = None,
    broadcast: Tensors | None = None,
    margin: int = 0,
) -> Total:
    """The total that a sum stands for, as the simulator forms it of quantised messages."""
    words = {n: replace(w, digits=w.digits.to(device)) for n, w in message.words.items()}
    here = replace(message.to(device), words=words)
    aggregate = Aggregate()
    ones = all(w == 1.0 for w in weights.values())
    aggregate.add(here, torch.tensor([1.0 if ones else 0.0], device=device))
    usual = Tensors() if guard is None else guard.learned(aggregate.numbers)
    total = aggregate.total(of, ratio, usual=usual)
    if guard is not None and broadcast is not None:
        scales = learned(guard.names, total.numbers, broadcast, margin)
        total = replace(total, usual=usual | scales)
    return total
