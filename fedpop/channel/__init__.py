"""What happens to a message between a client and the server: compression, and the count of its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedpop.channel.compressors.base import Compressor
from fedpop.channel.compressors.identity import Identity
from fedpop.channel.compressors.natural import Natural
from fedpop.channel.compressors.qsgd import QSGD
from fedpop.channel.compressors.rand_k import RandK
from fedpop.errors import SettingsError
from fedpop.keys import Key

__all__ = ["QSGD", "Channel", "Compressor", "Identity", "Natural", "RandK", "resolve_compressor"]

_BY_NAME: dict[str, type[Compressor]] = {c.name: c for c in (Identity, QSGD, RandK, Natural)}


def resolve_compressor(
    compressor: Compressor | str | Sequence[Compressor | str],
) -> Compressor | tuple[Compressor, ...]:
    """A compressor from itself or from its name, or one for each client.

    >>> resolve_compressor("qsgd"), resolve_compressor(["natural", QSGD(levels=7)])
    (QSGD(levels=127), (Natural(), QSGD(levels=7)))
    """
    if isinstance(compressor, Compressor):
        return compressor
    if isinstance(compressor, str):
        if compressor not in _BY_NAME:
            raise SettingsError(f"unknown compressor {compressor!r}; known are {', '.join(_BY_NAME)}")
        return _BY_NAME[compressor]()
    if not isinstance(compressor, Sequence):
        raise SettingsError(f"a compressor is one of {', '.join(_BY_NAME)}, or one each, not {compressor!r}")
    each = [resolve_compressor(c) for c in compressor]
    return tuple(c for c in each if isinstance(c, Compressor))


@dataclass
class Channel:
    """The way up: ``compressor`` (one for all, or one for each client of the federation) is applied to the
    messages named in ``compressed``, with draws keyed by (seed, round, client, message). Everything else
    is sent as it is.

    >>> channel = Channel(QSGD(), key=Key(0))
    >>> sent = channel("J", torch.ones(2, 1000), torch.tensor([3, 5]))
    >>> channel.bytes_up
    2036
    """

    compressor: Compressor | tuple[Compressor, ...] = field(default_factory=Identity)
    compressed: tuple[str, ...] = ("J",)
    key: Key = field(default_factory=lambda: Key(0))
    bytes_up: int = 0

    @cached_property
    def fusable(self) -> bool:
        """One backward pass may serve all clients, since only sums matter."""
        each = self.compressor if isinstance(self.compressor, tuple) else (self.compressor,)
        return all(c.identity for c in each)

    def __call__(self, name: str, per_client: Tensor, ids: Tensor | None = None) -> Tensor:
        """What the server will see of the vectors ``[C, D]`` of clients ``ids``.

        A vector that its compressor cannot send comes back as NaN, and costs no bytes.
        """
        if self.fusable or name not in self.compressed:
            self.bytes_up += _plain_bytes(per_client)
            return per_client
        assert ids is not None
        key = self.key.at(purpose=f"compress.{name}")
        if isinstance(self.compressor, Compressor):
            return self._compressed(self.compressor, per_client, key, ids)
        sent = torch.empty_like(per_client)
        groups: dict[Compressor, list[int]] = {}
        for position, client in enumerate(ids.tolist()):
            groups.setdefault(self.compressor[client], []).append(position)
        for compressor, positions in groups.items():
            rows = torch.tensor(positions, device=ids.device)
            sent[rows] = self._compressed(compressor, per_client[rows], key, ids[rows])
        return sent

    def _compressed(self, compressor: Compressor, vectors: Tensor, key: Key, ids: Tensor) -> Tensor:
        sent = compressor.compress(vectors, key, ids)
        arrived = sent[~torch.isnan(sent[:, :1]).any(1)]
        self.bytes_up += _plain_bytes(arrived) if compressor.identity else compressor.sent_bytes(arrived)
        return sent

    def fused(self, name: str, total: Tensor, clients: int) -> Tensor:
        """The same when only the sum was computed; every client still sends its own vector."""
        self.bytes_up += clients * _plain_bytes(total)
        return total


def _plain_bytes(vectors: Tensor) -> int:
    return vectors.numel() * vectors.element_size()
