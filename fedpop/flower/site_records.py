"""What the server knows of sites and their units, and which of them take part in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedpop.federation.participation import Active, Roster
from fedpop.keys import units_of
from fedpop.site.work import alike


@dataclass
class SiteRecord:
    """What the server knows of a site."""

    units: int = 0
    hashes: list[int] = field(default_factory=list)
    """Of its units' names, in its order, where a rule draws some of them."""
    examples: int = 0
    splits: list[str] = field(default_factory=list)
    heard: int = -1
    """Its last round that counted."""
    times: float = 0.0
    """Rounds in which its message was received, each as the share of its units that took part."""
    rounds: int = 0
    """Rounds since it is here."""
    missed: int = 0
    """Rounds since its last message in which it was asked, or busy with an earlier one."""
    noted: list[str] = field(default_factory=list)
    """Questions to which its answer counted."""
    answered: list[str] = field(default_factory=list)
    """Those to which it had one, be it that its numbers are not finite."""

    def greeted(self, about: Mapping[str, Any]) -> None:
        """What its first reply says."""
        self.units, self.examples = int(about["units"]), int(about["examples"])
        self.splits, self.hashes = list(about["splits"]), [int(h) for h in about.get("hashes", ())]

    def answer(self, question: str, counted: bool, read: bool) -> None:
        self.noted = sorted({*self.noted, question}) if counted else self.noted
        self.answered = sorted({*self.answered, question}) if read else self.answered


@dataclass(frozen=True)
class ActivePart:
    """What takes part of a site in a round."""

    ids: Tensor
    """Positions of its units that take part, in the roster."""
    units: list[int] | None
    """Their positions at the site; None: all of them."""
    weight: float


def roster_of_sites(sites: Mapping[str, SiteRecord]) -> Roster:
    """Units by the hashes of their names; without these, which nothing is drawn by, by site and place."""
    each = {name: sites[name] for name in sorted(sites)}
    hashes = [
        h
        for n, s in each.items()
        for h in s.hashes or units_of([f"{n}/{i}" for i in range(s.units)]).tolist()
    ]
    names = [name for name, s in each.items() for _ in range(s.units)]
    return Roster(torch.tensor(hashes, dtype=torch.int64), names, units_of(names), growing=True)


def positions(sites: Mapping[str, SiteRecord]) -> dict[str, Tensor]:
    """Positions of each site's units in the roster."""
    names = sorted(sites)
    every = torch.arange(sum(sites[n].units for n in names)).split([sites[n].units for n in names])
    return dict(zip(names, every, strict=True))


def active_parts(sites: Mapping[str, SiteRecord], active: Active) -> dict[str, ActivePart]:
    """Which units of each site take part in a round, and what its sum counts; a site without any does not."""
    place = positions(sites)
    sizes = torch.tensor([len(all_ids) for all_ids in place.values()])
    at = torch.repeat_interleave(torch.arange(len(place)), sizes)[active.ids]
    parts = {}
    for i, (name, all_ids) in enumerate(place.items()):
        here = at == i
        ids = active.ids[here]
        if len(ids):
            some = None if len(ids) == len(all_ids) else (ids - all_ids[0]).tolist()
            weight = alike(active.weights[here], "take part with different probabilities")
            parts[name] = ActivePart(ids, some, float(weight))
    return parts


def examples_in(site: SiteRecord, part: ActivePart) -> int:
    """About how many examples a site's part of a round has: only the site knows its units' sizes."""
    return max(1, round(site.examples * len(part.ids) / max(1, site.units)))
