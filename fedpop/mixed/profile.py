"""Profile intervals: where the likelihood, maximised over all else, has fallen by what chi-square allows.

For a parameter h(x) of all parameters x, zeta(c) = sqrt(2 (l_max - l(c))), l(c) the maximum of l under
h(x) = c, is nearly linear in c, and an interval ends where |zeta| is the normal quantile. l(c) is found by
Newton's method with a Lagrange multiplier lambda, which is also its slope: d zeta / d c = -lambda / zeta
leads on to the end. Points go outward by no more than one unit of zeta, each from where the last one was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedpop.errors import EstimateError, SettingsError
from fedpop.mixed.engine import Engine
from fedpop.server.quasi_newton import rows_of_jacobian

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

MOST_PROFILE_POINTS = 40
"""Points on the way to an end, after which there is none."""
MOST_PROFILE_STEPS = 30
"""Newton steps to one of them."""
PROFILE_NATS = 1e-9
"""Nats that a step still promises where a point is found."""
ZETA_TOLERANCE = 1e-5
"""How near zeta comes to its quantile."""
EDGE_SHARE = 1e-3
"""The share of a standard deviation, or of what is left to a correlation of one, at which it is there."""
FIRST_ENTRY = 0.1
"""The factor's entry from which the way begins where a variance is zero."""
SADDLE_SHARE = 1e-9
"""The share of the largest curvature by which a direction has to bend upward."""

Measure = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Profiled:
    """A parameter: a function of all parameters, and what it may be."""

    measure: Measure
    low: float = -math.inf
    high: float = math.inf
    zero_at: int | None = None
    """Where it is a standard deviation of zero, the entry of x that begins it."""


@dataclass(frozen=True)
class ProfilePoint:
    x: Tensor
    value: float
    multiplier: float


def measures(fit: MixedFit) -> dict[str, Profiled]:
    """All parameters, by the names that intervals have."""
    engine, units, names = fit.engine, fit.units, fit.design.random_names
    p, size, gaussian = len(fit.coefficients), engine.factor.size, fit.family.gaussian
    places, correlation = engine.factor.places, fit.correlation

    def covariance(x: Tensor) -> Tensor:
        root = units.random_map @ engine.factor.matrix(x[p : p + size])
        sigma: Tensor = root @ root.mT
        return sigma * torch.exp(2 * x[-1]) if gaussian else sigma

    def sd_of(i: int) -> Measure:
        return lambda x: covariance(x)[i, i].sqrt()

    def correlation_of(i: int, j: int) -> Measure:
        def measure(x: Tensor) -> Tensor:
            sigma = covariance(x)
            out: Tensor = sigma[i, j] / (sigma[i, i] * sigma[j, j]).sqrt()
            return out

        return measure

    out: dict[str, Profiled] = {}
    for k, (i, j) in enumerate(places):
        group = fit.factors[fit.design.factor_of[i]]
        if i == j:
            zero = p + k if fit.outcome.point.factor[i].abs().max() < EDGE_SHARE * FIRST_ENTRY else None
            out[f"sd_{names[i]}|{group}"] = Profiled(sd_of(i), 0.0, math.inf, zero)
        elif math.isfinite(float(correlation[i, j])):
            out[f"cor_{names[i]}.{names[j]}|{group}"] = Profiled(correlation_of(i, j), -1.0, 1.0)
    for name in ("sigma", "dispersion"):
        if getattr(fit, name) is not None:
            out[name] = Profiled(lambda x: x[-1].exp(), 0.0)
    to, shift = units.fixed_map, units.fixed_shift
    for i, name in enumerate(fit.coefficients):
        row, start = to[i], shift[i]
        out[name] = Profiled(lambda x, row=row, start=start: row @ x[:p] + start)  # type: ignore[misc]
    return out


def profile_intervals(fit: MixedFit, z: float) -> dict[str, tuple[float, float]]:
    """Ends of all of them."""
    if fit.method == "REML":
        raise SettingsError(
            "profiles are those of the likelihood, and this fit is by REML: take fit.update(method='ML', "
            "REML=False).confint(method='profile'), which is what R does"
        )
    engine, x = fit.engine, fit.engine.vector(fit.outcome.point)
    best = engine.log_likelihood(fit.outcome.point)
    out = {}
    for name, parameter in measures(fit).items():
        out[name] = (_end(engine, parameter, x, best, z, -1), _end(engine, parameter, x, best, z, 1))
    return out


