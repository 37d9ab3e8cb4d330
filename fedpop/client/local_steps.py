"""The paper's M: how many kernel steps a unit makes per round.

One number, a schedule over the rounds, or one number for each client by name. Units with different numbers
are worked on in groups: random numbers are keyed by unit and step, so nobody's draws depend on the
grouping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Count, Few
from fedpop.keys import unit_of
from fedpop.settings import Setting


@dataclass(frozen=True)
class Steps(Setting):
    """A number of kernel steps that grows or falls linearly over the first rounds.

    Args:
        start: Steps in round 0.
        end: Steps from round ``over`` on.
        over: How many rounds the change takes, 100 unless told.

    >>> [Steps(2, 10, over=4).at(k) for k in range(6)]
    [2, 4, 6, 8, 10, 10]
    """

    start: Few
    end: Few
    over: Count = 100

    def at(self, k: int) -> int:
        """M in round k."""
        return round(self.start + (self.end - self.start) * min(k / self.over, 1.0))


LocalSteps = Few | Steps | Mapping[str, Few]


def steps_of(setting: LocalSteps, units: Tensor, k: int) -> list[int]:
    """M in round k for each of these units."""
    if isinstance(setting, Mapping):
        own = {unit_of(name): number for name, number in setting.items()}
        return [own[u] for u in units.tolist()]
    return [_same(setting, k)] * len(units)


def _same(setting: int | Steps, k: int) -> int:
    """M in round k where it is the same for all."""
    return setting.at(k) if isinstance(setting, Steps) else setting


def groups_of(setting: LocalSteps, units: Tensor, k: int) -> list[tuple[int, Tensor | None]]:
    """Each M with the positions of the units that make so many steps; None for all of them."""
    if not isinstance(setting, Mapping):
        return [(_same(setting, k), None)]
    steps = torch.tensor(steps_of(setting, units, k), device=units.device)
    different = torch.unique(steps).tolist()
    if len(different) == 1:
        return [(different[0], None)]
    return [(m, (steps == m).nonzero().squeeze(1)) for m in different]


def most_steps(setting: LocalSteps) -> int:
    """The largest M that there can be, to plan memory for."""
    if isinstance(setting, Steps):
        return max(setting.start, setting.end)
    return max(setting.values(), default=1) if isinstance(setting, Mapping) else setting


def describe_steps(setting: LocalSteps) -> str:
    """In words, for a summary.

    >>> describe_steps(10), describe_steps(Steps(2, 8)), describe_steps({"anna": 5, "ben": 20})
    ('10 per round', '2 to 8 per round', '5 to 20 per round')
    """
    if isinstance(setting, int):
        return f"{setting} per round"
    if isinstance(setting, Steps):
        ends = (setting.start, setting.end)
    else:
        ends = (min(setting.values()), max(setting.values()))
    return f"{ends[0]} to {ends[1]} per round" if ends[0] != ends[1] else f"{ends[0]} per round"
