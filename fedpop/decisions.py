"""What a run decided for its user where a setting left it open: what, which, and because of what.

Whatever decides something says so itself, in ``decisions()``: a method, its model, its prior, a run. Nothing
goes by what is said here: it is for people, and for files that people read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Decision:
    """One thing that was decided.

    Args:
        what: What was open, such as "kernel".
        chosen: What it is in this run.
        because: What decided it.
        unusual: Another one than most runs have, which is worth a word.

    >>> print(Decision("mass matrix", "diagonal", "z has 25 dimensions, more than 20"))
    mass matrix: diagonal (z has 25 dimensions, more than 20)
    """

    what: str
    chosen: str
    because: str
    unusual: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.chosen} ({self.because})"

    def plain(self) -> dict[str, Any]:
        """As plain values, for files."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Decision:
        """Back from plain values."""
        what, chosen, because = (str(plain[name]) for name in ("what", "chosen", "because"))
        return cls(what, chosen, because, bool(plain["unusual"]))


@runtime_checkable
class Decides(Protocol):
    """What may have decided something."""

    def decisions(self) -> Sequence[Decision]:
        """What was left open and is decided now, in the order in which a reader wants it."""
        ...


def decided(*parts: object) -> Iterator[Decision]:
    """What these parts of a run decided; those that decide nothing need not say so.

    >>> class Cautious:
    ...     def decisions(self):
    ...         return [Decision("pace", "slow", "it is dark")]
    >>> [d.chosen for d in decided(Cautious(), None, 3)]
    ['slow']
    """
    for part in parts:
        if isinstance(part, Decides):
            yield from part.decisions()


def in_a_line(decisions: Sequence[Decision]) -> str:
    """The unusual ones; empty where there is none.

    >>> in_a_line([Decision("guard", "off", "2 messages", unusual=True), Decision("start", "as given", "")])
    'guard: off (2 messages)'
    """
    return "; ".join(str(decision) for decision in decisions if decision.unusual)
