"""eta_0 by trial: the largest power of ten that does not lower the likelihood (``FedSOUL.paper``)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from fedpop.errors import EstimateError

RATE_TRIAL_ROUNDS = 20


def largest_rate(path_of: Callable[[float], list[float]], exact: bool) -> float:
    """The largest power of ten of whose trial rounds none lowers the likelihood, by more than a hundredth of
    what was gained or (where it is not ``exact``) by more than it fluctuates.

    Where steps of a few clients are so noisy that every rate lowers it now and then, an exact likelihood may
    fluctuate too, as long as something was gained. ``path_of(rate)`` gives the likelihood at the start and
    after each trial round.
    """
    paths = {}
    for exponent in range(1, -13, -1):
        paths[exponent] = path_of(10.0**exponent)
        if rises(paths[exponent], 0.0 if exact else fluctuation(paths[exponent])):
            return 10.0**exponent
    for exponent, path in paths.items():
        if path[-1] > path[0] and rises(path, fluctuation(path)):
            return 10.0**exponent
    raise EstimateError(
        "no step size from 10 down to 1e-12 kept the likelihood from falling over "
        f"{RATE_TRIAL_ROUNDS} trial rounds; give a rate, or more local_steps, which make steps less noisy"
    )


def fluctuation(path: list[float]) -> float:
    """Four times the median move of a round."""
    moves = sorted(abs(new - old) for old, new in pairwise(path))
    return 4 * moves[len(moves) // 2]


def rises(path: list[float], noise: float) -> bool:
    """Nothing is lost, in the end or in a round, but for so much noise and a hundredth of what is gained."""
    gained = path[-1] - path[0]
    tolerance = max(0.01 * gained, noise)
    return gained >= -noise and all(new >= old - tolerance for old, new in pairwise(path))
