"""What leaves a site: one message, the encoded sum over its units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedpop.channel.message import Answer, Tensors
from fedpop.channel.pipeline import Channel, Payload
from fedpop.channel.tally import Heard, only
from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import Key


@dataclass(frozen=True)
class Message:
    """All that a site says in a round, or to a question: vectors that are sums over its units, of how many
    units, and what the work cost. A message of no units says that nobody there was fit to be heard.

    >>> message = Message({"J": Channel().encode("J", torch.ones(2), 0, Key(0))}, units=1)
    >>> message.size  # two numbers of four bytes, in their frame
    21
    """

    payloads: Mapping[str, Payload]
    units: int
    named: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Further sums that a method wants: of which vector, with which coefficient."""
    cost: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its vectors, each in its frame."""
        return sum(len(payload.data) for payload in self.payloads.values())

    def vectors(self, channel: Channel, site: int, kind: torch.dtype) -> Tensors:
        """What the server sees of it; vectors that were compressed in the type that the model computes in."""
        found = {name: channel.decode(name, payload, site) for name, payload in self.payloads.items()}
        return {n: v.to(kind) if n in channel.compressed else v for n, v in found.items()}


class SiteSum:
    """What a site has to say, added up cohort by cohort: no more than one cohort's vectors are ever there."""

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self._good: list[Tensor] = []
        self._named: dict[str, tuple[str, list[Tensor]]] = {}
        self._cost: dict[str, float] = {}

    def add(self, answer: Answer) -> None:
        """One cohort's answer; who is not fit to be heard is left out."""
        good = answer.good
        for name, vectors in answer.vectors.items():
            # One unit after the other: where cohorts are cut changes no bit of a sum.
            so_far = self._sums[name] if name in self._sums else vectors.new_zeros(vectors.shape[1])
            one = torch.zeros(len(good), dtype=torch.int64, device=vectors.device)
            self._sums[name] = so_far.unsqueeze(0).index_add(0, one, only(good, vectors))[0]
        for name, total in answer.sums.items():
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for name, (of, coefficients) in answer.named.items():
            self._named.setdefault(name, (of, []))[1].append(coefficients[good])
        for name, number in answer.cost.items():
            self._cost[name] = self._cost.get(name, 0.0) + number
        self._good.append(good)

    def message(self, channel: Channel, site: int, key: Key) -> tuple[Message, list[Heard]]:
        """The sum as the site sends it; and who of each cohort is in it, with each one's share of what the
        server will see.

        A sum that cannot be sent (it is not finite, or too large for the compressor) is a message of nobody.
        """
        count = sum(int(good.sum()) for good in self._good)
        nobody = Message({}, 0, cost=self._cost), [Heard(torch.zeros_like(g), {}) for g in self._good]
        if not count:
            return nobody
        try:
            payloads = {n: channel.encode(n, v, site, key) for n, v in self._sums.items()}
        except PayloadError:
            return nobody
        named = {n: (of, _alike(n, torch.cat(each))) for n, (of, each) in self._named.items()}
        message = Message(payloads, count, named, self._cost)
        kind = next(iter(self._sums.values())).dtype if self._sums else torch.float32
        seen = message.vectors(channel, site, kind)
        shares = {n: v / count for n, v in seen.items()}
        return message, [Heard(g, {n: v.expand(len(g), -1) for n, v in shares.items()}) for g in self._good]


def _alike(name: str, coefficients: Tensor) -> float:
    """The one coefficient of a sum."""
    first = float(coefficients[0])
    if not bool((coefficients == coefficients[0]).all()):
        raise SettingsError(
            f"units of one site count differently in {name!r}: a site sends one sum, which can have one "
            "coefficient only; give its units the same"
        )
    return first
