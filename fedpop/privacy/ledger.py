"""What rounds have spent: epsilon at a delta, by privacy loss distributions (dp-accounting).

Two ledgers. Readers of theta do not know which units took part: a round is one Gaussian mechanism on a
Poisson sample of them. The server knows it: for it a unit's rounds are those that it took part in, without
amplification, and where it sees single messages there is no bound at all.

Where sites add discrete noise the ledger goes by Renyi divergences: those of a discrete Gaussian are below
those of the continuous one, at shifts by whole numbers, and so are those of mixtures of the two at whole
orders. Its ``correction`` is how far log-densities of noises that were added are from that, c in all: a
divergence of order a grows by c (2 a - 1) / (a - 1) at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp

from fedpop.errors import PrivacyError
from fedpop.extras import library

_WHAT = "differential privacy's ledgers"
RELATIVE_PRECISION = 1e-3
"""To which the noise that a budget asks for is found."""
ORDERS = np.array([*range(2, 65), *range(68, 257, 4), 512, 1024], dtype=np.float64)
"""Of Renyi divergences."""
LOSS_STEP = 1e-3
"""Of the grid that privacy losses are rounded up to: the ledger is an upper bound whatever it is."""
BY_LOSSES = 50.0
"""An epsilon from which on the bound by Renyi divergences will do: it promises nothing either way."""
LARGEST_NOISE = 1e4
"""A multiplier beyond which nothing is learned."""


@lru_cache(maxsize=4096)
def epsilon(sigma: float, share: float, rounds: int, delta: float) -> float:
    """What so many rounds spend, each a Gaussian mechanism on a sample to which each unit belongs with
    probability ``share``.

    >>> round(epsilon(1.0, 0.01, 1000, 1e-5), 2)
    1.83
    """
    bound = renyi_epsilon(sigma, share, rounds, delta)
    if not 0 < bound < BY_LOSSES:
        return bound
    accounting = library("dp_accounting", "privacy", _WHAT)
    accountant = library("dp_accounting.pld", "privacy", _WHAT).PLDAccountant(
        value_discretization_interval=LOSS_STEP
    )
    accountant.compose(_event(accounting, sigma, share), rounds)
    return float(accountant.get_epsilon(delta))


def renyi_epsilon(sigma: float, share: float, rounds: int, delta: float, correction: float = 0.0) -> float:
    """An upper bound of the same by Renyi divergences (Mironov et al., 2019), at no cost in every round.

    >>> renyi_epsilon(1.0, 0.01, 1000, 1e-5) > epsilon(1.0, 0.01, 1000, 1e-5)
    True
    """
    if rounds == 0:
        return 0.0
    accountant = library("dp_accounting.rdp.rdp_privacy_accountant", "privacy", _WHAT)
    more = correction * (2 * ORDERS - 1) / (ORDERS - 1)
    return float(accountant.compute_epsilon(ORDERS, rounds * _renyi(sigma, share) + more, delta)[0])


@lru_cache(maxsize=64)
def _renyi(sigma: float, share: float) -> npt.NDArray[np.float64]:
    """The divergence of one round, of each order: E_k of exp((k^2 - k) / 2 sigma^2), k binomial."""
    if share >= 1:
        return ORDERS / (2 * sigma**2)
    out = np.empty(len(ORDERS))
    for i, order in enumerate(ORDERS):
        k = np.arange(int(order) + 1)
        choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = choose + k * np.log(share) + (order - k) * np.log1p(-share) + (k**2 - k) / (2 * sigma**2)
        out[i] = logsumexp(terms) / (order - 1)
    return out


def _event(accounting: Any, sigma: float, share: float) -> Any:
    event = accounting.GaussianDpEvent(sigma)
    return event if share >= 1 else accounting.PoissonSampledDpEvent(share, event)


Ledger = Callable[[float, float, int, float], float]
"""epsilon of a multiplier, a share, rounds and delta."""


def affordable(
    budget: float, sigma: float, share: float, delta: float, most: int, by: Ledger | None = None
) -> int:
    """How many rounds, ``most`` at most, stay within the budget."""
    by = by or epsilon
    if by(sigma, share, most, delta) <= budget:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if by(sigma, share, middle, delta) <= budget:
            low = middle
        else:
            high = middle
    return low


@lru_cache(maxsize=256)
def noise_for(budget: float, share: float, rounds: int, delta: float, by: Ledger | None = None) -> float:
    """The least multiplier, to a thousandth, with which so many rounds stay within the budget."""
    by, low, high = by or epsilon, 0.05, 1.0
    while by(high, share, rounds, delta) > budget:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise PrivacyError(
                f"no noise makes {rounds} rounds spend as little as epsilon = {budget:g} at delta = {delta:g}"
            )
    while high / low > 1 + RELATIVE_PRECISION:
        middle = (low * high) ** 0.5
        if by(middle, share, rounds, delta) > budget:
            low = middle
        else:
            high = middle
    return high
