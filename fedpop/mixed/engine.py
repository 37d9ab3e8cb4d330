"""An engine: what is asked of everyone about points of a mixed model's parameters, and the search.

It is the search of FedSOUL's exact engine (``methods.marginal_ml``): the same objective and the same
quasi-Newton method, which is given value and gradient, twice or so the Hessian, and ends by the same rule in
nats. Three things are other than there, and are why a mixed model does not go through that engine itself. A
prior's factor has logarithms on its diagonal there, so that a variance of zero lies at infinity; entries
are free here, and a singular covariance is a point like others. Fixed effects and the residual's variance
are profiled out, which leaves q (q + 1) / 2 parameters, on moments of groups that are made once: a round
costs q^3 a group, whatever its rows. And families without closed forms have their integrals by quadrature.
``tests/mixed/test_engines.py`` holds the two to the same optimum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.mixed.design import Coordinates
from fedpop.mixed.groups import Groups
from fedpop.mixed.nesting import Paths
from fedpop.population import Population
from fedpop.server.quasi_newton import SearchState, begun_again, tell

SINGULAR_FACTOR = 1e-4
"""An entry on the diagonal of the relative factor below which a covariance counts as singular, as in
lme4."""


@dataclass(frozen=True)
class Factor:
    """Lambda ``[q, q]``, Sigma = Lambda Lambda'; theta holds its entries inside blocks, row by row."""

    blocks: tuple[int, ...]

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        q = len(self.blocks)
        return [(i, j) for i in range(q) for j in range(i + 1) if self.blocks[i] == self.blocks[j]]

    @property
    def size(self) -> int:
        return len(self.places)

    def start(self, value: float) -> Tensor:
        """theta of a multiple of the identity."""
        return torch.tensor([value if i == j else 0.0 for i, j in self.places], dtype=torch.float64)

    def matrix(self, theta: Tensor) -> Tensor:
        q = len(self.blocks)
        rows, cols = (torch.tensor(v) for v in zip(*self.places, strict=True))
        return theta.new_zeros((q, q)).index_put((rows, cols), theta)

    def entries(self, matrix: Tensor) -> Tensor:
        """theta of a factor."""
        rows, cols = (torch.tensor(v) for v in zip(*self.places, strict=True))
        return matrix[rows, cols]

    @cached_property
    def basis(self) -> Tensor:
        """d Sigma by each entry of Sigma, ``[k, q, q]``, in the same order."""
        half = torch.stack([self.matrix(row) for row in torch.eye(self.size, dtype=torch.float64)])
        out: Tensor = torch.maximum(half, half.mT)
        return out


def canonical(sigma: Tensor, blocks: Sequence[int]) -> Tensor:
    """A lower-triangular factor of a covariance that may be singular, with a diagonal that is not
    negative."""
    root = torch.zeros_like(sigma)
    scale = sigma.diagonal().clamp(min=0)
    for j in range(len(sigma)):
        left = sigma[j, j] - root[j, :j].square().sum()
        if float(left) <= 1e-14 * float(scale[j]):
            continue
        root[j, j] = left.sqrt()
        root[j + 1 :, j] = (sigma[j + 1 :, j] - root[j + 1 :, :j] @ root[j, :j]) / root[j, j]
    return root


# --- points ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThetaPoint:
    """Fixed effects ``[p]``, the factor of the random effects' covariance in units of sigma ``[q, q]``,
    and sigma (1 where a family has none)."""

    b: Tensor
    factor: Tensor
    sigma: float = 1.0
    dispersion: float = 1.0
    """Of families that have one."""

    def sigma_matrix(self, units: Coordinates) -> Tensor:
        """The random effects' covariance on the user's scale."""
        root = units.random_map @ self.factor * self.sigma
        return root @ root.mT


