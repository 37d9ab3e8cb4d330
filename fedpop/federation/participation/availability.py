"""Who took part, as it was recorded: a trace of availability, a row for each client and round.

A trace gives no probabilities, only how often each client was there. Weights of one over that share make the
rounds of one pass through the trace average to the sum over all clients, exactly, at a fixed theta. As an
estimate for whatever the trace was recorded from they are unbiased only in the limit of a long one, because
the shares are estimates themselves. b/|A| weights (the paper's) are there for clients that were all available
equally often, and refused otherwise: the data of rarer clients would count too little.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from fedpop.checked import Count, OneOf, require
from fedpop.errors import DataError, SettingsError
from fedpop.federation.participation.rules import WEIGHTS, Active, Participation, Roster
from fedpop.files import csv_text
from fedpop.keys import Key

AVAILABLE = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
LONGEST_AVAILABILITY = 10_000_000


@dataclass(frozen=True, eq=False)
class Availability(Participation):
    """Clients take part as a trace says; after its last round it starts again.

    Args:
        rounds: For each round of the trace the positions of the clients that are there, 0 onwards.
        clients: How many there are in the federation; each of them must be there in some round.
        weights: "inverse" (the default) counts a client with one over the share of rounds in which it is
            there; "ratio" (the paper's b/|A|) is for clients that are all there equally often.

    >>> trace = Availability([[0, 1], [1], [], [1]], clients=2)
    >>> trace
    Availability(4 rounds, 2 clients, weights='inverse')
    >>> trace.draw(Roster.numbered(2), Key(0, round=4))
    Active(ids=tensor([0, 1]), weights=tensor([4.0000, 1.3333]), ratio=False)
    """

    rounds: Sequence[Any]
    clients: Count
    weights: Annotated[str, OneOf(*WEIGHTS)] = "inverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds = tuple(_positions(r, k) for k, r in enumerate(self.rounds))
        object.__setattr__(self, "rounds", rounds)
        if not any(len(r) for r in rounds):
            raise DataError("the trace is empty: nobody is ever available")
        everyone = torch.cat(rounds)
        if int(everyone.min()) < 0 or int(everyone.max()) >= self.clients:
            raise DataError(f"a trace of {self.clients} clients names them by their positions, 0 onwards")
        never = (self.share == 0).nonzero().squeeze(1).tolist()
        if never:
            raise DataError(
                f"{len(never)} of {self.clients} clients are never available in the trace (at position "
                f"{', '.join(map(str, never[:5]))}{', ...' if len(never) > 5 else ''}), so their data could "
                "not count; leave them out of the federation"
            )
        if self.weights == "ratio" and bool((self.share != self.share[0]).any()):
            raise SettingsError(
                "b/|A| weights are biased when clients are not all available equally often; use "
                "weights='inverse'"
            )

    def __repr__(self) -> str:
        return f"Availability({len(self.rounds)} rounds, {self.clients} clients, weights={self.weights!r})"

    @cached_property
    def share(self) -> Tensor:
        """The share of the trace's rounds in which each client is there, ``[clients]``."""
        present = torch.cat([torch.as_tensor(r) for r in self.rounds])
        return torch.bincount(present, minlength=self.clients).double() / len(self.rounds)

    @classmethod
    def read(cls, path: str | Path, names: Iterable[Any], *, weights: str = "inverse") -> Availability:
        """From a CSV file with columns ``round``, ``client`` and perhaps ``available`` (1 or 0).

        ``names`` are the federation's, in its order (``federation.names``). The smallest round is
        the run's first; rounds that have no row have nobody.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("round,client\\n1,anna\\n1,ben\\n2,ben\\n")
        ...     file.flush()
        ...     Availability.read(file.name, ["anna", "ben"])
        Availability(2 rounds, 2 clients, weights='inverse')
        """
        require(str | Path, path=path)
        require(Iterable[Any], names=names)
        names = [str(name) for name in names]
        position = {name: i for i, name in enumerate(names)}
        there: dict[int, list[int]] = {}
        seen: set[tuple[int, int]] = set()
        for line, number, name, available in _rows(Path(path)):
            if name not in position:
                shown = ", ".join(map(repr, names[:3]))
                raise DataError(
                    f"{path}, line {line}: no client {name!r} in this federation of {len(names)} ({shown}, "
                    "...); remove its rows or add it to the federation"
                )
            if (number, position[name]) in seen:
                raise DataError(f"{path}, line {line}: client {name!r} is listed twice in round {number}")
            seen.add((number, position[name]))
            if available:
                there.setdefault(number, []).append(position[name])
        if not seen:
            raise DataError(f"{path} has no rows; a trace has one for each client and round")
        first, last = min(n for n, _ in seen), max(n for n, _ in seen)
        if last - first >= LONGEST_AVAILABILITY:
            raise DataError(f"{path}: rounds run from {first} to {last}; number them one after the other")
        return cls([there.get(n, []) for n in range(first, last + 1)], len(names), weights)

    def check(self, roster: Roster) -> None:
        if len(roster) != self.clients:
            raise SettingsError(f"the trace is of {self.clients} clients, the federation has {len(roster)}")

    def expected(self, roster: Roster) -> float:
        return float(self.share.sum())

    def draw(self, roster: Roster, key: Key) -> Active:
        ids = torch.as_tensor(self.rounds[key.round % len(self.rounds)])
        ratio = self.weights == "ratio"
        weights = torch.ones(len(ids)) if ratio else (1 / self.share[ids]).to(torch.float32)
        return Active(ids, weights, ratio)

    def describe(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for r in self.rounds:
            digest.update(f"{torch.as_tensor(r).tolist()}\n".encode())
        own = {"rounds": len(self.rounds), "clients": self.clients, "weights": self.weights}
        return {"kind": "Availability"} | own | {"digest": digest.hexdigest()[:32]}


def _positions(present: Any, k: int) -> Tensor:
    """Who is there in round k, in order."""
    try:
        given = torch.as_tensor(present) if len(present) else torch.zeros(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"round {k} of the trace is no list of clients' positions: {error}") from error
    if given.dim() != 1 or given.dtype == torch.bool or given.is_complex():
        raise DataError(f"round {k} of the trace is a list of clients' positions, not {present!r}")
    if given.is_floating_point() and not torch.equal(given, given.round()):
        bad = float(given[given != given.round()][0])
        raise DataError(f"round {k} of the trace: {bad:g} is no client's position, a whole number from 0")
    ids: Tensor = given.to(torch.int64).sort().values
    if len(twice := ids[1:][ids[1:] == ids[:-1]]):
        raise DataError(f"round {k} of the trace has the client at position {int(twice[0])} twice")
    return ids


def _rows(path: Path) -> Iterator[tuple[int, int, str, bool]]:
    """Line number, round, client and availability of each row."""
    with csv_text(path) as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        if not {"round", "client"} <= set(header):
            there = f"found {', '.join(header)}" if header else "the file is empty"
            raise DataError(f"{path}: a trace begins with a line 'round,client[,available]'; {there}")
        at = {name: header.index(name) for name in ("round", "client", "available") if name in header}
        for row in reader:
            if not row:
                continue
            line = reader.line_num
            if len(row) != len(header):
                raise DataError(f"{path}, line {line}: {len(row)} values where {len(header)} were expected")
            number, name = row[at["round"]].strip(), row[at["client"]].strip()
            if not re.fullmatch("-?[0-9]{1,18}", number):
                raise DataError(f"{path}, line {line}: round {number!r} is not a whole number")
            available = row[at["available"]].strip().lower() if "available" in at else "1"
            if available not in AVAILABLE:
                raise DataError(f"{path}, line {line}: available is 1 or 0, not {available!r}")
            yield line, int(number), name, AVAILABLE[available]
