"""Differential privacy of theta: what each unit adds is bounded, and Gaussian noise is added to sums.

A round's vectors are one event. With multipliers sigma_v (noise of standard deviation sigma_v C_v on a sum to
which one unit adds a vector of norm at most C_v) the joint multiplier is sigma = (sum_v sigma_v^-2)^-1/2, and
the round is one Gaussian mechanism of multiplier sigma on one Poisson sample of the units (``ledger``). The
bound of a gradient follows the norms (Andrew et al., NeurIPS 2021): each unit adds a bit, whether its norm
was inside, which is noised and part of the same event.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedpop.checked import Checked, Fraction, OneOf, Positive, Range
from fedpop.errors import FedpopWarning, PrivacyError, SettingsError, warn_user

AGAINST = ("readers", "server")
BITS_SHARE = 0.01
"""Of sigma^-2, what the bits of all adaptive bounds have together."""
PRIOR_SHARE = 0.3
"""Of the rest, what the scores I of the prior have where there are gradients beside them."""
BOUND_RATE = 0.3
"""How fast an adaptive bound moves, in its logarithm, for each share of units that are off the quantile."""
SCORE_BOUND = 1.5
"""The bound of a whitened score I, in roots of its size: under the prior its norm is about one of them."""
ROUNDED = 1 - 1e-6
"""Of a bound, what vectors are shortened to: rounding may not lift them above it."""


@dataclass(frozen=True)
class Gaussian(Checked):
    """(epsilon, delta)-differential privacy of what is learned, with respect to all data of one unit.

    Args:
        epsilon: What all rounds may spend together. Without ``noise`` the noise is what makes the given
            number of rounds spend this; with it a run ends before it would spend more.
        delta: The chance that epsilon does not hold, 1e-6 by default; below one over the number of units.
        noise: The joint multiplier sigma of a round; None takes what ``epsilon`` asks for.
        clip: Where the bound of a unit's gradient starts, 10 by default.
        quantile: The share of units whose gradient is to be inside the bound, which follows; 0.5 by default,
            None keeps the bound as it is.
        against: Whom ``epsilon`` is about: "readers" of theta (the default), who do not know which units took
            part, or the "server", which does, and must not see single messages: with secure sums.
        insecure_seed: For tests only: noise from this seed protects nobody who knows it.

    >>> Gaussian(epsilon=4).delta
    1e-06
    """

    epsilon: Positive | None = None
    delta: Annotated[float, Range(above=0, below=1)] = 1e-6
    noise: Positive | None = None
    clip: Positive = 10.0
    quantile: Fraction | None = 0.5
    against: Annotated[str, OneOf(*AGAINST)] = "readers"
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is None and self.noise is None:
            raise PrivacyError(
                "Gaussian needs epsilon, what may be spent, or noise, the multiplier of a round"
            )
        if self.insecure_seed is not None:
            warn_user("noise from insecure_seed protects nobody; it is for tests", FedpopWarning)

    def multipliers(self, sigma: float, vectors: tuple[str, ...]) -> dict[str, float]:
        """sigma_v of each vector, and of its bit under ``bit.NAME`` where its bound adapts."""
        adaptive = [] if self.quantile is None else [n for n in vectors if n != SCORE]
        shares = dict.fromkeys((f"{BIT}{n}" for n in adaptive), BITS_SHARE / max(1, len(adaptive)))
        rest, others = 1 - sum(shares.values()), [n for n in vectors if n != SCORE]
        if SCORE in vectors:
            shares[SCORE] = rest * PRIOR_SHARE if others else rest
            rest -= shares[SCORE]
        shares |= dict.fromkeys(others, rest / max(1, len(others)))
        return {name: sigma / math.sqrt(share) for name, share in shares.items()}


def gaussian_from(table: Mapping[str, Any], where: str, others: Sequence[str] = ()) -> Gaussian | None:
    """What a ``[privacy]`` table of a settings file asks for; None where it names none of these settings.

    >>> gaussian_from({"epsilon": 4, "secure": True}, "compare.toml", ("secure",)).epsilon
    4.0
    """
    known = tuple(f.name for f in fields(Gaussian) if f.name != "insecure_seed")
    for key in table:
        if key not in (*known, *others):
            raise SettingsError(
                f"{where}, [privacy]: unknown setting {key!r}; known are {', '.join((*known, *others))}"
            )
    given: dict[str, Any] = {k: float(v) if type(v) is int else v for k, v in table.items() if k in known}
    if given.get("quantile") is False:
        given["quantile"] = None
    try:
        return Gaussian(**given) if given else None
    except SettingsError as error:
        raise type(error)(f"{where}, [privacy]: {error}") from error


SCORE, BIT = "I", "bit."
"""The score of the prior, which is whitened and has a fixed bound; before the names of bits."""
CLIP = "private.clip."
"""Before the names of bounds, in a broadcast."""


def bounded(v: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Rows ``[C, D]`` none of which is longer than the bound, and which ones were inside."""
    norm = torch.linalg.vector_norm(v, dim=1, keepdim=True, dtype=torch.float64)
    inside = norm <= bound
    shorter = (v.double() * (bound * ROUNDED / norm.clamp(min=bound))).to(v.dtype)
    return torch.where(inside, v, shorter), inside.squeeze(1)


def bound_of(name: str, size: int, broadcast: Mapping[str, Tensor]) -> float:
    """C of a vector of so many entries."""
    return SCORE_BOUND * math.sqrt(size) if name == SCORE else float(broadcast[CLIP + name])


# --- noise -----------------------------------------------------------------------------------

Normal = Callable[[int], Tensor]
"""So many standard normal numbers, in float64."""


def system_noise(count: int) -> Tensor:
    """Standard normal numbers from the operating system's generator, by Box-Muller."""
    pairs = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * pairs), dtype="<u8").reshape(2, pairs) >> np.uint64(11)
    unit = (words.astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(unit[0])), 2 * math.pi * unit[1]
    both = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return torch.from_numpy(both.reshape(-1)[:count].copy())
