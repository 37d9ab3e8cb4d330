"""The way of a site's vectors to the server: clip, compress, encode; decode, sum.

One object serves the simulator and a deployment. Between machines a site calls ``encode`` and the server
``decode``; in the simulator ``carry`` gives what would arrive, to the bit, without making the bytes, and
counts them. No method knows which compressor its vectors meet on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedpop.channel.compressors import Compressor, Identity
from fedpop.checked import Checked, Positive
from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import Key, unit_of
from fedpop.settings import named

Choice = Compressor | str | Mapping[str, Compressor | str]


def resolve_compressor(compressor: Compressor | str) -> Compressor:
    """A compressor from itself or from its name.

    >>> from fedpop.channel.compressors import QSGD
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


@dataclass(frozen=True)
class Payload:
    """An encoded vector as it travels: which codec made it, of how many entries, and the bytes."""

    codec: str
    length: int
    data: bytes


@dataclass(frozen=True)
class Channel(Checked):
    """What happens to the vectors named in ``compressed`` and ``clipped``; all else is sent as it is.

    ``compressor`` is one for all, or one for each client by name. ``clip`` bounds the norm of what a site
    sends (a longer vector is shortened, which biases the sum): of vectors that are ``clipped``, or of those
    that are compressed where nothing else is said.

    >>> from fedpop.channel.compressors import QSGD
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

    # --- between machines --------------------------------------------------------------------

    def encode(self, name: str, vector: Tensor, site: int, key: Key) -> Payload:
        """What a site sends of its vector ``[D]``; a PayloadError where it cannot be sent."""
        compressor = self._for(name, site)
        vector = self._clipped(name, vector.unsqueeze(0))[0]
        data = compressor.encode(vector, key.at(purpose=f"compress.{name}"), site)
        return Payload(compressor.name, vector.shape[0], data)

    def decode(self, name: str, payload: Payload, site: int) -> Tensor:
        """The vector as the server sees it, in float32 or the type it was sent in."""
        compressor = self._for(name, site)
        if payload.codec != compressor.name:
            raise PayloadError(f"{name} came as {payload.codec!r}, which was not agreed on")
        return compressor.decode(payload.data, payload.length)

    def _for(self, name: str, site: int) -> Compressor:
        return self.of(site) if name in self.compressed else Identity()

    # --- in one process ----------------------------------------------------------------------

    def carry(self, name: str, vectors: Tensor, sites: Tensor, key: Key) -> tuple[Tensor, int]:
        """What the server would see of the vectors ``[S, D]`` of these sites, and how many bytes that took.

        A vector that cannot be sent comes back as NaN, and costs nothing.
        """
        vectors = self._clipped(name, vectors)
        if self.transparent or name not in self.compressed:
            return vectors, plain_bytes(vectors)
        key = key.at(purpose=f"compress.{name}")
        if isinstance(self._each, Compressor):
            return _compressed(self._each, vectors, key, sites)
        seen, size = torch.empty_like(vectors), 0
        groups: dict[Compressor, list[int]] = {}
        for position, site in enumerate(sites.tolist()):
            groups.setdefault(self.of(site), []).append(position)
        for compressor, positions in groups.items():
            rows = torch.tensor(positions, device=sites.device)
            seen[rows], more = _compressed(compressor, vectors[rows], key, sites[rows])
            size += more
        return seen, size

    def _clipped(self, name: str, vectors: Tensor) -> Tensor:
        if self.clip is None or name not in (self.clipped or self.compressed):
            return vectors
        norm = torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=torch.float64)
        out: Tensor = vectors * (self.clip / norm.clamp(min=self.clip)).to(vectors.dtype)
        return out


def _compressed(compressor: Compressor, vectors: Tensor, key: Key, sites: Tensor) -> tuple[Tensor, int]:
    if compressor.identity:
        return vectors, plain_bytes(vectors)
    seen = compressor.compress(vectors, key, sites)
    arrived = seen[~torch.isnan(seen[:, :1]).any(1)]
    return seen, compressor.sent_bytes(arrived)


def plain_bytes(vectors: Tensor) -> int:
    """What messages of these vectors ``[S, D]`` take as they are, in their frames."""
    return Identity().sent_bytes(vectors)
