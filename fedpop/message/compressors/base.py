"""Unbiased compression of vectors, and the frame that every encoded vector comes in.

A compressor C has E[C(v)] = v and E norm(C(v) - v)^2 <= omega norm(v)^2, the two things that the paper asks
of it. ``compress`` says what the server will see of a cohort's vectors, ``encode`` makes the bytes that say
so, and ``decode`` needs nothing but those bytes: no key, no state.

The frame: magic, version, kind, number of entries and a CRC-32 of all the rest, twelve bytes; then the kind's
parameters, then packed codes. Anything that is not exactly so is one PayloadError.
"""

from __future__ import annotations

import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import PayloadError
from fedpop.keys import Key
from fedpop.settings import Setting

MAGIC, PAYLOAD_VERSION = b"fp", 1
_FRAME = struct.Struct("<2sBBII")
_BLOCK = 2**16
"""Entries worked on at a time on a CPU, so that a dozen passes over them stay in its cache."""


class Compressor(Setting, ABC):
    """An unbiased compressor; see the module's text.

    >>> import torch, fedpop as fp
    >>> from fedpop.keys import Key
    >>> compressor = fp.compressors.RandK(k=1)
    >>> seen = compressor.compress(torch.ones(1000, 4), Key(0), torch.arange(1000))
    >>> bool((seen.mean(0) - 1).abs().max() < 5 * (compressor.omega(4) / 1000) ** 0.5)  # unbiased
    True
    """

    name: ClassVar[str]
    kind: ClassVar[int]
    """The number that stands for it in a frame."""

    @property
    def identity(self) -> bool:
        """Nothing is changed, so that sums over clients may be formed before anything is sent."""
        return False

    @abstractmethod
    def omega(self, d: int) -> float:
        """The smallest known bound on the relative variance, for vectors of length d."""

    def longest(self, d: int) -> float:
        """How many times as long as a vector of length d it may decode; infinite where nobody says."""
        return math.inf

    @abstractmethod
    def encoded_bytes(self, d: int) -> int:
        """The size of an encoded float32 vector of length d."""

    @abstractmethod
    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        """What the server will see of the vectors ``[C, D]`` of clients ``ids``.

        A row that may not be sent (NaN, infinite, or so large that its decoded form could exceed float32)
        comes back as NaN.
        """

    @abstractmethod
    def encode(self, v: Tensor, key: Key, client: int = 0) -> bytes:
        """The bytes of one vector ``[D]``; they decode to what ``compress`` gives for this client."""

    @abstractmethod
    def decode(self, payload: bytes, length: int | None = None) -> Tensor:
        """The vector again. With ``length``, a payload of any other length is refused."""

    def check(self, d: int) -> None:
        """Raise when vectors of length d cannot be compressed with these settings."""

    def sent_bytes(self, sent: Tensor) -> int:
        """The encoded size of all rows of ``[C, D]``, which came out of ``compress``."""
        return sent.shape[0] * self.encoded_bytes(sent.shape[1])


def sealed(kind: int, length: int, *parts: bytes) -> bytes:
    """The parts in a frame."""
    check = zlib.crc32(_FRAME.pack(MAGIC, PAYLOAD_VERSION, kind, length, 0))
    for part in parts:
        check = zlib.crc32(part, check)
    return b"".join((_FRAME.pack(MAGIC, PAYLOAD_VERSION, kind, length, check), *parts))


def opened(compressor: Compressor, payload: bytes, length: int | None) -> tuple[int, memoryview]:
    """The number of entries and what is inside the frame, which must be whole and of the right kind."""
    if len(payload) < _FRAME.size:
        raise PayloadError(f"truncated payload: {len(payload)} bytes, a frame alone has {_FRAME.size}")
    magic, version, kind, count, check = _FRAME.unpack_from(payload)
    if magic != MAGIC:
        raise PayloadError("these bytes are not an encoded vector of fedpop, or they are corrupt")
    if version != PAYLOAD_VERSION:
        raise PayloadError(
            f"payload of version {version}; this is version {PAYLOAD_VERSION}: update the older side"
        )
    inside = memoryview(payload)[_FRAME.size :]
    if zlib.crc32(inside, zlib.crc32(_FRAME.pack(magic, version, kind, count, 0))) != check:
        raise PayloadError("corrupt or truncated payload: its checksum does not match; send it again")
    if kind != compressor.kind:
        raise PayloadError(f"this payload was not made by {compressor!r}: both sides need the same settings")
    if length is not None and count != length:
        raise PayloadError(f"the payload holds {count} entries where {length} were expected")
    return count, inside


