"""eta_0 by trial: the largest power of ten that does not lower the likelihood (``FedSOUL.paper``)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from fedpop.errors import EstimateError

ROUNDS = 20


def largest_rate(path_of: Callable[[float], list[float]], exact: bool) -> float:
    """The largest power of ten of whose trial rounds none lowers the likelihood, by more than a hundredth of
    what was gained or (where it is not ``exact``) by more than it fluctuates.

    ``path_of(rate)`` gives the likelihood at the start and after each trial round.
    """
    for exponent in range(1, -13, -1):
        path = path_of(10.0**exponent)
        moves = sorted(abs(new - old) for old, new in pairwise(path))
        noise = 0.0 if exact else 4 * moves[len(moves) // 2]
        gained = path[-1] - path[0]
        tolerance = max(0.01 * gained, noise)
        if gained >= -noise and all(new >= old - tolerance for old, new in pairwise(path)):
            return 10.0**exponent
    raise EstimateError(
        f"no step size from 10 down to 1e-12 kept the likelihood from falling over {ROUNDS} trial rounds"
    )
