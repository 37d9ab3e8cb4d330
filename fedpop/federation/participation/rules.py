"""Who takes part in a round, and the weight that makes the sum over those who do unbiased."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Annotated, Any

import torch
from torch import Tensor

from fedpop.checked import Checked, Count, OneOf, Range
from fedpop.errors import SettingsError
from fedpop.keys import Key, units_of
from fedpop.settings import describe, name_of

WEIGHTS = ("inverse", "ratio")
Chance = Annotated[
    float, Range(above=0, most=1, why="a client that never joins should be left out of the federation")
]
LARGEST_DRAWN_EACH = 50_000
"""Clients up to which each draws a number of its own."""


@dataclass(frozen=True)
class Roster:
    """All units that may take part, by the hashes of their names ``[b]``.

    >>> len(Roster.numbered(3))
    3
    """

    units: Tensor
    names: Sequence[str] = ()
    """What errors call them: by their own names, or by their sites' where only these are known."""
    sites: Tensor | None = None
    """The hashes of the names of the sites that they are at ``[b]``; None: each is its own."""
    growing: bool = False
    """Others may come later."""

    @classmethod
    def numbered(cls, count: int) -> Roster:
        """Units without names."""
        return cls(torch.arange(count))

    def __len__(self) -> int:
        return self.units.shape[0]

    @cached_property
    def order(self) -> Tensor:
        """Positions in the order of hashes, which does not depend on the order in which units were given."""
        return self.units.argsort()


@dataclass(frozen=True)
class Active:
    """The units of one round, by their positions in the roster, and the weight with which each one counts
    once its vectors have arrived.

    Under ``ratio`` weights are ones and the sum counts b / count times: unbiased given a round that is
    not empty, for equal probabilities only.
    """

    ids: Tensor
    weights: Tensor
    ratio: bool

    def weights_of(self, ids: Tensor) -> Tensor:
        """The weights of some of them, in the order given."""
        return self.weights if torch.equal(ids, self.ids) else self._weight[ids]

    @cached_property
    def _weight(self) -> Tensor:
        out = self.weights.new_zeros(int(self.ids.max()) + 1)
        return out.index_put((self.ids,), self.weights)


