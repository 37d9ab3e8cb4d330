"""What would leave a site: its own run on its own data, in this process, for its first rounds.

Nothing is sent. The questions and the round are those of a deployment (``run.run.Run``); what members would
send is written down as it passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fedpop.federation.clients import Federation
from fedpop.federation.participation import Active, Everyone
from fedpop.message import Total
from fedpop.methods.base import Algorithm, Round
from fedpop.questions import Question
from fedpop.run.members import Asking, LocalMembers
from fedpop.run.run import Run
from fedpop.run.settings import Settings
from fedpop.site.study import Study, Training

R = TypeVar("R")
REHEARSED_ROUNDS = 3
"""Some methods send more in their first round than in those that follow."""


@dataclass(frozen=True)
class Rehearsed:
    """One message of a site: what it answers, and the lengths of its vectors."""

    what: str
    vectors: dict[str, int]
    beside: tuple[str, ...] = ()
    """Names of the numbers beside the vectors."""
    shows_rows: int | None = None
    """The fewest rows of which products are sent, which reveal a few rows."""
    times: int = 1

    @classmethod
    def of(cls, what: str, total: Total, shows_rows: int | None = None) -> Rehearsed:
        vectors = {name: v.numel() for name, v in sorted(total.plain.items())}
        return cls(what, vectors, tuple(sorted(total.numbers)), shows_rows)


@dataclass
class Written:
    """Messages in their order; those that repeat one are counted."""

    before: list[Rehearsed] = field(default_factory=list)
    rounds: list[Rehearsed] = field(default_factory=list)

    def add(self, kind: list[Rehearsed], sending: Rehearsed) -> None:
        for i, earlier in enumerate(kind):
            if replace(earlier, times=1) == sending:
                kind[i] = replace(earlier, times=earlier.times + 1)
                return
        kind.append(sending)


class Watched(LocalMembers):
    """The units of one site, whose messages are written down."""

    def __init__(
        self, study: Study, data: Any, site: str, names: Sequence[str], written: Written, trial: bool = False
    ) -> None:
        super().__init__(study, data, sites={site: list(names)} if names else None)
        self.site, self.all_names, self.written, self.trial = site, names, written, trial

    def ask(self, asking: Asking[R]) -> tuple[R, Total]:
        found, total = super().ask(asking)
        question: Question[R] = asking.question
        self.written.add(self.written.before, Rehearsed.of(question.name, total, question.shows_rows))
        return found, total

    def round(self, method: Algorithm, round: Round, active: Active) -> Total:
        total = super().round(method, round, active)
        kind, what = (
            (self.written.before, "a trial round") if self.trial else (self.written.rounds, "a round")
        )
        self.written.add(kind, Rehearsed.of(what, total))
        return total

    def fresh(self, method: Algorithm) -> Watched:
        return Watched(self.study.by(method), self.data, self.site, self.all_names, self.written, trial=True)


def rehearsed(study: Training, federation: Federation, site: str) -> Written:
    """What a site with these examples sends, from the first question about the method to its first rounds."""
    written = Written()
    members = Watched(study, federation, site, list(federation.names), written)
    run = Run(study.method, members, Settings(REHEARSED_ROUNDS, 0, Everyone()))
    run.begin()
    for _ in range(REHEARSED_ROUNDS):
        run.train_round()
    return written
