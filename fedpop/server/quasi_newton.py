"""A quasi-Newton method that asks for one evaluation at a time, with all of its state in the open.

BFGS with a line search for the strong Wolfe conditions (Nocedal and Wright, algorithms 3.5, 3.6 and 6.1).
Whoever drives it evaluates F and its gradient at ``SearchState.trial`` and tells: a round is an evaluation,
and a run that is killed between two goes on to the same bits. At the start, and wherever BFGS believes to
be at a minimum, it asks for the Hessian as well (``SearchState.wants_curvature``): the first step is then in
units of the information, and a minimum is only called one by the true curvature there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedpop.message import Tensors

ARMIJO, WOLFE = 1e-4, 0.9
LONGEST_FIRST_TRIAL = 5.0
"""The first trial of a search moves no coordinate by more than so many of its units."""
MOST_EVALUATIONS = 20
"""Evaluations of one search."""
GAUGE_CURVATURE = 1e-9
"""Curvatures below this share of the largest one count as this: a gauge direction has none."""
SADDLE_CURVATURE = -1e-3
"""The curvature, in natural units, below which a stationary point is no minimum: 5e-4 for a step of one."""
ROWS_ONE_BY_ONE, HESSIAN_ROWS_AT_ONCE = 16, 64
"""Rows of a Hessian that are made without ``vmap``, and at once, where there are more: each holds a model's
graph."""
CURVATURE, BRACKET, ZOOM, CONVERGED, STALLED, VALUE = range(6)


@dataclass(frozen=True)
class Point:
    """F and its slope at a step of the search."""

    t: float = 0.0
    f: float = math.inf
    slope: float = 0.0


@dataclass(frozen=True)
class SearchState:
    """x with F and gradient g there (the best so far), the inverse Hessian, and a search along a direction.

    ``gain`` is what a Newton step promises at x: half of g' inverse g.
    """

    trial: Tensor
    x: Tensor
    g: Tensor
    direction: Tensor
    inverse: Tensor
    low_g: Tensor
    f: float = math.inf
    slope: float = 0.0
    t: float = 0.0
    low: Point = Point()
    high: Point = Point()
    phase: int = CURVATURE
    tries: int = 0
    iterations: int = 0
    since: int = 0
    """Steps since the curvature was last asked for."""
    gain: float = math.inf

    @classmethod
    def at(cls, x: Tensor) -> SearchState:
        """Before the first evaluation."""
        zero = torch.zeros_like(x)
        return cls(x, x, zero, zero, torch.zeros((len(x), len(x)), dtype=x.dtype, device=x.device), zero)

    @property
    def wants_curvature(self) -> bool:
        return self.phase == CURVATURE

    @property
    def converged(self) -> bool:
        return self.phase == CONVERGED

    @property
    def over(self) -> bool:
        """Nothing more will come of it: at a minimum, or at a point that no search could leave."""
        return self.phase in (CONVERGED, STALLED)

    def moved(self, x: Tensor, trial: Tensor) -> SearchState:
        """The same with x and the trial put inside bounds."""
        return replace(self, x=x, trial=trial)

    def tensors(self) -> Tensors:
        """Everything as tensors, for a checkpoint."""
        out = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Point):
                value = self.x.new_tensor([value.t, value.f, value.slope])
            out[field.name] = value if isinstance(value, Tensor) else self.x.new_tensor(float(value))
        return out

    @classmethod
    def of(cls, tensors: Tensors) -> SearchState:
        made: dict[str, object] = {}
        for field in fields(cls):
            value = tensors[field.name]
            if field.type == "Point":
                made[field.name] = Point(*value.tolist())
            elif field.type == "Tensor":
                made[field.name] = value
            else:
                made[field.name] = int(value) if field.type == "int" else float(value)
        return cls(**made)  # type: ignore[arg-type]


def tell(
    state: SearchState, f: float, g: Tensor, curvature: Tensor | None, unit: Tensor, tolerance: float
) -> SearchState:
    """The state after F was found to be f with gradient g (and this Hessian, where it was asked for) at
    ``state.trial``; ``unit`` is the natural size of each coordinate. F not finite: outside its domain."""
    if state.over:
        return state
    if state.phase == CURVATURE:
        if curvature is None or not (math.isfinite(f) and bool(torch.isfinite(curvature).all())):
            return replace(state, phase=STALLED)
        return _measured(replace(state, f=f, g=g), curvature, unit, tolerance)
    if state.phase == VALUE:
        state = replace(state, f=f, g=g, gain=0.5 * float(g @ state.inverse @ g), since=1)
        return _along(state, -(state.inverse @ g), unit) if math.isfinite(f) else _given_up(state)
    slope = float(g @ state.direction) if math.isfinite(f) else math.nan
    return _searched(
        state, Point(state.t, f if math.isfinite(slope) else math.inf, slope), g, unit, tolerance
    )


def begun_again(state: SearchState, curved: bool) -> SearchState:
    """The same point of another F: value and curvature are to be asked for first, or the value alone, where
    the curvature that is known will do."""
    phase = CURVATURE if curved else VALUE
    return replace(state, trial=state.x, phase=phase, f=math.inf, gain=math.inf, tries=0)


# --- directions ------------------------------------------------------------------------------


def _measured(state: SearchState, curvature: Tensor, unit: Tensor, tolerance: float) -> SearchState:
    """At x the curvature is known: a minimum, or a direction by absolute curvatures, which leave saddles."""
    scaled = unit.unsqueeze(1) * curvature * unit
    values, vectors = torch.linalg.eigh(0.5 * (scaled + scaled.mT))
    least = max(GAUGE_CURVATURE * float(values.abs().max()), torch.finfo(values.dtype).tiny)
    basis = unit.unsqueeze(1) * vectors
    inverse = basis / values.abs().clamp(min=least) @ basis.mT
    gain = 0.5 * float(state.g @ inverse @ state.g)
    state = replace(state, inverse=inverse, gain=gain, since=0)
    if gain >= tolerance:
        return _along(state, -(inverse @ state.g), unit)
    if float(values[0]) >= SADDLE_CURVATURE:
        return replace(state, phase=CONVERGED, trial=state.x)
    away = basis[:, 0]
    return _along(state, -away if float(state.g @ away) > 0 else away, unit)


def _along(state: SearchState, direction: Tensor, unit: Tensor) -> SearchState:
    """A new search from x."""
    slope = float(state.g @ direction)
    reach = float((direction / unit).abs().max())
    if not slope <= 0 or not 0 < reach < math.inf:
        return _given_up(state)
    t = min(1.0, LONGEST_FIRST_TRIAL / reach)
    return replace(
        state,
        direction=direction,
        slope=slope,
        t=t,
        trial=state.x + t * direction,
        low=Point(0.0, state.f, slope),
        low_g=state.g,
        high=Point(),
        phase=BRACKET,
        tries=0,
    )


def _given_up(state: SearchState) -> SearchState:
    """No step from here: by the true curvature perhaps, unless that was just tried."""
    if state.since == 0:
        return replace(state, phase=STALLED, trial=state.x)
    return replace(state, phase=CURVATURE, trial=state.x)


# --- the search ------------------------------------------------------------------------------


def _searched(state: SearchState, at: Point, g: Tensor, unit: Tensor, tolerance: float) -> SearchState:
    rounding = 1e-13 * max(abs(state.f), 1.0)
    state = replace(state, tries=state.tries + 1)
    low = state.low
    too_high = at.f > state.f + ARMIJO * at.t * state.slope + rounding
    if too_high or (at.f > low.f and low.t > 0):
        return _between(replace(state, high=at, phase=ZOOM), unit, tolerance)
    if abs(at.slope) <= WOLFE * abs(state.slope):
        return _accepted(state, at, g, unit, tolerance)
    if state.phase == BRACKET and at.slope < 0:  # still going down: further out
        t = at.t * 2.5
        if state.tries >= MOST_EVALUATIONS:
            return _accepted(state, at, g, unit, tolerance)
        return replace(state, low=at, low_g=g, t=t, trial=state.x + t * state.direction)
    away = state.high.t - low.t if state.phase == ZOOM else at.t - low.t
    high = low if at.slope * away >= 0 else state.high
    return _between(replace(state, low=at, low_g=g, high=high, phase=ZOOM), unit, tolerance)


def _between(state: SearchState, unit: Tensor, tolerance: float) -> SearchState:
    """The next trial between the ends of the bracket, or the better end when it has become small."""
    low, high = state.low, state.high
    width = high.t - low.t
    if state.tries >= MOST_EVALUATIONS or abs(width) <= 1e-12 * max(abs(low.t), abs(high.t)):
        if low.t > 0 and low.f < state.f:
            return _accepted(state, low, state.low_g, unit, tolerance)
        return _given_up(state)
    t = _cubic(low, high)
    near, far = sorted((low.t + 0.1 * width, high.t - 0.1 * width))
    t = min(max(t, near), far) if math.isfinite(t) else low.t + 0.25 * width
    return replace(state, t=t, trial=state.x + t * state.direction)


def _cubic(a: Point, b: Point) -> float:
    """Where the cubic through both ends, with their slopes, is least; NaN where it is not."""
    if not (math.isfinite(b.f) and math.isfinite(b.slope)):
        return math.nan
    d1 = a.slope + b.slope - 3 * (a.f - b.f) / (a.t - b.t)
    inside = d1 * d1 - a.slope * b.slope
    if inside < 0:
        return math.nan
    d2 = math.copysign(math.sqrt(inside), b.t - a.t)
    down = b.slope - a.slope + 2 * d2
    return math.nan if down == 0 else b.t - (b.t - a.t) * (b.slope + d2 - d1) / down


def _accepted(state: SearchState, at: Point, g: Tensor, unit: Tensor, tolerance: float) -> SearchState:
    """x moves; the inverse Hessian learns from how the gradient changed."""
    s = at.t * state.direction
    y, inverse = g - state.g, state.inverse
    product = float(s @ y)
    if product > 1e-12 * float(s.norm() * y.norm()):
        hy = inverse @ y
        outer = torch.outer(hy, s)
        inverse = (
            inverse
            + (1 + float(y @ hy) / product) / product * torch.outer(s, s)
            - (outer + outer.mT) / product
        )
    gain = 0.5 * float(g @ inverse @ g)
    x = state.x + s
    state = replace(
        state,
        x=x,
        f=at.f,
        g=g,
        inverse=inverse,
        gain=gain,
        iterations=state.iterations + 1,
        since=state.since + 1,
    )
    if gain < tolerance:
        return replace(state, phase=CURVATURE, trial=x)
    return _along(state, -(inverse @ g), unit)


def rows_of_jacobian(values: Tensor, at: Tensor, batched: bool = True) -> Tensor:
    """d values / d at, ``[q, p]``, from a graph that is there.

    A few rows are made one by one: what batches them takes half a second to import.
    """
    if len(values) <= ROWS_ONE_BY_ONE or not batched:
        return torch.stack([torch.autograd.grad(v, at, retain_graph=True)[0] for v in values])
    units = torch.eye(len(values), dtype=values.dtype, device=values.device)
    try:
        parts = [
            torch.autograd.grad(values, at, part, retain_graph=True, is_grads_batched=True)[0]
            for part in units.split(HESSIAN_ROWS_AT_ONCE)
        ]
    except RuntimeError:  # of a layer that is not batched twice
        return rows_of_jacobian(values, at, batched=False)
    return torch.cat(parts)
