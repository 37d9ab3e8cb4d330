"""Averages of the iterates theta_k, and how far theta still drifts.

``iterate`` is the average of the paper's theorem, sum eta_k theta_k / sum eta_k over all rounds; ``tail``
is the plain mean over the last rounds (of the present stage). The tail is kept in two halves, so that their
difference tells whether theta has settled. Averaging needs a fixed gauge: ``align`` moves theta_k along the
directions that the model cannot tell apart, towards the first theta of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedpop.checked import Fraction, OneOf
from fedpop.server.schedules import Rounds, Stage
from fedpop.settings import Setting

AVERAGES = ("tail", "iterate", "last")
Align = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Averaging(Setting):
    """Which average of theta over the rounds is published.

    Args:
        which: "tail" (the default) is the mean over the last rounds, "iterate" the one over all rounds,
            weighted by their step sizes, that the paper's theorem bounds; "last" is none.
        tail: The share of the rounds (of the present stage, where a run is extended) that makes the
            tail, above 0 and at most 1; 0.25 unless told. It serves to judge the drift of theta, too.

    >>> Averaging("iterate")  # the one that the paper's theorem bounds
    Averaging(which='iterate', tail=0.25)
    """

    which: Annotated[str, OneOf(*AVERAGES)] = "tail"
    tail: Fraction = 0.25

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        zero, none = torch.zeros_like(theta), theta.new_zeros(())
        return {
            "reference": theta.clone(),
            "first": zero,
            "second": zero.clone(),
            "first_weight": none,
            "second_weight": none.clone(),
            "all": zero.clone(),
            "all_weight": none.clone(),
        }

    def update(
        self,
        state: dict[str, Tensor],
        theta: Tensor,
        eta: float,
        k: int,
        rounds: Rounds,
        align: Align,
        warm_up: int = 0,
    ) -> dict[str, Tensor]:
        """Take theta_{k+1} into account, reached with step eta in round k; nothing is, before the stage that
        ``rounds`` are, and ``warm_up`` rounds count in none."""
        first, last = Stage.of(rounds)
        if k < first:
            return state
        start = first + int((last - first) * (1 - self.tail))
        middle = (start + last) // 2
        state = dict(state)
        if (
            k == first > warm_up
        ):  # the tail of an earlier stage: until a new one begins the last iterate stands
            state |= {n: v for n, v in self.init(theta).items() if n.startswith(("first", "second"))}
        # One reference for the whole average: a second one would mix two gauges.
        if k == (warm_up if self.which == "iterate" else start):
            state["reference"] = theta.clone()
        if k < start and self.which != "iterate":
            return state
        theta = align(theta, state["reference"])
        if self.which == "iterate":
            state["all"] = state["all"] + eta * theta
            state["all_weight"] = state["all_weight"] + eta
        if k >= start:
            half = "first" if k < middle else "second"
            state[half] = state[half] + theta
            state[f"{half}_weight"] = state[f"{half}_weight"] + 1
        return state

    def value(self, state: dict[str, Tensor], theta: Tensor) -> Tensor:
        """The published theta: the average, or the last iterate where there is none yet."""
        if self.which == "iterate" and float(state["all_weight"]) > 0:
            return state["all"] / state["all_weight"]
        weight = state["first_weight"] + state["second_weight"]
        if self.which == "tail" and float(weight) > 0:
            return (state["first"] + state["second"]) / weight
        return theta

    def halves(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Means over the two halves of the tail, once both are there."""
        if float(state["first_weight"]) == 0 or float(state["second_weight"]) == 0:
            return None
        return state["first"] / state["first_weight"], state["second"] / state["second_weight"]
