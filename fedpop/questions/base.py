"""A question: what is sent, what a unit answers, what is made of the sum.

Everything that is asked of all units beside the training rounds has this shape, before them (moments,
scales, curvatures), between them (validation scores) and after them (marginal likelihood, information,
diagnostics). ``fedpop.run.members`` carries a question from the server to the units and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from fedpop.errors import DataError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Guard, Tensors, Total
from fedpop.message.declared import Sent
from fedpop.message.guard import MESSAGES_FOR_A_MEDIAN

R = TypeVar("R", covariant=True)
Table = Mapping[str, Any]
"""Columns by their names, as they were read: nothing is coded yet."""


def _no_tables() -> Sequence[Table]:
    raise DataError("this question is about columns of tables, and the data are none")


@dataclass(frozen=True)
class Units:
    """Those who are asked, as they are at their site: data, states, and personal models."""

    cohort: Cohort
    local: Tensors
    personal: Callable[[], Tensors]
    """Their models with theta fixed, made once."""
    split: Callable[[str], Cohort]
    """Their examples of another split, such as ``validation``."""
    guard: Guard | None = None
    """What judges units that are added up at once, where somebody does."""
    tables: Callable[[], Sequence[Table]] = _no_tables
    """Each one's columns, where it is not agreed yet what examples look like."""


class Question(ABC, Generic[R]):
    """Asked once of everyone, or of as many as will do.

    Across machines a site makes the same question from its class, which is known by its name once it is
    defined, and from its fields (``fedpop.methods.asking``).
    """

    name: ClassVar[str]
    quorum: ClassVar[float] = 1.0
    """The share of units that must answer; below it there is no result."""
    closes: ClassVar[bool] = False
    """Across machines it is over as a round is, when a quorum of sites has answered; else when all have, or
    time is up."""
    lasting: ClassVar[bool] = False
    """Of a question before the rounds: whoever comes later is asked it too, because of what it leaves with
    units or because its sum stays in use. It asks the same at any time."""
    starts_noise: ClassVar[bool] = False
    """Of a question before the rounds: its result says where a learned variance of noise starts."""
    varied: ClassVar[bool] = False
    """Not everyone has the same vectors to send: a level of a column, say, that only some have."""
    sends: ClassVar[Mapping[str, Sent]] = {}
    """Vectors and numbers that are not among those of ``fedpop.message.declared``, by name."""

    guarded: ClassVar[tuple[str, ...]] = ()
    """Vectors whose norms are judged as those of messages are: an answer out of all proportion to the others'
    is left out, and named."""
    excludes: ClassVar[bool] = False
    """Whoever is left out for that takes no further part."""

    def guard(self, multiple: float, of: str = "") -> Guard:
        """What judges its answers."""
        return Guard(multiple, self.guarded, {}, MESSAGES_FOR_A_MEDIAN, of=of)

    def possible(self, vectors: Tensors) -> Tensor | None:
        """Which rows ``[S]`` of what was sent can be an honest answer; None: no row says more than that it is
        finite."""
        return None

    @property
    def shows_rows(self) -> int | None:
        """The fewest rows of which it sends products, which reveal a few rows; None for
        answers that are no such products."""
        return None

    def suppressing(self, minimum: int, exempt: Collection[str]) -> Question[R]:
        """The same without cells of fewer rows than these, but of columns that are ``exempt``."""
        return self

    def memory(self, asked: Tensors) -> tuple[float, float] | None:
        """Bytes that a row and a unit take while it is answered; None: as many as in a round."""
        return None

    def ask(self, known: Tensors) -> Tensors:
        """What is sent, given what is known: theta, or the results of earlier questions."""
        return {}

    @abstractmethod
    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        """What units answer; ``Answer.local`` has the states that they store."""

    @abstractmethod
    def finish(self, known: Tensors, total: Total) -> R:
        """What is made of the sum. Of a question before the rounds: tensors that are known from then on."""
