"""A site's part in secure sums: whom it trusts, its session, and what is on its disk before bytes leave.

    trusted.json             in the site's folder: the list of sites that somebody confirmed here
    offered.json             the list that a server offered last, which nobody has confirmed yet
    secure/cohorts.jsonl     over whom questions were summed: no two sums may differ by a few sites
    experiments/NAME/secure  a session's secret, and what was sent and unmasked in it

The last of these are of the place where they were written: a copy that was put back begins a new session.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpop.errors import SecureSumError
from fedpop.files import (
    append,
    json_lines,
    read_bytes,
    read_sealed,
    writable_folder,
    write_bytes,
    write_sealed,
)
from fedpop.flower.certificates import read_site_key
from fedpop.flower.requests import Request, digest_for_all, headed
from fedpop.message import Message, Payload
from fedpop.message.summed import form_of, packed
from fedpop.privacy import secure
from fedpop.privacy.secure import Attempt, Memory, Mode, Policy, Session
from fedpop.privacy.site_noise import PrivateRound
from fedpop.site.refusal import Code, Refusal

log = logging.getLogger("fedpop.site")

TRUSTED, OFFERED = "trusted.json", "offered.json"
SESSION, MEMORY, COHORTS = "session", "memory", "cohorts.jsonl"
WRITTEN_SECONDS = 60.0
"""How far a file's time of change may be from the time that it says: a copy that is put back has a later one.
"""
QUESTION = "ask"
"""The kind of requests that are questions."""
MASKED, UNMASKED = "masked", "unmasked"
"""Names of what travels: words under masks, and what opens their sum."""
TODO = "its operator compares fingerprints and runs fedpop site trust"


@dataclass(frozen=True)
class SecureSite:
    """One experiment's secure sums at a site."""

    name: str
    folder: Path
    """The site's."""
    run: str
    place: Path
    """The experiment's folder."""
    policy: Policy

    # --- who is trusted ----------------------------------------------------------------------

    @property
    def admitted(self) -> dict[str, bytes]:
        """Sites and keys that somebody confirmed here."""
        found = trusted(self.folder)
        if found is None:
            raise Refusal(f"nobody has confirmed the list of sites here: {TODO}", Code.TRUST)
        return found

    def greeted(self, terms: Mapping[str, Any]) -> dict[str, Any]:
        """The session's key, where the list that the server goes by was confirmed here."""
        offered = {str(n): bytes.fromhex(key) for n, key in terms["admitted"].items()}
        if trusted(self.folder) != offered:
            write_sealed(self.folder / OFFERED, {"sites": {n: key.hex() for n, key in offered.items()}})
            changed = "has changed" if trusted(self.folder) else "was not confirmed"
            mark = secure.fingerprint(offered)
            raise Refusal(f"the list of sites ({mark}) {changed} here: {TODO}", Code.TRUST)
        if offered.get(self.name) != secure.public_key(identity_of(self.folder)):
            raise Refusal("the list of sites has another key for this site", Code.TRUST)
        return {"offer": self.session.offer.plain(), "attempt": self.memory.number}

    # --- what is on the disk -----------------------------------------------------------------

    @cached_property
    def _records(self) -> Path:
        place = writable_folder(self.place / "secure")
        place.chmod(0o700)
        return place

    @property
    def session(self) -> Session:
        """The present one; a new one where there is none, or where it was put back from a copy."""
        data, memory = self._read(SESSION), self._read(MEMORY)
        if data is not None and memory is not None:
            return Session.unpacked(data)
        if (self._records / SESSION).exists():
            log.warning("%s: records of secure sums are not as they were left here: a new session", self.run)
        session = Session.begin(self.run, self.name, identity_of(self.folder))
        # In this order: an old session beside an empty memory would mask something twice.
        self._write(SESSION, session.packed())
        self._write(MEMORY, Memory().packed())
        return session

    @property
    def memory(self) -> Memory:
        data = self._read(MEMORY)
        return Memory() if data is None else Memory.unpacked(data)

    def _write(self, name: str, data: bytes) -> None:
        """Whole and synced, its owner's to read; with where and when that was."""
        mark = json.dumps([os.stat(self._records).st_ino, time.time()]).encode()
        write_bytes(self._records / name, mark + b"\n" + data, 0o600)

    def _read(self, name: str) -> bytes | None:
        """What was written here; None where there is nothing, or a copy of it."""
        file = self._records / name
        if not file.exists():
            return None
        mark, _, data = read_bytes(file).partition(b"\n")
        with suppress(ValueError):
            inode, written = json.loads(mark)
            near = abs(file.stat().st_ctime - written) < WRITTEN_SECONDS
            return data if near and inode == os.stat(self._records).st_ino else None
        return None

    # --- an attempt --------------------------------------------------------------------------

    def attempt(self, request: Request, needs_everyone: bool) -> Attempt:
        """The attempt that a request is part of; raises where it is about something else than was sent, or in
        the mode of something else: one round under two names, say, would be two sums over other sites."""
        attempt = Attempt.of(request.header["secure"]["attempt"])
        if attempt.broadcast != digest_for_all(request):
            raise Refusal("what was sent is not what the attempt says", Code.DAMAGED)
        mode = Mode.EVERYONE if needs_everyone or request.kind == QUESTION else Mode.DROP_OUT
        if attempt.mode is not mode:
            raise SecureSumError(f"this is summed in mode {mode}, not {attempt.mode}")
        if (attempt.kind, attempt.index) != (kind_of(request), index_of(request, mode)):
            raise SecureSumError(
                f"the attempt is at {attempt.kind} {attempt.index}, and not at what was sent with it"
            )
        session = self.session
        if session.site in attempt.sites and session.offer not in attempt.offers:
            raise Refusal("this site's session is another one: greet it first", Code.STRANGER)
        return attempt

    def again(self, attempt: Attempt) -> bytes | None:
        """The reply to this attempt that was made before."""
        secure.admissible(attempt, self.session, self.policy, self.admitted)
        return secure.stored(attempt, self.memory)

    def reply(
        self,
        attempt: Attempt,
        message: Message,
        sends: Mapping[str, Any],
        norms: Sequence[str],
        also: Mapping[str, tuple[str, int]] | None = None,
        topic: str = "",
    ) -> bytes:
        """A message's words, masked; on the disk before it leaves. A sum about a ``topic`` is over sites of
        which none, or enough, were in another one about it."""
        secure.admissible(attempt, self.session, self.policy, self.admitted)
        form = form_of(message, sends, norms).with_vectors(also or {})
        if topic:
            self._note(topic, attempt)
        words = packed(message, form, len(attempt.offers))
        memory, reply = secure.send(
            attempt, words, form.layout, self.session, self.memory, self.policy, self.admitted,
            about=form.plain(),
        )  # fmt: skip
        self._write(MEMORY, memory.packed())
        return reply

    def require_shared(self, attempt: Attempt, private: PrivateRound | None) -> None:
        """Raise where a sum could be opened with less noise than was promised."""
        if private is not None and attempt.minimum - attempt.colluders < private.sharing:
            raise SecureSumError(
                f"noise is shared by {private.sharing} honest sites, and the sum could be opened with "
                f"{attempt.minimum - attempt.colluders}"
            )

    def _note(self, topic: str, attempt: Attempt) -> None:
        file = writable_folder(self.folder / "secure") / COHORTS
        past = [line["sites"] for line in json_lines(_whole(file), file) if line["topic"] == topic]
        secure.require_apart(attempt.sites, past, max(self.policy.minimum_sites, attempt.minimum))
        if list(attempt.sites) not in past:
            line = json.dumps({"topic": topic, "sites": list(attempt.sites)}) + "\n"
            with file.open("ab", buffering=0) as out:
                append(out, line.encode(), file)
                os.fsync(out.fileno())

    def unmask(self, request: Request) -> Message:
        """What opens a sum over those who were heard, as far as this site has it."""
        header = request.header
        attempt = Attempt.of(header["attempt"])
        shares = {n: bytes(t.tolist()) for n, t in request.tensors.items()}
        memory, answer = secure.unmask(attempt, header["heard"], shares, self.session, self.memory)
        self._write(MEMORY, memory.packed())
        lost = sorted(set(attempt.sites) - set(header["heard"]))
        log.info("%s: unmasked attempt %d%s", self.run, attempt.number,
                 f", without {', '.join(lost)}" if lost else "")  # fmt: skip
        about = {"site": self.name, "experiment": self.run}
        return sealed(about, UNMASKED, answer)


