"""The paper's M: how many kernel steps a client makes per round.

One number, a schedule over the rounds, or one number for each client. Clients with different numbers are
worked on in groups, and their messages added: random numbers are keyed by client and step, so nobody's draws
depend on the grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.algorithms.base import Info, Message, Tensors, require_whole
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort


@dataclass(frozen=True)
class Steps:
    """From ``start`` steps in round 0 to ``end`` in round ``over`` and from then on, growing or falling.

    >>> [Steps(2, 10, over=4).at(k) for k in range(6)]
    [2, 4, 6, 8, 10, 10]
    """

    start: int
    end: int
    over: int = 100

    def __post_init__(self) -> None:
        require_whole(start=self.start, end=self.end, over=self.over)
        _at_least_one(self.start)
        _at_least_one(self.end)
        if self.over < 1:
            raise SettingsError(f"the number of steps changes over at least one round, not {self.over}")

    def at(self, k: int) -> int:
        """M in round k."""
        return round(self.start + (self.end - self.start) * min(k / self.over, 1.0))


LocalSteps = int | Steps | tuple[int, ...]
Work = tuple[Tensors, Message, Info]


def resolve_steps(setting: Any) -> LocalSteps:
    """The setting, checked; a list of whole numbers becomes a tuple with one for each client."""
    if isinstance(setting, Steps):
        return setting
    if isinstance(setting, Sequence) and not isinstance(setting, str):
        for number in setting:
            require_whole(local_steps=number)
            _at_least_one(number)
        return tuple(setting)
    require_whole(local_steps=setting)
    _at_least_one(setting)
    return int(setting)


def _at_least_one(number: int) -> None:
    if number < 1:
        raise SettingsError(f"local_steps (the paper's M) must be at least 1, not {number}")


def check_steps(setting: LocalSteps, clients: int) -> None:
    """Raise unless there is a number for every client."""
    if isinstance(setting, tuple) and len(setting) != clients:
        raise SettingsError(
            f"local_steps has {len(setting)} number(s) for {clients} client(s); give one each, or one for all"
        )


def steps_of(setting: LocalSteps, ids: Tensor, k: int) -> list[int]:
    """M in round k for each of these clients."""
    if isinstance(setting, tuple):
        return [setting[i] for i in ids.tolist()]
    return [setting.at(k) if isinstance(setting, Steps) else setting] * len(ids)


def most_steps(setting: LocalSteps) -> int:
    """The largest M that there can be, to plan memory for."""
    if isinstance(setting, Steps):
        return max(setting.start, setting.end)
    return max(setting, default=1) if isinstance(setting, tuple) else setting


def describe_steps(setting: LocalSteps) -> str:
    """In words, for a summary.

    >>> describe_steps(10), describe_steps(Steps(2, 8)), describe_steps((5, 5, 20))
    ('10 per round', '2 to 8 per round', '5 to 20 per round')
    """
    if isinstance(setting, int):
        return f"{setting} per round"
    ends = (setting.start, setting.end) if isinstance(setting, Steps) else (min(setting), max(setting))
    return f"{ends[0]} to {ends[1]} per round" if ends[0] != ends[1] else f"{ends[0]} per round"


def in_groups(
    setting: LocalSteps, cohort: Cohort, local: Tensors, k: int, work: Callable[[Cohort, Tensors], Work]
) -> Work | None:
    """The work of clients with different M, group by group and added up; None where all have the same."""
    numbers = steps_of(setting, cohort.ids, k)
    if len(set(numbers)) <= 1:
        return None
    steps = torch.tensor(numbers, device=cohort.device)
    new: Tensors = {}
    total: Message | None = None
    info = Info()
    for m in sorted(set(numbers)):
        index = (steps == m).nonzero().squeeze(1)
        state, message, part = work(cohort.select(index), {n: v[index] for n, v in local.items()})
        for name, value in state.items():
            if name not in new:
                new[name] = value.new_empty((len(cohort), *value.shape[1:]))
            new[name][index] = value
        total = message if total is None else total + message
        info = info + part
    assert total is not None
    return new, total, info
