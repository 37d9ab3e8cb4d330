"""The way of messages to the server: clip, weight, compress, encode; decode.

One object serves the simulator and a deployment. ``send`` is what a site does with its message: between
machines it makes the bytes, in the simulator it gives what would arrive, to the bit, and counts them.
``receive`` is what the server does with bytes. No method knows which compressor its vectors meet on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedpop.checked import Checked, Positive
from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import Key, unit_of
from fedpop.message.compressors import Compressor, Identity
from fedpop.message.message import (
    NAMED,
    PLAIN,
    Message,
    Payload,
    Tensors,
    base_name,
    finite_rows,
    only,
    weighed,
)
from fedpop.settings import named

Choice = Compressor | str | Mapping[str, Compressor | str]


def resolve_compressor(compressor: Compressor | str) -> Compressor:
    """A compressor from itself or from its name.

    >>> from fedpop.message.compressors import QSGD
    >>> resolve_compressor("qsgd"), resolve_compressor(QSGD(levels=7))
    (QSGD(levels=127), QSGD(levels=7))
    """
    if isinstance(compressor, Compressor):
        return compressor
    if isinstance(compressor, str):
        return named(Compressor, compressor, "compressor")()
    raise SettingsError(
        "a compressor is fedpop.compressors.QSGD() or its like, a name, or a mapping from clients to them, "
        f"not {compressor!r}"
    )


CLIP_SLACK = 1e-5
"""Of vectors in single precision that were clipped: so much longer they may arrive."""
AS_IT_IS = Identity()
"""What becomes of vectors that are not compressed."""


@dataclass(frozen=True)
class Channel(Checked):
    """What happens to the vectors named in ``compressed`` and ``clipped``; all else is sent as it is.

    ``compressor`` is one for all, or one for each client by name. ``clip`` bounds the norm of what a site
    sends (a longer vector is shortened, which biases the sum): of vectors that are ``clipped``, or of those
    that are compressed where nothing else is said.

    >>> from fedpop.message.compressors import QSGD
    >>> channel = Channel(QSGD(), ("J",))
    >>> seen, size = channel.carry("J", torch.ones(2, 1000), torch.tensor([3, 5]), Key(0))
    >>> size
    2036
    """

    compressor: Choice = field(default_factory=Identity)
    compressed: tuple[str, ...] = ()
    clip: Positive | None = None
    clipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._each  # names are known, or refused

    @cached_property
    def _each(self) -> dict[int, Compressor] | Compressor:
        if isinstance(self.compressor, Mapping):
            return {unit_of(name): resolve_compressor(c) for name, c in self.compressor.items()}
        return resolve_compressor(self.compressor)

    @cached_property
    def compressors(self) -> tuple[Compressor, ...]:
        """All that may be used."""
        return tuple(set(self._each.values())) if isinstance(self._each, dict) else (self._each,)

    @cached_property
    def transparent(self) -> bool:
        """Vectors arrive as they were sent: sums over units may be formed before anything is sent."""
        return self.clip is None and all(c.identity for c in self.compressors)

    @property
    def one_for_all(self) -> bool:
        """One compressor for every site, whoever it is."""
        return not isinstance(self._each, dict)

    def of(self, site: int) -> Compressor:
        """The compressor of a site, by the hash of its name."""
        if not isinstance(self._each, dict):
            return self._each
        if site not in self._each:
            raise SettingsError("a client without a compressor: give one for each by name, or one for all")
        return self._each[site]

    def omega(self, sites: Tensor, length: int) -> Tensor:
        """The relative variance that compression adds, for each of these sites ``[S]``."""
        each = [self.of(s).omega(length) for s in (sites.tolist() if isinstance(self._each, dict) else [0])]
        return torch.tensor(each, dtype=torch.float64, device=sites.device).expand(len(sites))

    # --- at a site ---------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        key: Key,
        weights: Tensor | None = None,
        plain: tuple[str, ...] = (),
        encode: bool = False,
    ) -> Message:
        """A message as the server sees it: clipped, with participation ``weights`` ``[S]`` where they act at
        the site (vectors in ``plain`` are then sent without, too), compressed; a row that cannot be sent
        speaks for nobody. ``encode`` makes the bytes, of one row.
        """
        some = message.received
        everyone = bool(some.all())
        if not everyone:
            message = replace(message, vectors={n: only(some, v) for n, v in message.vectors.items()})
        if self.clip is not None:
            message = replace(message, vectors={n: self._clipped(n, v) for n, v in message.vectors.items()})
        if weights is not None:
            message = weighed(message, weights, plain)
        size = _fused_bytes(message)
        if encode:
            message, more = self._encoded(message, key)
        elif not everyone:
            message, more = self._carried_some(message, some, key)
        else:
            message, more = self._carried(message, key)
        finite = finite_rows(message.vectors)
        if finite is not None:
            if message.sums and not bool(finite.all()):
                raise SettingsError("a unit was refused after its vectors had been added to a sum")
            message = message.without(~finite)
        changed = weights is not None or not self.transparent
        return replace(message, changed=changed, checked=True, bytes=size + more)

    def _carried(self, message: Message, key: Key) -> tuple[Message, int]:
        if self.transparent:
            return message, sum(plain_bytes(v) for v in message.vectors.values())
        seen, size = Tensors(), 0
        for name, v in message.vectors.items():
            seen[name], more = self._compressed(base_name(message, name), v, message.sites, key)
            size += more
        return replace(message, vectors=seen), size

    def _carried_some(self, message: Message, some: Tensor, key: Key) -> tuple[Message, int]:
        """Sites that have nothing to say send nothing."""
        part = replace(
            message,
            sites=message.sites[some],
            vectors={n: v[some] for n, v in message.vectors.items()},
        )
        part, size = self._carried(part, key)
        seen = {n: torch.zeros_like(v) for n, v in message.vectors.items()}
        for name, v in part.vectors.items():
            seen[name][some] = v
        return replace(message, vectors=seen), size

    def carry(self, name: str, vectors: Tensor, sites: Tensor, key: Key) -> tuple[Tensor, int]:
        """What the server would see of the vectors ``[S, D]`` of these sites, and how many bytes that takes.

        A vector that cannot be sent comes back as NaN, and costs nothing.
        """
        return self._compressed(name, self._clipped(name, vectors), sites, key)

    def _compressed(self, name: str, vectors: Tensor, sites: Tensor, key: Key) -> tuple[Tensor, int]:
        if self.transparent or name not in self.compressed:
            return vectors, plain_bytes(vectors)
        key = key.at(purpose=f"compress.{name}")
        if isinstance(self._each, Compressor):
            return _through(self._each, vectors, key, sites)
        seen, size = torch.empty_like(vectors), 0
        groups: dict[Compressor, list[int]] = {}
        for position, site in enumerate(sites.tolist()):
            groups.setdefault(self.of(site), []).append(position)
        for compressor, positions in groups.items():
            rows = torch.tensor(positions, device=sites.device)
            seen[rows], more = _through(compressor, vectors[rows], key, sites[rows])
            size += more
        return seen, size

    def _encoded(self, message: Message, key: Key) -> tuple[Message, int]:
        """With its bytes, and its vectors as they decode from them."""
        if not bool(message.received.all()):
            return message.without(torch.ones_like(message.received)), 0
        (site,) = message.sites.tolist()
        try:
            payloads = {
                n: self._payload(base_name(message, n), v[0], site, key) for n, v in message.vectors.items()
            }
        except PayloadError:
            return message.without(torch.ones_like(message.received)), 0
        like = next(iter(message.vectors.values())) if message.vectors else torch.zeros(0)
        seen = self.receive(replace(message, payloads=payloads), like.dtype).vectors
        seen = {n: v.to(like.device) for n, v in seen.items()}
        return replace(message, payloads=payloads, vectors=seen), sum(len(p.data) for p in payloads.values())

    def encode(self, name: str, vector: Tensor, site: int, key: Key) -> Payload:
        """What a site sends of its vector ``[D]``; a PayloadError where it cannot be sent."""
        return self._payload(name, self._clipped(name, vector.unsqueeze(0))[0], site, key)

    def _payload(self, name: str, vector: Tensor, site: int, key: Key) -> Payload:
        compressor = self._for(name, site)
        data = compressor.encode(vector, key.at(purpose=f"compress.{name}"), site)
        return Payload(compressor.name, vector.shape[0], data)

    def _clipped(self, name: str, vectors: Tensor) -> Tensor:
        """Vectors ``[S, D]`` of this name, none longer than ``clip``."""
        if self.clip is None or name not in (self.clipped or self.compressed):
            return vectors
        norm = torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=torch.float64)
        out: Tensor = vectors * (self.clip / norm.clamp(min=self.clip)).to(vectors.dtype)
        return out

    # --- at the server -----------------------------------------------------------------------

    def receive(self, message: Message, kind: torch.dtype) -> Message:
        """A message with its vectors decoded; those that were compressed in the type that the model computes
        in. A PayloadError where bytes are not what was agreed on."""
        (site,) = message.sites.tolist()
        seen = Tensors()
        for name, payload in message.payloads.items():
            base = base_name(message, name)
            vector = self.decode(base, payload, site)
            seen[name] = (vector.to(kind) if base in self.compressed else vector).unsqueeze(0)
        size = sum(len(payload.data) for payload in message.payloads.values())
        return replace(message, vectors=seen, bytes=size)

    def bounded(self, message: Message, weight: float = 1.0) -> tuple[Message, list[str]]:
        """What one site sent, clipped again, whatever it did itself: an honest vector has no more than the
        bound, times the site's participation weight where that acts there, times what its compressor may add.
        And the names of those that were longer."""
        if self.clip is None:
            return message, []
        (site,) = message.sites.tolist()
        seen, longer = dict(message.vectors), []
        for name, v in message.vectors.items():
            base = base_name(message, name)
            if base not in (self.clipped or self.compressed):
                continue
            factor = 1.0
            if name.startswith(NAMED):
                factor = abs(float(message.named[name.removeprefix(NAMED)][1].reshape(-1)[0]))
            elif message.weighted and not name.startswith(PLAIN):
                factor = weight
            most = self.clip * factor * self._for(base, site).longest(v.shape[1]) * (1 + CLIP_SLACK)
            norm = float(torch.linalg.vector_norm(v, dtype=torch.float64))
            if norm > most:
                seen[name] = v * (most / norm)
                longer.append(name)
        return replace(message, vectors=seen), longer

    def decode(self, name: str, payload: Payload, site: int) -> Tensor:
        """The vector as the server sees it, in float32 or the type it was sent in."""
        compressor = self._for(name, site)
        if payload.codec != compressor.name:
            raise PayloadError(f"{name} came as {payload.codec!r}, which was not agreed on")
        return compressor.decode(payload.data, payload.length)

    def _for(self, name: str, site: int) -> Compressor:
        return self.of(site) if name in self.compressed else AS_IT_IS


def _fused_bytes(message: Message) -> int:
    """What sums over rows would have taken if each row had sent one."""
    if not message.sums:
        return 0
    rows = int(message.received.sum())
    return rows * sum(plain_bytes(total.reshape(1, -1)) for total in message.sums.values())


def _through(compressor: Compressor, vectors: Tensor, key: Key, sites: Tensor) -> tuple[Tensor, int]:
    if compressor.identity:
        return vectors, plain_bytes(vectors)
    seen = compressor.compress(vectors, key, sites)
    arrived = seen[~torch.isnan(seen[:, :1]).any(1)]
    return seen, compressor.sent_bytes(arrived)


def plain_bytes(vectors: Tensor) -> int:
    """What messages of these vectors ``[S, D]`` take as they are, in their frames."""
    return AS_IT_IS.sent_bytes(vectors)
