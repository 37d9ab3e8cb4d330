"""Answers of units through a channel and added up, as ``Sites`` does it, for tests that have answers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.keys import Key
from fedpop.message import Aggregate, Answer, Channel, Message, Tensors, Total
from fedpop.site.work import Exchange, Sending, SiteMessage, Update, seen_by_server


@dataclass(frozen=True)
class Heard:
    """Which units are in the total, ``[C]``, and what the server saw of each of them."""

    heard: Tensor
    seen: Tensors


class _Seen(Exchange):
    """Units keep what the server saw of them."""

    def __init__(self, sending: Sending, remembered: tuple[str, ...]) -> None:
        self.sending, self.remembered = sending, remembered

    def answers(self, group: Tensor, cohort: Any, weights: Tensor) -> Any:
        raise NotImplementedError  # there are answers already

    def settled(self, answer: Answer, local: Tensors, received: Tensor, seen: Tensors) -> Tensors:
        return dict(seen)


class Tally:
    """Sums of one round or one question."""

    def __init__(
        self,
        channel: Channel,
        key: Key,
        remembered: tuple[str, ...] = (),
        weigh: bool = False,
        plain: tuple[str, ...] = (),
    ) -> None:
        self.sending = Sending(channel, key, weigh=weigh, plain=plain)
        self.remembered, self.aggregate = remembered, Aggregate()

    def add(
        self,
        answer: Answer,
        units: Tensor,
        weights: Tensor,
        sites: Tensor | None = None,
        lost: Tensor | None = None,
    ) -> Heard:
        """Units that are sites of their own, or at ``sites`` ``[C]``; ``lost`` ones do not arrive."""
        if sites is None:
            message = self.sending.sent(Message.of(answer, units), weights, torch.ones_like(units))
            heard = self.aggregate.add(message, weights, lost)
            return Heard(heard, seen_by_server(message, self.remembered))
        heard, seen = torch.zeros_like(answer.good), Tensors()
        for site in torch.unique(sites).tolist():
            at = (sites == site).nonzero().squeeze(1)
            updates: list[Update] = []
            whole = SiteMessage(site, _Seen(self.sending, self.remembered), updates)
            part = Answer(
                answer.good[at],
                {n: v[at] for n, v in answer.vectors.items()},
                named={n: (of, c[at]) for n, (of, c) in answer.named.items()},
                sums=answer.sums if site == int(sites[0]) else {n: 0 * v for n, v in answer.sums.items()},
            )
            whole.add(at, torch.ones_like(at), weights[at], {}, part)
            work = whole.work()
            gone = None if lost is None else lost[at].any().expand(1)
            received = self.aggregate.add(work.message, work.weights, gone)
            heard[at] = work.settled(received)
            for n, v in updates[0][1].items():
                seen.setdefault(n, torch.zeros(len(units), v.shape[1], dtype=v.dtype))[at] = v
        return Heard(heard, seen)

    @property
    def bytes_up(self) -> int:
        return self.total(0, False).bytes_up

    def total(self, of: int, ratio: bool) -> Total:
        return self.aggregate.total(of, ratio)
