"""Where an engine ended."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpop.mixed.point import ThetaPoint
from fedpop.mixed.search import SearchResult
from fedpop.population import Population


@dataclass(frozen=True)
class Estimates:
    """The point, what is known about it, and what it took."""

    point: ThetaPoint
    found: SearchResult | None
    """The search, where there was one."""
    log_likelihood: float
    log_likelihood_method: str
    covariance: Tensor
    """Of fixed effects in internal coordinates."""
    converged: bool
    words: str
    rounds: int
    engine: str
    population: Population | None = None
