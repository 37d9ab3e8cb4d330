"""Random numbers keyed by (seed, round, unit, purpose); nothing is drawn from global state.

Philox4x32-10 (Salmon et al., SC 2011) is counter-based: the n-th number of a unit is a pure function of the
key, so the same seed gives the same draws whether units run in one cohort, in several, or each in a process
of its own, and a killed run needs no generator state to resume. The cipher's key is a hash of (seed, round,
purpose), its counter holds the unit, by a hash of its *name*, and the number of the block: nobody's draws
depend on who else is there, or in which order. The generator is vectorised over units in plain tensor
arithmetic, on whatever device they live on.

A ``seed`` may be the server's, which is shared, or a secret that a site keeps to itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words32 = npt.NDArray[np.uint32]

SERVER, NEWCOMER = -1, -2
"""What the server itself draws under, and a unit that was never in training; no name's hash is negative."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_HIGH = int(sys.byteorder == "little")
"""Which half of a 64-bit number in memory holds its high word."""
_KINDS: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
_CHUNK = 2**14
"""Counters encrypted at a time on a CPU: seventy passes over them should stay in its cache."""


def unit_of(name: str) -> int:
    """The number under which a unit of this name draws: a stable hash of 63 bits.

    >>> unit_of("anna") == unit_of("anna") != unit_of("ben")
    True
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def units_of(names: Iterable[str]) -> Tensor:
    """``unit_of`` of each name, ``[n]``."""
    return torch.tensor([unit_of(name) for name in names], dtype=torch.int64)


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 on a ``[4, ...]`` int64 tensor of 32-bit counter words."""
    flat = counter.reshape(4, -1)
    if _plain(counter):  # the same arithmetic, with less overhead per operation
        words = _encrypted_arrays(flat.numpy().astype(np.uint32), key)
        return torch.from_numpy(words.astype(np.int64)).reshape(counter.shape)
    return _encrypted(flat, *_constants(key, counter.device)).reshape(counter.shape)