def parameters(form: struct.Struct, inside: memoryview, packed: int) -> tuple[int | float, ...]:
    """The kind's parameters, after which so many bytes must follow."""
    if len(inside) != form.size + packed:
        raise PayloadError(f"the payload holds {len(inside)} bytes where {form.size + packed} were expected")
    return form.unpack_from(inside)


def one_row(v: Tensor) -> Tensor:
    """A vector as a cohort's, for ``encode``."""
    if v.dim() != 1 or not v.is_floating_point():
        raise PayloadError(f"expected a vector of real numbers, not {v.dtype} of shape {tuple(v.shape)}")
    return v.detach().unsqueeze(0)


def refuse(compressor: Compressor, sendable: Tensor) -> None:
    """Raise for a vector that ``compress`` would have turned into NaN."""
    if not bool(sendable.all()):
        raise PayloadError(
            f"the vector cannot be sent: an entry is NaN or infinite, or its form under {compressor!r} could "
            "exceed the largest float32 number"
        )


def blocks(v: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of ``[C, D]`` in pieces that fit a processor's cache."""
    clients, d = v.shape
    size = _BLOCK if v.device.type == "cpu" else max(v.numel(), 1)
    columns = min(max(d, 1), size)
    rows = max(1, size // columns)
    for r in range(0, clients, rows):
        for c in range(0, d, columns):
            yield slice(r, r + rows), slice(c, min(c + columns, d))


_FORM = struct.Struct("<B")
FLOATS = {4: ("<f4", torch.float32), 8: ("<f8", torch.float64)}
"""Bytes of an entry to its type in a payload and in memory."""


@dataclass(frozen=True)
class Identity(Compressor):
    """Vectors as they are, in a frame like all others.

    >>> Identity().decode(Identity().encode(torch.tensor([1.5, -2.0]), Key(0)))
    tensor([ 1.5000, -2.0000])
    """

    name: ClassVar[str] = "identity"
    kind: ClassVar[int] = 0

    @property
    def identity(self) -> bool:
        return True

    def omega(self, d: int) -> float:
        return 0.0

    def longest(self, d: int) -> float:
        return 1.0

    def encoded_bytes(self, d: int) -> int:
        return len(sealed(self.kind, d)) + _FORM.size + 4 * d

    def sent_bytes(self, sent: Tensor) -> int:
        rows, d = sent.shape
        wide = 4 * d if sent.dtype == torch.float64 else 0
        return rows * (self.encoded_bytes(d) + wide)

    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        return v

    def encode(self, v: Tensor, key: Key, client: int = 0) -> bytes:
        v = as_sent_float(one_row(v))
        refuse(self, torch.isfinite(v))
        return sealed(self.kind, v.shape[1], _FORM.pack(v.element_size()), raw(v))

    def decode(self, payload: bytes, length: int | None = None) -> Tensor:
        count, inside = opened(self, payload, length)
        item = inside[0] if len(inside) else 0
        if item not in FLOATS:
            raise PayloadError(f"entries of {item} bytes where 4 or 8 were expected")
        parameters(_FORM, inside, item * count)
        return floats(inside[_FORM.size :], item)


def as_sent_float(v: Tensor) -> Tensor:
    """float64 stays, everything else travels as float32."""
    return v if v.dtype == torch.float64 else v.to(torch.float32)


def raw(v: Tensor) -> bytes:
    """Entries as little-endian bytes."""
    return v.cpu().contiguous().numpy().astype(FLOATS[v.element_size()][0], copy=False).tobytes()


def floats(data: memoryview, item: int) -> Tensor:
    """The inverse of ``raw``, refusing what is not finite."""
    v = torch.from_numpy(np.frombuffer(data, dtype=FLOATS[item][0]).astype(f"f{item}"))
    if not bool(torch.isfinite(v.sum(dtype=torch.float64))) and not bool(torch.isfinite(v).all()):
        raise PayloadError("the payload holds an entry that is NaN or infinite")
    return v
