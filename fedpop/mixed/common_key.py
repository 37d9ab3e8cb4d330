"""Which group is at two sites: asked by a key that sites have in common and the server has not.

Sites count their groups in a table of bins, each group in the one that HMAC(key, name) addresses, and only
the sum over sites is needed. Where a bin has more than one, another HMAC addresses the groups that were in
such bins in a further table, and so on: different groups part, and one that is at two sites does not. A
server that has tables and no key learns how many groups are at two sites, and no name; the sites learn
which. Names alone would be no secret: whoever can guess one could look for its hash.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import DataError
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.asking import role
from fedpop.mixed.design import everyone
from fedpop.questions import Question, Units
from fedpop.run.members import Members

LEAST_BINS, MOST_BINS = 2**14, 2**20
"""Bins of a table: at least, and at most."""
BINS_PER_GROUP = 8
SURE_TABLES = 2
"""Tables in a row that part none of the groups that share a bin, after which their names are the same."""
CHECK_BINS = (2, 2**10)
"""Tables and their bins by which sites find that they have the same key."""
PURPOSE_OF_CHECK = b"which key"


@dataclass(frozen=True)
class CommonKey:
    """What a site knows and the server does not; nothing where a site has no key."""

    secret: bytes = field(default=b"", repr=False)
    tell: Callable[[list[int]], None] = field(default=lambda hashes: None, repr=False)
    """Called at the site with the hashes of groups that are at another site, too."""

    @property
    def known(self) -> bool:
        return bool(self.secret)

    def number(self, text: bytes) -> int:
        """Of 64 bits, for this text."""
        return int.from_bytes(hmac.digest(self.secret, text, "sha256")[:8], "little")

    def addresses(self, names: Tensor, table: int, bins: int) -> Tensor:
        """The bin of each name, which are hashes here, in one of the tables."""
        each = [self.number(f"{table}|{name}".encode()) % bins for name in names.tolist()]
        return torch.tensor(each, dtype=torch.int64)


NO_KEY = CommonKey()


@role.register
def _(value: CommonKey) -> str:
    return "common_key"


@dataclass(frozen=True)
class Bins:
    """A table summed over sites, and groups by which key their site has."""

    shared: Tensor
    """Which bins have more than one group, ``[bins]``."""
    keys: Tensor
    compared: int
    """Groups of sites that have a key."""


@dataclass(frozen=True)
class NameBins(Question[Bins]):
    """How many groups are in each bin, of those that shared theirs in all ``earlier`` tables."""

    common_key: CommonKey
    bins: int
    name: ClassVar[str] = "names of groups by keyed bins"

    def memory(self, asked: Tensors) -> tuple[float, float]:
        return 0.0, 0.0

    def ask(self, known: Tensors) -> Tensors:
        return {"earlier": known["earlier"]}

    def candidates(self, asked: Tensors, names: Tensor) -> Tensor:
        """Names that were in shared bins so far."""
        for table, shared in enumerate(asked["earlier"]):
            names = names[shared[self.common_key.addresses(names, table, self.bins)]]
        return names

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        bins, keys = torch.zeros(self.bins, dtype=torch.float64), torch.zeros(CHECK_BINS, dtype=torch.float64)
        own, names = self.common_key, units.cohort.units
        if own.known:
            places = own.addresses(self.candidates(asked, names), len(asked["earlier"]), self.bins)
            bins[places] = 1.0  # a site's own groups have different names
            for table in range(CHECK_BINS[0]):
                keys[table, own.number(PURPOSE_OF_CHECK + bytes([table])) % CHECK_BINS[1]] = len(names)
        return Answer(everyone(units.cohort), sums={"bins": bins, "keys": keys.flatten()})

    def finish(self, known: Tensors, total: Total) -> Bins:
        keys = total.plain["keys"].reshape(CHECK_BINS)
        return Bins(total.plain["bins"] > 1.5, keys, round(float(keys[0].sum())))


@dataclass(frozen=True)
class SharedNames(NameBins):
    """Has sites tell their operators which of their groups are at other sites, too."""

    name: ClassVar[str] = "names that two sites have"

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        if self.common_key.known and len(found := self.candidates(asked, units.cohort.units)):
            self.common_key.tell(found.tolist())
        return Answer(everyone(units.cohort))

    def finish(self, known: Tensors, total: Total) -> Bins:
        return Bins(known["earlier"][-1], torch.zeros(CHECK_BINS), 0)


def bins_for(groups: int) -> int:
    """Bins of a table for so many groups.

    >>> bins_for(18), bins_for(100_000)
    (16384, 1048576)
    """
    return min(max(LEAST_BINS, 1 << (BINS_PER_GROUP * groups - 1).bit_length()), MOST_BINS)


def compared_names(members: Members, group: str) -> int:
    """How many groups have names that were compared between sites; raises where one is at two of them."""
    bins, tables = bins_for(members.units), list[Tensor]()
    before, parted_none = -1, 0
    while True:
        earlier = torch.stack(tables) if tables else torch.zeros((0, bins), dtype=torch.bool)
        found = members.asks(NameBins(NO_KEY, bins), {"earlier": earlier})
        if bool(((found.keys > 0).sum(1) > 1).any()):
            raise DataError(
                "sites hold different common keys, so that their groups cannot be compared: fedpop site key "
                "SITE says which one a site has"
            )
        count = int(found.shared.sum())
        if not count:
            return found.compared
        tables.append(found.shared)
        parted_none = parted_none + 1 if count == before else 0
        before = count
        if parted_none == SURE_TABLES:
            break
    members.asks(SharedNames(NO_KEY, bins), {"earlier": torch.stack(tables)})
    raise DataError(
        f"{count} group(s) of {group!r} are at more than one site, and each group is to be at one; the logs "
        "of sites that have such groups say which. Give different groups different names, or move the rows "
        "together"
    )