class Engine(ABC):
    """What is asked of everyone about points: searches, likelihoods, posteriors."""

    groups: Groups
    units: Coordinates
    method: ClassVar[str]

    @property
    @abstractmethod
    def factor(self) -> Factor: ...

    @abstractmethod
    def search(self) -> tuple[SearchResult, ThetaPoint]:
        """The maximum."""

    @abstractmethod
    def log_likelihood(self, point: ThetaPoint) -> float:
        """At any point."""

    @abstractmethod
    def covariance(self, point: ThetaPoint) -> Tensor:
        """Of fixed effects, ``[p, p]``."""

    @abstractmethod
    def vector(self, point: ThetaPoint) -> Tensor:
        """All parameters in one vector: b, the factor's entries and, where there is one, log sigma or that of
        the dispersion."""

    @abstractmethod
    def point(self, x: Tensor) -> ThetaPoint:
        """The way back."""

    @abstractmethod
    def score(self, x: Tensor, among: Tensor) -> Tensor:
        """The log-likelihood's gradient in that vector, of the groups at these positions."""

    @abstractmethod
    def score_and_information(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Everyone's gradient, and minus its Hessian."""

    @abstractmethod
    def spread(self, point: ThetaPoint) -> Tensor:
        """The covariance of the estimates of the factor's entries and, where there is one, of log sigma or of
        the logarithm of the dispersion."""

    @abstractmethod
    def effects(self, point: ThetaPoint) -> None:
        """Sites find and keep ``mean`` and ``cov`` of their units' effects."""

    @abstractmethod
    def paths(self, cohort: Cohort, point: ThetaPoint) -> Paths:
        """Of groups at each level mean and covariance of their effects and of those around them, from units'
        rows (of gaussian models, from their cells)."""

    @abstractmethod
    def theta_draws(self, point: ThetaPoint, noise: Tensor, wide: Tensor, count: int) -> list[ThetaPoint]:
        """So many points of the law of theta given the data, whose estimate is ``point``, from standard
        normal numbers ``[K, k + p]`` and ``[K]``."""

    @property
    def level(self) -> float:
        """The linear predictor of the mean response, where estimates are counted from it; else 0."""
        return 0.0

    @property
    def words(self) -> str:
        """How the log-likelihood is computed."""
        return self.method


def information_root(hessian: Tensor) -> Tensor:
    """A root of the inverse information; directions without any (a variance at zero) do not move."""
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    good = values > 1e-8 * values.abs().max()
    out: Tensor = vectors * torch.where(good, values.clamp(min=1e-300).rsqrt(), 0.0)
    return out


# --- the search ------------------------------------------------------------------------------------


FIT_NATS = 1e-7
"""Nats that a Newton step still promises where the search is over; as in the exact engine."""
MOST_FIT_EVALUATIONS = 500
"""Evaluations after which it is given up."""

LARGEST_NEWTON = 12
"""Parameters up to which every evaluation has the Hessian with it: fewer rounds, each with more numbers."""

POLISHING_STEPS = 3
POLISHED_NATS = 1e-18

Evaluation = tuple[float, Tensor, Tensor | None]


@dataclass(frozen=True)
class SearchResult:
    """Where the search ended, and why."""

    x: Tensor
    value: float
    hessian: Tensor
    promised: float
    """What a Newton step would still gain, in nats."""
    converged: bool
    words: str
    trace: tuple[float, ...]
    """The objective at each evaluation."""


def minimised(
    at: Callable[[Tensor, bool], Evaluation],
    start: Tensor,
    tolerance: float = FIT_NATS,
    most: int = MOST_FIT_EVALUATIONS,
    watch: Callable[[Tensor, Tensor], None] | None = None,
    polish: bool = True,
) -> SearchResult:
    """The minimum of minus a log-likelihood; ``at(x, curved)`` gives value, gradient and, where asked
    for, the Hessian; it is over where a Newton step promises less than ``tolerance``, and its last steps are
    ``polished``. ``watch`` sees each point that the search has come to, with the gradient there, and may
    raise."""
    state, trace = SearchState.at(start), list[float]()
    hessian = torch.zeros((len(start), len(start)), dtype=start.dtype)
    newton = len(start) <= LARGEST_NEWTON
    while not state.over and len(trace) < most:
        trial = state.trial
        value, slope, curvature = at(trial, newton or state.wants_curvature)
        trace.append(value)
        unit, measured = trial.abs().clamp(min=1.0), state.wants_curvature
        state = tell(state, value, slope, curvature, unit, tolerance)
        if curvature is not None and torch.equal(state.x, trial):
            hessian = curvature
            if not measured and not state.over:  # Newton's next step, in place of a quasi-Newton one
                state = tell(begun_again(state, True), value, slope, curvature, unit, tolerance)
        if watch is not None:
            watch(state.x, state.g)
    words = _words(state, state.gain, len(trace))
    found = SearchResult(state.x, state.f, hessian, state.gain, state.converged, words, tuple(trace))
    return polished(at, found, state.g) if polish else found


def polished(
    at: Callable[[Tensor, bool], Evaluation], found: SearchResult, slope: Tensor | None = None
) -> SearchResult:
    """Newton's last steps from where a search has converged: a variance that belongs at zero is then there,
    not a thousandth beside it. ``slope`` is the gradient there, where it is known."""
    if not (found.converged and found.promised < FIT_NATS):
        return found
    x, value, hessian, gain, trace = found.x, found.value, found.hessian, found.promised, list(found.trace)
    slope = at(x, False)[1] if slope is None else slope
    for _ in range(POLISHING_STEPS):
        step, info = torch.linalg.solve_ex(hessian, slope)
        promised = 0.5 * float(slope @ step)
        if int(info) or not 0 < promised < FIT_NATS:
            break
        gain = promised
        if gain < POLISHED_NATS:
            break
        moved = at(x - step, True)
        trace.append(moved[0])
        if moved[2] is None or not moved[0] <= value + 1e-12 * abs(value):
            break
        x, value, slope, hessian = x - step, moved[0], moved[1], moved[2]
    return replace(
        found, x=x, value=value, hessian=hessian, promised=gain, words=_reached(gain), trace=tuple(trace)
    )


def _reached(gain: float) -> str:
    return f"converged: a Newton step promised {gain:.1g} nats at the end"


def _words(state: SearchState, gain: float, evaluations: int) -> str:
    if state.converged:
        return _reached(gain)
    if state.over:
        return (
            "not converged: no step from here raises the likelihood, though a Newton step promises "
            f"{gain:.2g} nats"
        )
    return f"not converged: after {evaluations} evaluations a Newton step still promises {gain:.2g} nats"


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
