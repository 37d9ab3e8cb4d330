"""Answers, recorded: a question that was asked before is answered from the record.

What is asked depends on what is known alone. So a search that begins again after its process was killed asks
what it had asked, finds the answers in the journal, and goes on where it stood; nobody is asked twice, and
nothing is sent twice. Where there are no members any more, the record answers alone: of a fit that was saved.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Active, Participation, Roster
from fedpop.files import digest_of_bytes, read_tensors, reading, tensor_bytes, writable_folder, write_tensors
from fedpop.keys import Key
from fedpop.message import Tensors, Total
from fedpop.methods.asking import describe_question
from fedpop.methods.base import Algorithm, Round
from fedpop.run.members import Asking, Members
from fedpop.site.store import LocalStore
from fedpop.site.study import Study

R = TypeVar("R")
ABOUT = "about"
"""The name under which an answer's file has what is not a tensor."""


@dataclass(frozen=True)
class RecordedAnswer:
    """A question's total, and how many units there were."""

    question: str
    total: Total
    units: int

    def tensors(self, digest: str) -> Tensors:
        """As tensors, for a file."""
        total = self.total
        about = {
            "digest": digest,
            "question": self.question,
            "units": self.units,
            "count": total.count,
            "weight": total.weight,
            "of": total.of,
            "ratio": total.ratio,
            "numbers": dict(total.numbers),
            "bytes_up": total.bytes_up,
        }
        text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
        sums = {f"plain.{n}": v for n, v in total.plain.items()}
        sums |= {f"weighted.{n}": v for n, v in total.weighted.items() if v is not total.plain.get(n)}
        return {ABOUT: text} | {n: v.detach().cpu() for n, v in sums.items()}

    @classmethod
    def read(cls, tensors: Tensors) -> tuple[str, RecordedAnswer]:
        """Back from tensors, with the digest of what was asked."""
        about: dict[str, Any] = json.loads(bytes(tensors[ABOUT].tolist()))
        plain = {n.removeprefix("plain."): v for n, v in tensors.items() if n.startswith("plain.")}
        other = {n.removeprefix("weighted."): v for n, v in tensors.items() if n.startswith("weighted.")}
        numbers = {str(n): float(v) for n, v in about["numbers"].items()}
        of, count, weight = int(about["of"]), int(about["count"]), float(about["weight"])
        sums = (plain | other, plain, Tensors())
        total = Total(*sums, count, weight, of, bool(about["ratio"]), numbers, int(about["bytes_up"]))
        return str(about["digest"]), cls(str(about["question"]), total, int(about["units"]))


@dataclass
class Journal:
    """Totals by the digest of what was asked; in a folder, one file each, or in memory."""

    folder: Path | None = None
    entries: dict[str, RecordedAnswer] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """The journal of a folder, with what it holds."""
        found: dict[str, RecordedAnswer] = {}
        for file in sorted(writable_folder(folder).glob("*.safetensors")):
            tensors = read_tensors(file)
            with reading(file, "an answer"):
                digest, entry = RecordedAnswer.read(tensors)
            found[digest] = entry
        return cls(folder, found)

    def add(self, digest: str, entry: RecordedAnswer) -> None:
        """Record an answer; it is on disk before anything is made of it."""
        if self.folder is not None:
            file = self.folder / f"{len(self.entries) + 1:05d}-{digest[:16]}.safetensors"
            write_tensors(file, entry.tensors(digest))
        self.entries[digest] = entry


class JournaledMembers(Members):
    """Members whose answers are recorded, or the record in the place of members who are not there.

    They receive a study only when something has to be asked that the journal does not have.
    """

    def __init__(
        self, study: Study, journal: Journal, members: Members | None = None, units: int | None = None
    ) -> None:
        self.study, self.journal, self._members = study, journal, members
        self._pending = False
        """The members have not received the present study."""
        self._units = units
        """How many units the last answer was made of."""
        self.asked = 0
        """Questions that were answered by members, not by the record."""

    @property
    def members(self) -> Members:
        """Those who answer, with the present study."""
        if self._members is None:
            raise SettingsError(
                "this needs groups' rows, or their posteriors, which are at their sites: ask for it there"
            )
        if self._pending:
            self._members.update_study(self.study)
            self._pending = False
        return self._members

    def update_study(self, study: Study) -> None:
        self.study, self._pending = study, True

    def ask(self, asking: Asking[R]) -> tuple[R, Total]:
        digest = self._digest(asking)
        entry = self.journal.entries.get(digest)
        if entry is None:
            members = self.members
            found, total = members.ask(asking)
            members.commit(entered=False)
            self.recorded(total)
            self.journal.add(digest, RecordedAnswer(asking.question.name, total, members.units))
            self.asked, self._units = self.asked + 1, members.units
            return found, total
        self._units = entry.units
        return asking.question.finish(asking.known, entry.total), entry.total

    def recorded(self, total: Total) -> None:
        """Called before an answer is recorded."""

    def _digest(self, asking: Asking[Any]) -> str:
        """Of all that an answer depends on."""
        plain, tensors = self.study.description()
        described, more = describe_question(asking.question, {})
        among = None if asking.among is None else asking.among.tolist()
        known = {f"known.{n}": t for n, t in asking.known.items()}
        known |= {f"study.{n}": t for n, t in tensors.items()} | {f"more.{n}": t for n, t in more.items()}
        address = [asking.key.round, asking.key.purpose, asking.split, list(asking.late)]
        text = json.dumps([plain, described, among, address], sort_keys=True, default=list)
        return digest_of_bytes(text.encode() + b"\0" + tensor_bytes(dict(sorted(known.items()))))

    def commit(self, entered: bool = True) -> None:
        """Done where the members answered."""

    # --- the rest is theirs ----------------------------------------------------------------------

    @property
    def units(self) -> int:
        return self.members.units if self._units is None else self._units

    @property
    def device(self) -> torch.device:
        return self.study.device

    @property
    def names(self) -> Sequence[str]:
        return self.members.names

    @property
    def waits(self) -> bool:
        return self._members is None or self._members.waits

    @property
    def quorum(self) -> float:
        return 1.0 if self._members is None else self._members.quorum

    @property
    def roster(self) -> Roster:
        return self.members.roster

    def names_of(self, ids: Iterable[int]) -> list[str]:
        return self.members.names_of(ids)

    @property
    def examples(self) -> int:
        return self.members.examples

    @property
    def federation(self) -> Federation | None:
        there = None if self._members is None else self._members.federation
        return None if there is None else self.members.federation

    @property
    def splits(self) -> Collection[str]:
        return self.members.splits

    @property
    def store(self) -> LocalStore | None:
        return None if self.federation is None else self.members.store

    def describe(self) -> dict[str, Any]:
        return self.members.describe()

    def fresh(self, method: Algorithm) -> Members:
        return self.members.fresh(method)

    def update_method(self, method: Algorithm) -> None:
        self.members.update_method(method)

    def active(self, rule: Participation, key: Key, round: int) -> Active:
        return self.members.active(rule, key, round)

    def round(self, method: Algorithm, round: Round, active: Active) -> Total:
        return self.members.round(method, round, active)

    def bytes_down(self, broadcast: Tensors, ids: Tensor) -> int:
        return self.members.bytes_down(broadcast, ids)

    def state(self) -> Tensors:
        return self.members.state()

    def restore(self, state: Tensors) -> None:
        self.members.restore(state)

    def remember(self) -> Tensors:
        return self.members.remember()

    def recall(self, remembered: Tensors) -> None:
        self.members.recall(remembered)