def _plain(t: Tensor) -> bool:
    """In a processor's own memory, and not inside a transform of torch.func."""
    return t.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _constants(key: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers ``[2, 1]`` and the key of every round, ``[rounds, 2, 1]``."""
    multiplier, weyl = _weyl(device)
    return multiplier, (weyl + torch.tensor(key, device=device).view(1, 2, 1)).bitwise_and_(_MASK)


@lru_cache
def _weyl(device: torch.device) -> tuple[Tensor, Tensor]:
    multiplier = torch.tensor(_MULTIPLIERS, device=device).view(2, 1)
    rounds = torch.arange(_ROUNDS, device=device).view(-1, 1, 1)
    return multiplier, rounds * torch.tensor(_WEYL, device=device).view(1, 2, 1)


@lru_cache
def _weyl_arrays() -> tuple[npt.NDArray[np.uint64], Words32]:
    multiplier, weyl = _weyl(torch.device("cpu"))
    return multiplier.numpy().astype(np.uint64), weyl.numpy().astype(np.uint32)  # modulo 2^32


def _encrypted(counter: Tensor, multiplier: Tensor, keys: Tensor) -> Tensor:
    # Words (0, 2) are multiplied, words (1, 3) only mixed in: two lanes, one set of operations.
    even, odd = counter[0::2], counter[1::2]
    for key in keys:
        product = (even * multiplier).flip(0)  # int64 wraps, which keeps the low and high words
        low = product & _MASK
        high = product.bitwise_right_shift_(32).bitwise_and_(_MASK)
        even, odd = high.bitwise_xor_(odd).bitwise_xor_(key), low
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _encrypted_arrays(counter: Words32, key: tuple[int, int]) -> Words32:
    """The same on arrays, a chunk at a time."""
    multiplier, weyl = _weyl_arrays()
    keys = weyl + np.array(key, dtype=np.uint32).reshape(2, 1)  # which wraps
    if counter.shape[1] <= _CHUNK:
        return _encrypted_array(counter, multiplier, keys)
    parts = np.split(counter, range(_CHUNK, counter.shape[1], _CHUNK), axis=1)
    return np.concatenate([_encrypted_array(part, multiplier, keys) for part in parts], 1)


def _encrypted_array(counter: Words32, multiplier: npt.NDArray[np.uint64], keys: Words32) -> Words32:
    even, odd = counter[0::2], counter[1::2]
    for key in keys:
        product = np.multiply(even, multiplier, dtype=np.uint64)
        words = product.view(np.uint32).reshape(2, -1, 2)[::-1]  # low and high word of each
        even, odd = words[..., _HIGH] ^ odd ^ key, words[..., 1 - _HIGH]
    return np.stack((even[0], odd[0], even[1], odd[1]))


@dataclass(frozen=True, slots=True)
class Key:
    """An address in the space of random numbers.

    >>> import torch
    >>> key = Key(seed=0).at(round=3, purpose="chain")
    >>> one = key.normal(torch.tensor([7]), (2,))
    >>> many = key.normal(torch.tensor([1, 7]), (2,))
    >>> bool((one[0] == many[1]).all())
    True
    """

    seed: int
    round: int = 0
    purpose: str = ""

    def at(self, *, round: int | None = None, purpose: str | None = None) -> Key:
        """The same seed at another round, or for a purpose nested below this one."""
        return Key(
            self.seed,
            self.round if round is None else round,
            self.purpose if purpose is None else f"{self.purpose}/{purpose}",
        )

    @property
    def _cipher(self) -> tuple[int, int]:
        address = f"{self.seed}|{self.round}|{self.purpose}".encode()
        both = int.from_bytes(blake2b(address, digest_size=8).digest(), "little")
        return both & _MASK, both >> 32

    def bits(self, units: Tensor, count: int, start: Tensor | int = 0) -> Tensor:
        """``count`` 32-bit words per unit as int64 ``[C, count]``, from block ``start`` on."""
        wide = (count + 3) // 4
        if isinstance(start, int) and units.dim() == 1 and _plain(units):
            return torch.from_numpy(self._few(units, wide, start).astype(np.int64))[:, :count]
        units, blocks = units.to(torch.int64), torch.arange(wide, device=units.device)
        if isinstance(start, Tensor):
            start = start.to(torch.int64).unsqueeze(-1)
        block = (blocks + start).expand(*units.shape, wide)
        unit = units.unsqueeze(-1).expand_as(block)
        counter = torch.stack((block, block >> 32, unit, unit >> 32)).bitwise_and_(_MASK)
        words = philox(counter, self._cipher)
        return words.movedim(0, -1).reshape(*units.shape, 4 * wide)[..., :count]

    def _few(self, units: Tensor, wide: int, start: int) -> Words32:
        """``bits`` of whole blocks ``[C, 4 wide]`` on arrays, which cost less to set up."""
        counter = np.empty((4, len(units), wide), dtype=np.uint32)
        block = np.arange(start, start + wide)
        own = units.to(torch.int64).numpy()[:, None]
        # Each is cut to its low word.
        counter[0], counter[1], counter[2], counter[3] = block, block >> 32, own, own >> 32
        words = _encrypted_arrays(counter.reshape(4, -1), self._cipher)
        return words.T.reshape(len(units), 4 * wide)

    def words(self, units: Tensor) -> Words:
        """Cheaper 32-bit words, for rounding long vectors."""
        return Words(_signed(self.bits(units, 2)).to(torch.int32))

    def uniform(
        self,
        units: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        step: int = 0,
        steps: int | None = None,
    ) -> Tensor:
        """Uniform numbers in (0, 1], ``[C, *shape]``; ``step`` numbers successive calls.

        With ``steps``, the numbers of so many successive calls at once, ``[C, steps, *shape]``.
        """
        return self._draw(units, shape, dtype, step, steps, lambda u: u)

    def normal(
        self,
        units: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        step: int = 0,
        steps: int | None = None,
    ) -> Tensor:
        """Standard normal numbers by Box-Muller, addressed as those of ``uniform``."""
        return self._draw(units, shape, dtype, step, steps, _box_muller)

    def _draw(
        self,
        units: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        step: int,
        steps: int | None,
        transform: Callable[[Tensor], Tensor],
    ) -> Tensor:
        count = math.prod(shape)
        blocks = (count + 3) // 4
        many = 1 if steps is None else steps
        # Never 0, so that the logarithm is finite; the small end keeps its resolution.
        if dtype in _KINDS and units.dim() == 1 and _plain(units):
            few = self._few(units, blocks * many, step * blocks).astype(_KINDS[dtype])
            few += 0.5
            few *= 2.0**-32
            unit = torch.from_numpy(few)
        else:
            words = self.bits(units, 4 * blocks * many, step * blocks)
            unit = words.to(dtype).add_(0.5).mul_(2.0**-32)
        drawn = transform(unit).reshape(*units.shape, many, 4 * blocks)
        drawn = drawn if count == 4 * blocks else drawn[..., :count]
        return drawn.reshape(*units.shape, *(() if steps is None else (many,)), *shape)

    def server(self, device: torch.device | str = "cpu") -> Tensor:
        """The server's number as a ``[1]`` tensor, to draw with."""
        return torch.tensor([SERVER], device=device)


def _box_muller(unit: Tensor) -> Tensor:
    first, second = unit.reshape(*unit.shape[:-1], -1, 2).unbind(-1)
    radius = torch.log(first).mul_(-2.0).sqrt_()
    angle = 2.0 * math.pi * second
    direction = torch.stack((torch.cos(angle), torch.sin(angle)), dim=-1)
    return direction.mul_(radius.unsqueeze(-1)).reshape(unit.shape)


class Words:
    """The j-th word of a unit is an integer hash of j under a 64-bit Philox seed of its own.

    The hash is lowbias32 (Wellons' hash-prospector), with the second half of the seed added halfway: a dozen
    passes of 32-bit arithmetic where Philox takes fifty of 64 bits. A stream has no word twice, which does
    not matter to those who round numbers with it; chains should not run on it.

    >>> words = Key(0).words(torch.tensor([3, 7]))
    >>> bool((words.block(slice(0, 2), 8, 4)[1] == words.block(slice(1, 2), 0, 12)[0, 8:]).all())
    True
    """

    def __init__(self, seeds: Tensor) -> None:
        """``seeds`` are int32 ``[C, 2]``."""
        self._first, self._second = seeds.unsqueeze(-1).unbind(1)
        self._weyl = seeds.new_empty(0)

    def block(self, rows: slice, start: int, count: int) -> Tensor:
        """Words ``start`` to ``start + count`` of the units at ``rows``, as int32 ``[R, count]``."""
        if count > len(self._weyl):  # consecutive numbers that differ in many bits
            self._weyl = torch.arange(count, dtype=torch.int32, device=self._weyl.device) * _GOLDEN
        h = self._weyl[:count] + (self._first[rows] + _signed(start * _GOLDEN))
        spare = torch.empty_like(h)
        _xor_shifted(h, 16, spare).mul_(0x7FEB352D).add_(self._second[rows])
        _xor_shifted(h, 15, spare).mul_(_signed(0x846CA68B))
        return _xor_shifted(h, 16, spare)


def _signed(word: Tensor | int) -> Any:
    """A 32-bit word, or a number taken modulo 2^32, as int32 holds it."""
    return ((word + 2**31) & _MASK) - 2**31


_GOLDEN = _signed(_WEYL[0])


def _xor_shifted(h: Tensor, by: int, spare: Tensor) -> Tensor:
    """h ^= h >> by, with zeros shifted in."""
    torch.bitwise_right_shift(h, by, out=spare)
    return h.bitwise_xor_(spare.bitwise_and_((1 << (32 - by)) - 1))


PUBLIC = Key(0, purpose="public")
"""What newcomers draw with: anybody's, so that all who hold theta make the same model of it, to rounding."""
