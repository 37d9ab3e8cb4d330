"""Noise that sites add to secure sums, each its part, as whole numbers on the sums' grid.

A site rounds its vector to multiples of a step, at random and without bias, and adds a discrete Gaussian
(Canonne, Kamath and Steinke, NeurIPS 2020) to each entry. Of t sites that are honest and heard these have
together the variance that the ledger counts; others only add to it. What a unit adds to the rounded sum has a
norm of C + step sqrt(d) at most, since rounding with and without it differs by less than a step an entry. A
sum of discrete Gaussians is nearly one: its log-density is within

    tau = 10 sum_{k=1}^{t-1} exp(-2 pi^2 s^2 k / (k + 1))

of it an entry, s the width of a part in steps (Kairouz, Liu and Steinke, ICML 2021), which the ledger charges
(``ledger.renyi_epsilon``). Its own Renyi divergences are below those of the continuous Gaussian.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpop.errors import PrivacyError
from fedpop.privacy.secure import Policy, threshold

TAILS = 12.0
"""Standard deviations of all noise together that fit beside the largest sum: more have a chance of 1e-32."""
COARSE = 0.1
"""Of a bound, what rounding may add to it at most."""
LEAST_WIDTH = 2.0
"""Steps that a site's part of the noise is wide, at least."""
ROUNDED_LOSS = 1e-3
"""Of the budget, what the corrections for whole numbers may take."""

Bytes = Callable[[int], bytes]


@dataclass(frozen=True)
class PrivateRound:
    """What a site has to know of a private round beside its broadcast: numbers that depend on no data."""

    adaptive: bool = True
    """Units say, in a bit, whether their vectors were inside the bound."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Powers of two that are the grids of vectors, where sites add noise; else the server does."""
    widths: Mapping[str, float] = field(default_factory=dict)
    """The standard deviation of a site's part, in steps."""
    sharing: int = 0
    """The number of honest sites whose parts make up the noise that is promised."""
    seed: int | None = None
    """For tests: noise from it protects nobody."""

    def plain(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> PrivateRound:
        """What has travelled; noise of a seed that the server knows would be none, so it never does."""
        steps = {str(n): int(v) for n, v in plain["steps"].items()}
        widths = {str(n): float(v) for n, v in plain["widths"].items()}
        return cls(bool(plain["adaptive"]), steps, widths, int(plain["sharing"]))

    def noise(self, name: str, round: int, site: int, count: int) -> npt.NDArray[np.int64]:
        """A site's part of the noise on a vector of so many entries."""
        seed, calls = self.seed, [0]
        if seed is None:
            return discrete_gaussian(self.widths[name], count, os.urandom)

        def known(size: int) -> bytes:
            calls[0] += 1
            text = f"{seed}/{round}/{site}/{name}/{calls[0]}"
            return hashlib.shake_256(text.encode()).digest(size)

        return discrete_gaussian(self.widths[name], count, known)


def honest(sites: int) -> int:
    """Of so many sites that are asked, how many are heard and honest in any sum that can be opened."""
    colluders = Policy().colluders(sites)
    return threshold(sites, colluders) - colluders


def planned(
    multipliers: Mapping[str, float],
    bounds: Mapping[str, float],
    sizes: Mapping[str, int],
    units: int,
    sites: int,
    bits: int,
) -> tuple[dict[str, int], dict[str, float], float]:
    """Steps, widths and the correction tau d of a round in which so many sites sum so many units' vectors,
    each of a norm of its bound at most; raises where the grid would be too coarse."""
    sharing, steps, widths, correction = honest(sites), {}, {}, 0.0
    most = 2.0 ** (bits - 1) - 1 - sites
    for name, bound in bounds.items():
        size = sizes[name]
        power = math.ceil(math.log2(bound) - bits)
        while (
            units * bound + TAILS * _total(name, power, bound, size, multipliers, sites) > most * 2.0**power
        ):
            power += 1
        wide = bound + 2.0**power * math.sqrt(size)
        width = multipliers[name] * wide / math.sqrt(sharing) * 2.0**-power
        if wide > (1 + COARSE) * bound or width < LEAST_WIDTH:
            raise PrivacyError(
                f"{bits} bits leave {name} of {size} entries a grid that is too coarse: rounding adds "
                f"{wide / bound - 1:.2g} of its bound, and a site's part of the noise is {width:.2g} steps "
                f"wide, where {COARSE:g} and {LEAST_WIDTH:g} would do; use more bits (secure=True), more "
                "noise, or fewer numbers"
            )
        steps[name], widths[name] = power, width
        correction += size * tau(width, sharing)
    return steps, widths, correction


def _total(
    name: str, power: int, bound: float, size: int, multipliers: Mapping[str, float], sites: int
) -> float:
    """The standard deviation of all sites' noise together."""
    wide = bound + 2.0**power * math.sqrt(size)
    return multipliers[name] * wide * math.sqrt(sites / honest(sites))


def tau(width: float, count: int) -> float:
    """How far the log-density of a sum of so many discrete Gaussians is from that of one."""
    k = np.arange(1, count)
    return float(10 * np.exp(-2 * math.pi**2 * width**2 * k / (k + 1)).sum())


def discrete_gaussian(width: float, count: int, random: Bytes) -> npt.NDArray[np.int64]:
    """So many whole numbers x with probabilities proportional to exp(-x^2 / (2 width^2)): discrete Laplace
    numbers of scale t, kept with probability exp(-(|x| - width^2 / t)^2 / (2 width^2))."""
    scale, left, found = math.floor(width) + 1, count, list[npt.NDArray[np.int64]]()
    while left:
        tries = int(1.6 * left) + 32
        words = np.frombuffer(random(16 * tries), dtype="<u8").reshape(2, tries)
        first, second = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        size = np.floor(-scale * np.log(first)).astype(np.int64)
        negative = (words[1] & np.uint64(1)).astype(bool)
        keep = second < np.exp(-((size - width**2 / scale) ** 2) / (2 * width**2))
        keep &= ~(negative & (size == 0))  # zero once
        some = np.where(negative, -size, size)[keep][:left]
        found.append(some)
        left -= len(some)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
