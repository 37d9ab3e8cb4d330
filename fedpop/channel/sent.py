"""What leaves a site: one message, the encoded sum over its units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedpop.channel.message import Answer, Tensors
from fedpop.channel.pipeline import Channel, Payload
from fedpop.channel.tally import Heard, Tally
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


def message_of(answer: Answer, units: Tensor, channel: Channel, site: int, key: Key) -> tuple[Message, Heard]:
    """The sum over an answer's units as their site sends it; and who of them is in it, with each one's share
    of what the server will see.

    A sum that cannot be sent (an entry of it may be too large for the compressor) is a message of nobody.
    """
    kind = next((v.dtype for v in answer.vectors.values()), torch.float32)
    tally = Tally(Channel(), key)
    ones = torch.ones(len(units), device=units.device)
    heard = tally.add(replace(answer, rows=None, named={}), units, ones).heard
    sums, count = tally.total(len(units), ratio=False).plain, int(heard.sum())
    if not count:
        return Message({}, 0, cost=answer.cost), Heard(heard, {})
    try:
        payloads = {n: channel.encode(n, v, site, key) for n, v in sums.items()}
    except PayloadError:
        return Message({}, 0, cost=answer.cost), Heard(torch.zeros_like(heard), {})
    named = {n: (of, _alike(n, c[heard])) for n, (of, c) in answer.named.items()}
    message = Message(payloads, count, named, answer.cost)
    seen = message.vectors(channel, site, kind)
    return message, Heard(heard, {n: (v / count).expand(len(units), -1) for n, v in seen.items()})


def _alike(name: str, coefficients: Tensor) -> float:
    """The one coefficient of a sum."""
    first = float(coefficients[0])
    if not bool((coefficients == coefficients[0]).all()):
        raise SettingsError(
            f"units of one site count differently in {name!r}: a site sends one sum, which can have one "
            "coefficient only; give its units the same"
        )
    return first