def sealed(about: Mapping[str, Any], name: str, data: bytes) -> Message:
    """A message that is nothing but these bytes."""
    return replace(headed(about), payloads={name: Payload(name, len(data), data)})


def kind_of(request: Request) -> str:
    """The kind of attempts at what is asked."""
    return f"{QUESTION}/{request.header['question']}" if request.kind == QUESTION else request.kind


def index_of(request: Request, mode: Mode) -> int:
    """Which attempts of a kind are at the same: a round's, or whatever everyone is told."""
    if mode is Mode.EVERYONE:
        return int.from_bytes(digest_for_all(request)[:6], "big")
    return int(request.header["round"])


def topic_of(formula: bool, request: Request) -> str:
    """What a sum of everyone is about. All that is asked for formulas, or from no model before the rounds, is
    made of the same rows, in whatever words it is put; anything else is about the theta that was sent."""
    if formula or (request.kind == QUESTION and request.header["models"] is None):
        return "rows"
    names = () if request.kind != QUESTION else ("question", "description", "models")
    about = {n: v for n, v in request.header.items() if n in names}
    return digest_for_all(Request(request.kind, about, request.tensors)).hex()[:32]


# --- whom a site trusts --------------------------------------------------------------------------


def trusted(folder: Path) -> dict[str, bytes] | None:
    """The list that was confirmed at a site; None: none."""
    return _listed(folder / TRUSTED)


def offered(folder: Path) -> dict[str, bytes] | None:
    """The list that a server offered last; None: none."""
    return _listed(folder / OFFERED)


def confirm(folder: Path, sites: Mapping[str, bytes]) -> None:
    """Somebody has compared this list's fingerprint."""
    write_sealed(folder / TRUSTED, {"sites": {n: key.hex() for n, key in sorted(sites.items())}})


def _listed(file: Path) -> dict[str, bytes] | None:
    if not file.exists():
        return None
    return {n: bytes.fromhex(key) for n, key in read_sealed(file, "a list of sites")["sites"].items()}


def identity_of(folder: Path) -> bytes:
    """The secret of the key that the site enrolled with."""
    if not (folder / "node.key").exists():
        raise Refusal("secure sums need the key of an enrolment with TLS: node.key is not there", Code.TRUST)
    return read_site_key(folder).private_numbers().private_value.to_bytes(48, "big")


def _whole(file: Path) -> bytes:
    data = read_bytes(file) if file.exists() else b""
    return data[: data.rfind(b"\n") + 1]
