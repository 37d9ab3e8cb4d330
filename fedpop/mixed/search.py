"""The exact engine in lme4's coordinates: one question to everyone for each evaluation, over when nothing is
to be gained.

It is the search of FedSOUL's exact engine (``methods.marginal_ml``): the same objective and the same
quasi-Newton method, which is told value and gradient, twice or so the Hessian, and ends by the same rule in
nats. Three things are other than there, and are why a mixed model does not go through that engine itself. A
prior's factor has logarithms on its diagonal there, so that a variance of zero lies at infinity; entries
are free here, and a singular covariance is a point like others. Fixed effects and the residual's variance
are profiled out, which leaves q (q + 1) / 2 parameters, on moments of groups that are made once: a round
costs q^3 a group, whatever its rows. And families without closed forms have their integrals by quadrature.
``tests/mixed/test_engines.py`` holds the two to the same optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.server.quasi_newton import SearchState, tell

TOLERANCE = 1e-7
"""Nats that a Newton step still promises where the search is over; as in the exact engine."""
MOST = 500
"""Evaluations after which it is given up."""

POLISH = 3
EXACT = 1e-14

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
    tolerance: float = TOLERANCE,
    most: int = MOST,
    watch: Callable[[Tensor, Tensor], None] | None = None,
) -> SearchResult:
    """The minimum of minus a log-likelihood; ``at(x, curved)`` gives value, gradient and, where asked
    for, the Hessian; it is over where a Newton step promises less than ``tolerance``. ``watch`` sees each
    point that the search has come to, with the gradient there, and may raise."""
    state, trace = SearchState.at(start), list[float]()
    hessian = torch.zeros((len(start), len(start)), dtype=start.dtype)
    while not state.over and len(trace) < most:
        value, slope, curvature = at(state.trial, state.wants_curvature)
        trace.append(value)
        if curvature is not None:
            hessian = curvature
        unit = state.trial.abs().clamp(min=1.0)
        state = tell(state, value, slope, curvature, unit, tolerance)
        if watch is not None:
            watch(state.x, state.g)
    x, value, gain = state.x, state.f, state.gain
    if state.converged:
        x, value, hessian, gain = _polished(at, x, value, hessian, gain, trace)
    return SearchResult(
        x, value, hessian, gain, state.converged, _words(state, gain, len(trace)), tuple(trace)
    )


def _polished(
    at: Callable[[Tensor, bool], Evaluation],
    x: Tensor,
    value: float,
    hessian: Tensor,
    gain: float,
    trace: list[float],
) -> tuple[Tensor, float, Tensor, float]:
    """Newton's last steps: a variance that belongs at zero is then there, not a thousandth beside it."""
    slope = at(x, False)[1]
    for _ in range(POLISH):
        step, info = torch.linalg.solve_ex(hessian, slope)
        promised = 0.5 * float(slope @ step)
        if int(info) or not 0 < promised < TOLERANCE:
            break
        moved = at(x - step, True)
        trace.append(moved[0])
        if moved[2] is None or not moved[0] <= value + 1e-12 * abs(value):
            break
        x, value, slope, hessian, gain = x - step, moved[0], moved[1], moved[2], promised
        if promised < EXACT:
            break
    return x, value, hessian, gain


def _words(state: SearchState, gain: float, evaluations: int) -> str:
    if state.converged:
        return f"converged: a Newton step promised {gain:.1g} nats at the end"
    if state.over:
        return (
            "not converged: no step from here raises the likelihood, though a Newton step promises "
            f"{gain:.2g} nats"
        )
    return f"not converged: after {evaluations} evaluations a Newton step still promises {gain:.2g} nats"