def _end(engine: Engine, parameter: Profiled, x: Tensor, best: float, z: float, way: int) -> float:
    """Where an interval ends; its bound where the likelihood does not fall so far on the way there, NaN where
    no end was found."""
    if parameter.zero_at is not None:
        if way < 0:
            return 0.0
        x = x.clone()
        x[parameter.zero_at] = FIRST_ENTRY
        c = float(parameter.measure(x))
        zeta, slope = 0.0, math.nan
    else:
        h, a, _ = _curved(parameter.measure, x)
        information = engine.score_and_information(x)[1]
        slope = math.sqrt(max(float(a @ torch.linalg.lstsq(information, a.unsqueeze(1)).solution[:, 0]), 0.0))
        zeta, c = 0.0, h
    bound = parameter.low if way < 0 else parameter.high
    size = abs(c) if parameter.low == 0 else 1.0
    for _ in range(MOST_PROFILE_POINTS):
        if math.isfinite(slope):
            to = c + way * (min(z, zeta + 1) - zeta) * slope
            beyond = math.isfinite(bound) and way * (to - bound) >= 0
            if beyond and abs(bound - c) < EDGE_SHARE * size:
                return bound
            c = 0.5 * (c + bound) if beyond else to
        try:
            at = _constrained(engine, parameter.measure, x, c)
        except EstimateError:
            return math.nan
        if at is None:
            return math.nan
        x, zeta = at.x, math.sqrt(max(2 * (best - at.value), 0.0))
        if abs(zeta - z) < ZETA_TOLERANCE:
            return c
        slope = zeta / abs(at.multiplier) if at.multiplier else math.nan
        if not math.isfinite(slope):
            return math.nan
    return math.nan


def _curved(measure: Measure, x: Tensor) -> tuple[float, Tensor, Tensor]:
    with torch.enable_grad():
        at = x.clone().requires_grad_()
        value = measure(at)
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
        flat = not slope.requires_grad
        bend = torch.zeros((len(x), len(x)), dtype=x.dtype) if flat else rows_of_jacobian(slope, at)
    return float(value.detach()), slope.detach(), bend.detach()


def _constrained(engine: Engine, measure: Measure, x: Tensor, c: float) -> ProfilePoint | None:
    """The maximum under h(x) = c, from x on."""
    multiplier, n = 0.0, len(x)
    for _ in range(MOST_PROFILE_STEPS):
        score, information = engine.score_and_information(x)
        h, a, bend = _curved(measure, x)
        whole = torch.zeros((n + 1, n + 1), dtype=x.dtype)
        whole[:n, :n] = information + multiplier * bend
        whole[:n, n], whole[n, :n] = a, a
        right = torch.cat((score, score.new_tensor([c - h])))
        step, info = torch.linalg.solve_ex(whole, right)
        if int(info) or not bool(torch.isfinite(step).all()):
            return None
        multiplier, move = float(step[n]), step[:n]
        x = x + move
        left = score - multiplier * a
        if 0.5 * abs(float(left @ move)) < PROFILE_NATS and abs(c - h) <= 1e-9 * (abs(c) + abs(h)):
            away = _away(information + multiplier * bend, a)
            if away is not None:
                x = x + FIRST_ENTRY * away
                continue
            return ProfilePoint(x, engine.log_likelihood(engine.point(x)), multiplier)
    return None


def _away(information: Tensor, a: Tensor) -> Tensor | None:
    """A direction along the constraint in which the likelihood bends upward, as that of a variance at zero
    may once something else has moved; None at a maximum."""
    tangent = torch.linalg.qr(torch.cat((a.unsqueeze(1), torch.eye(len(a), dtype=a.dtype)), dim=1))[0][:, 1:]
    values, vectors = torch.linalg.eigh(tangent.mT @ information @ tangent)
    if not len(values) or float(values[0]) >= -SADDLE_SHARE * float(values.abs().max()):
        return None
    found: Tensor = tangent @ vectors[:, 0]
    return found / found.abs().max()