class Participation(Checked, ABC):
    """A rule that draws the active clients of a round."""

    @abstractmethod
    def draw(self, roster: Roster, key: Key) -> Active: ...

    def draw_among(self, roster: Roster, there: Tensor, key: Key) -> Active:
        """Those of a round who are there, ``[b]``: the others are drawn and missed."""
        drawn = self.draw(roster, key)
        present = there[drawn.ids]
        return Active(drawn.ids[present], drawn.weights[present], drawn.ratio)

    @property
    def everyone(self) -> bool:
        """All clients take part in every round."""
        return False

    def check(self, roster: Roster) -> None:
        """Raise when the rule cannot apply to these clients."""

    def expected(self, roster: Roster) -> float:
        """How many of these clients a round has on average."""
        return float(len(roster))

    def one_chance(self, roster: Roster) -> float | None:
        """The probability with which all join alike, each by itself; 1 where who takes part is no such
        chance, None where theirs differ."""
        return 1.0

    def describe(self) -> dict[str, Any]:
        """The rule as plain values, for files and for comparing runs."""
        names = [f.name for f in fields(self)] if is_dataclass(self) else list(vars(self))
        return {"kind": name_of(type(self))} | {name: describe(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Everyone(Participation):
    """All clients, every round.

    >>> Everyone().draw(Roster.numbered(3), Key(0)).ids
    tensor([0, 1, 2])
    """

    @property
    def everyone(self) -> bool:
        return True

    def draw(self, roster: Roster, key: Key) -> Active:
        return Active(torch.arange(len(roster)), torch.ones(len(roster)), ratio=True)


@dataclass(frozen=True)
class Bernoulli(Participation):
    """Each client joins by itself with probability p, one for all or one each, by name.

    Weights are b/|A| for one p (the paper's algorithm; an empty round makes no step) and 1/p_i for
    several (the paper's supplement; an empty round still makes the hyperprior's step).

    Args:
        p: The probability, in (0, 1]: one for all; a mapping from names, of clients or of sites that hold
            several, to one each; or a list of one for each client in the federation's order.
        weights: "ratio" for b/|A|, "inverse" for 1/p_i; None takes what fits p.

    >>> Bernoulli(0.2)
    Bernoulli(p=0.2, weights=None)
    >>> Bernoulli({"anna": 0.2, "ben": 1.0})
    Bernoulli(p={'anna': 0.2, 'ben': 1.0}, weights=None)
    """

    p: Chance | Sequence[Chance] | Mapping[str, Chance]
    weights: Annotated[str, OneOf(*WEIGHTS)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self._given):
            raise SettingsError("Bernoulli: p is empty; give one probability for each client, or one for all")
        if self._each and self.weights == "ratio" and len(self._given.unique()) > 1:
            raise SettingsError(
                "b/|A| weights are biased when clients join with different probabilities; use "
                "weights='inverse'"
            )

    @property
    def _each(self) -> bool:
        return not isinstance(self.p, float)

    @property
    def _ratio(self) -> bool:
        return self.weights == "ratio" or (self.weights is None and not self._each)

    @property
    def everyone(self) -> bool:
        return self.p == 1.0

    @cached_property
    def _given(self) -> Tensor:
        """All probabilities, in the order in which they were given."""
        values = list(self.p.values()) if isinstance(self.p, Mapping) else self.p
        return torch.as_tensor(values, dtype=torch.float64).reshape(-1)

    @cached_property
    def _by_name(self) -> tuple[Tensor, Tensor]:
        """Hashes of names in order, and their probabilities."""
        hashes, order = units_of(self.p if isinstance(self.p, Mapping) else ()).sort()
        return hashes, self._given[order]

    def _named(self, hashes: Tensor) -> Tensor:
        """The probabilities of these names, NaN where there is none."""
        known, p = self._by_name
        at = torch.searchsorted(known, hashes).clamp(max=len(known) - 1)
        return torch.where(known[at] == hashes, p[at], torch.nan)

    def probabilities(self, roster: Roster) -> Tensor:
        """Of each client, ``[b]``; by its own name, or by its site's."""
        if not isinstance(self.p, Mapping):
            return self._given.expand(len(roster))
        own = self._named(roster.units)
        return own if roster.sites is None else torch.where(own.isnan(), self._named(roster.sites), own)

    def check(self, roster: Roster) -> None:
        if isinstance(self.p, Mapping):
            self._check_names(self.p, roster)
        elif self._each and len(self._given) != len(roster):
            raise SettingsError(
                f"{len(self._given)} participation probabilities for {len(roster)} clients; give one each"
            )

    def _check_names(self, given: Mapping[str, float], roster: Roster) -> None:
        missing = self.probabilities(roster).isnan().nonzero().squeeze(1).tolist()
        if missing:
            who = repr(roster.names[missing[0]]) if roster.names else f"at position {missing[0]}"
            raise SettingsError(f"participation: no probability for client {who}; give one each, or one")
        there = {*roster.units.tolist(), *(() if roster.sites is None else roster.sites.tolist())}
        strange = [n for n, h in zip(given, units_of(given).tolist(), strict=True) if h not in there]
        if strange and not roster.growing:
            raise SettingsError(f"participation: there is no client {strange[0]!r}")

    def expected(self, roster: Roster) -> float:
        return float(self.probabilities(roster).sum())

    def one_chance(self, roster: Roster) -> float | None:
        each = self.probabilities(roster)
        return float(each[0]) if self._ratio and bool((each == each[0]).all()) else None

    def draw(self, roster: Roster, key: Key) -> Active:
        key, ratio = key.at(purpose="join"), self._ratio
        clients = len(roster)
        p, most = self.probabilities(roster), float(self._given.max())
        if sparse(clients, clients * most):
            # As if everyone were as likely as the likeliest; then thinned.
            ids = roster.order[skips(clients, most, key)].sort().values
            u = key.at(purpose="thin").uniform(roster.units[ids], (), torch.float64)
            ids = ids[u <= p[ids] / most]
        else:
            u = key.uniform(roster.units, (), torch.float64)
            ids = (u <= p).nonzero().squeeze(1)
        weights = torch.ones(len(ids)) if ratio else (1 / p[ids]).to(torch.float32)
        return Active(ids, weights, ratio)


@dataclass(frozen=True)
class Uniform(Participation):
    """So many clients in every round, drawn without replacement, all equally likely.

    Args:
        size: How many.

    >>> len(Uniform(2).draw(Roster.numbered(5), Key(0)).ids)
    2
    """

    size: Count

    def check(self, roster: Roster) -> None:
        if self.size > len(roster):
            raise SettingsError(f"{self.size} active clients asked for, but there are only {len(roster)}")

    def expected(self, roster: Roster) -> float:
        return float(self.size)

    def draw_among(self, roster: Roster, there: Tensor, key: Key) -> Active:
        ids = there.nonzero().squeeze(1)
        drawn = Uniform(min(self.size, len(ids))).draw(Roster(roster.units[ids]), key)
        return Active(ids[drawn.ids], drawn.weights, drawn.ratio)

    def draw(self, roster: Roster, key: Key) -> Active:
        key = key.at(purpose="join")
        if sparse(len(roster), self.size):
            ids = roster.order.index_select(0, distinct(len(roster), self.size, key)).sort().values
        else:
            u = key.uniform(roster.units, (), torch.float64)
            ids = torch.topk(u, self.size, largest=False).indices.sort().values
        return Active(ids, torch.ones(self.size), ratio=True)


# --- a few of very many: a number for every client would cost more than the round itself -----------


def sparse(clients: int, active: float) -> bool:
    """Few enough of so many clients take part that only those should be drawn for."""
    return clients > LARGEST_DRAWN_EACH and active <= clients / 8


def distinct(clients: int, size: int, key: Key) -> Tensor:
    """``size`` clients without replacement, sorted: the first that many different ones of a sequence drawn
    with replacement."""
    length = size
    while True:
        length += 16 + length * size // clients + 4 * int(math.sqrt(length))
        drawn = _wide(key, length) % clients
        values, group = torch.unique(drawn, return_inverse=True)
        if len(values) >= size:
            first = torch.full_like(values, length)
            first.scatter_reduce_(0, group, torch.arange(length), "amin")
            ids: Tensor = values[first <= first.kthvalue(size).values]
            return ids


def skips(clients: int, p: float, key: Key) -> Tensor:
    """Clients that each join with probability p, sorted: the gaps between them are geometric."""
    length, mean = 0, clients * p
    while True:
        length += 16 + int(mean) + 6 * int(math.sqrt(mean))
        u = ((_wide(key, length) >> 10).double() + 0.5) * 2.0**-53
        gaps = torch.floor(u.log() / math.log1p(-p)) + 1
        ids = gaps.cumsum(0) - 1
        if float(ids[-1]) >= clients:
            return ids[ids < clients].to(torch.int64)


def _wide(key: Key, count: int) -> Tensor:
    """63-bit numbers of the server's own."""
    words = key.bits(key.server(), 2 * count)[0]
    return (words[0::2] << 31) ^ words[1::2]


Said = Participation | int | float | Sequence[float] | Mapping[str, float] | None
"""What may be said of who takes part."""


def resolve(participation: Said) -> Participation:
    """None: everyone; a fraction (or one per client, by name or in order): the probability to join; a whole
    number: that many.

    >>> resolve(0.1), resolve(1.0), resolve(10)
    (Bernoulli(p=0.1, weights=None), Bernoulli(p=1.0, weights=None), Uniform(size=10))
    """
    if participation is None:
        return Everyone()
    if isinstance(participation, Participation):
        return participation
    if isinstance(participation, bool):
        raise SettingsError("participation is a number or a rule, not a truth value; None is everyone")
    if isinstance(participation, str):
        raise SettingsError(f"participation is a number, a rule or None, not {participation!r}")
    if not isinstance(participation, Real):
        return Bernoulli(participation)
    if isinstance(participation, Integral):
        if participation == 1:
            raise SettingsError(
                "participation=1 may mean everyone or a single client: write None or 1.0 for everyone, "
                "fedpop.participation.Uniform(1) for one client a round"
            )
        return Uniform(int(participation))
    chance = float(participation)
    if chance > 1:
        raise SettingsError(
            f"participation={participation}: a fraction is a probability, at most 1.0; for a number of "
            "clients a round write a whole number, without the point"
        )
    return Bernoulli(chance)
