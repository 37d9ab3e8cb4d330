"""Scoring steps where few take part in a round: theta += information^-1 score / k.

The information is everyone's, asked for once; the score of a round is that of those who take part,
weighted as participation weighs them. Steps of 1 / k average what rounds say: after K of them what is
left of the chance of who took part is sqrt((1 / p - 1) / K) standard errors of theta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.channel import Answer, Tensors
from fedpop.errors import EstimateError
from fedpop.evaluation.information import rows_of_jacobian
from fedpop.evaluation.verdict import Distance
from fedpop.federation.participation import Participation
from fedpop.keys import Key
from fedpop.mixed.gaussian import Profile, moments
from fedpop.mixed.gaussian_fit import GaussianEngine, information_root
from fedpop.mixed.glm_fit import QuadratureEngine
from fedpop.mixed.groups import Coordinates
from fedpop.mixed.point import Engine, Point
from fedpop.questions import Units

CLOSE = 0.035
"""Standard errors that are to be left of the chance of who took part."""
MOST = 5000
LOOK = 100
"""Rounds that tell which share takes part."""
LONGEST = 1.0
"""A step in standard errors, at most: one round may be of few who are odd."""


@dataclass(frozen=True)
class WholeProfile(Profile):
    """The profile of some groups with their own W'W and number of rows, made from their rows."""

    units: Coordinates
    name: ClassVar[str] = "profile of some"

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        zz, zw, ww = moments(units.cohort, self.units)
        local = {"zz": zz, "zw": zw}
        inner = super().answer(asked, Units(units.cohort, local, units.personal, units.split), key)
        rows = ww.new_tensor([float(units.cohort.examples)])
        return Answer(inner.good, sums=dict(inner.sums) | {"ww": ww.flatten(), "rows": rows})


def _gaussian(engine: GaussianEngine, x: Tensor, among: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Score in (b, theta, log sigma) of some; of everyone the information too."""
    criterion, size = engine.criterion, engine.factor.size
    p, m = len(x) - size - 1, len(engine.criterion.ww)
    theta, curved = x[p : p + size], among is None
    known = {"factor": engine.factor.matrix(theta), "curved": torch.tensor(curved)}
    q = len(engine.units.z_names)
    sums = engine.groups.ask(WholeProfile(engine.units), known, 24.0 * q * (m + q), 8.0 * (q * m) ** 2, among)
    near = criterion.taylor(theta, sums, sums["ww"].reshape(m, m))
    with torch.enable_grad():
        at = x.clone().requires_grad_()
        s, d = near.at(at[p : p + size] - theta)
        v = torch.cat((-at[:p], at.new_ones(1)))
        value = -0.5 * (2 * sums["rows"][0] * at[-1] + d + v @ s @ v * torch.exp(-2 * at[-1]))
        (score,) = torch.autograd.grad(value, at, create_graph=curved)
        information = -rows_of_jacobian(score, at) if curved else None
    return score.detach(), information


def _quadrature(engine: QuadratureEngine, x: Tensor, among: Tensor | None) -> tuple[Tensor, Tensor | None]:
    p = len(engine.units.x_names)
    known = {"b": x[:p], "factor": engine.factor.matrix(x[p:]), "curved": torch.tensor(among is None)}
    found = engine.groups.ask(engine.marginal, known, engine.marginal.per_row, 0.0, among)
    information = -found["hessian"].reshape(len(x), len(x)) if among is None else None
    return found["slope"], information


def scored(engine: Engine, point: Point, rule: Participation, key: Key) -> tuple[Point, int, Distance]:
    """The point after scoring steps with this participation, how many rounds they took, and everyone's
    verdict on it: what a Newton step would gain there."""
    roster, b = engine.groups.federation.roster, len(engine.groups.federation)
    shares = [len(rule.draw(roster, key.at(round=k, purpose="look")).ids) / b for k in range(LOOK)]
    share = max(sum(shares) / LOOK, 1 / b)
    rounds = min(math.ceil((1 / share - 1) / CLOSE**2), MOST)
    rows, cols = (torch.tensor(v) for v in zip(*engine.factor.places, strict=True))
    x = torch.cat((point.b, point.factor[rows, cols]))
    gaussian = isinstance(engine, GaussianEngine)
    if gaussian:
        x = torch.cat((x, x.new_tensor([math.log(point.sigma)])))

    def ask(x: Tensor, among: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if isinstance(engine, GaussianEngine):
            return _gaussian(engine, x, among)
        assert isinstance(engine, QuadratureEngine)
        return _quadrature(engine, x, among)

    information = ask(x, None)[1]
    assert information is not None
    root = information_root(information)
    for k in range(rounds):
        active = rule.draw(roster, key.at(round=k, purpose="scoring"))
        if not len(active.ids):
            continue
        weight = active.weights.double()
        if not bool((weight == weight[0]).all()):
            raise EstimateError("scoring steps need the same probability for everyone")
        scale = b / len(active.ids) if active.ratio else float(weight[0])
        step = root.mT @ (ask(x, active.ids)[0] * scale) / (k + 1)
        x = x + root @ step * min(1.0, LONGEST / max(float(step.norm()), 1e-12))
    score, information = ask(x, None)
    assert information is not None
    upwards = int((torch.linalg.eigvalsh(information) < 0).sum())
    nats = 0.5 * float((information_root(information).mT @ score).square().sum())
    p = len(point.b)
    theta = x[p : p + engine.factor.size]
    sigma = math.exp(float(x[-1])) if gaussian else 1.0
    return Point(x[:p], engine.factor.matrix(theta), sigma), rounds, Distance(nats, 0.0, upwards, exact=True)
