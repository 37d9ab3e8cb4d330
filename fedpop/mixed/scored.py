"""The scoring engine: where rounds close on a quorum of sites, not on everyone.

Everyone answers with score and information where a stage begins; in its rounds those who are there answer
with what their sums are at theta and at the stage's first theta, and theta moves by what the difference of
the two says of everyone's score (``server.scoring``). It is over where a Newton step, by everyone's sums,
promises less than ``SCORED_NATS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.evaluation.convergence import Landing, landing
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.design import Coordinates
from fedpop.mixed.engine import Engine, Estimates, SearchResult, information_root
from fedpop.mixed.gaussian import GaussianEngine, Profile
from fedpop.mixed.groups import Groups
from fedpop.mixed.laplace import Laplace, LaplaceEngine
from fedpop.mixed.quadrature import Marginal, QuadratureEngine, nodes_for
from fedpop.mixed.sampled import SCORED_NATS, SCORING_STAGES
from fedpop.questions import Question, Units
from fedpop.server import scoring

STAGE_START = "start "
"""Before the names of sums at the stage's first theta."""


class _Change(Question[Tensors]):
    """A question about two points, to be put before the one that it is about."""

    quorum: ClassVar[float] = 0.0
    closes: ClassVar[bool] = True

    def ask(self, known: Tensors) -> Tensors:
        return {**super().ask(known), **_named(super().ask(_start(known)))}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        now, then = super().answer(asked, units, key), super().answer(_start(asked), units, key)  # type: ignore[safe-super]
        return Answer(now.good & then.good, sums={**now.sums, **_named(then.sums)})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {**total.plain, "heard": torch.tensor(total.count)}


def _named(tensors: Tensors) -> Tensors:
    return {f"{STAGE_START}{name}": value for name, value in tensors.items()}


def _start(tensors: Tensors) -> Tensors:
    return {n.removeprefix(STAGE_START): v for n, v in tensors.items() if n.startswith(STAGE_START)}


@dataclass(frozen=True)
class ProfileChange(_Change, Profile):
    """The sums of a gaussian model at two points, of those who are there."""

    name: ClassVar[str] = "profile at two points"


@dataclass(frozen=True)
class MarginalChange(_Change, Marginal):
    """Value and slope by quadrature at two points, of those who are there."""

    name: ClassVar[str] = "marginal likelihood at two points, by quadrature"


@dataclass(frozen=True)
class LaplaceChange(_Change, Laplace):
    """The same by Laplace's approximation."""

    name: ClassVar[str] = "marginal likelihood at two points, by Laplace's approximation"


@dataclass(frozen=True)
class Partial:
    """An engine's score from the answers of those who are there."""

    engine: GaussianEngine | QuadratureEngine

    @property
    def change(self) -> Question[Tensors]:
        """What they are asked."""
        if isinstance(self.engine, GaussianEngine):
            return ProfileChange(self.engine.units)
        kind = LaplaceChange if isinstance(self.engine, LaplaceEngine) else MarginalChange
        return kind(self.engine.units, self.engine.family, self.engine.nodes)

    def known(self, x: Tensor) -> Tensors:
        """What they have to know of a point."""
        point = self.engine.point(x)
        if isinstance(self.engine, GaussianEngine):
            return {"factor": point.factor, "curved": torch.tensor(False), "whole": torch.tensor(True)}
        return {"b": point.b, "factor": point.factor, "curved": torch.tensor(False)}

    def score(self, x: Tensor, sums: Tensors) -> Tensor:
        """Of those whose sums these are."""
        if isinstance(self.engine, GaussianEngine):
            return self.engine.slopes(x, sums, False)[0]
        return sums["slope"]

    def changed(self, x: Tensor, start: Tensor) -> tuple[Tensor, int]:
        """How the score of those who are there has changed since the stage began, and how many they are."""
        known = {**self.known(x), **_named(self.known(start))}
        sums = self.engine.groups.ask(self.change, known)
        then = dict(_start(sums))
        return self.score(x, sums) - self.score(start, then), int(sums["heard"])


def fitted(
    groups: Groups, units: Coordinates, constant: float, start: float, share: float
) -> tuple[Estimates, Engine]:
    """The maximum of the likelihood, where each round closes with this share of the sites."""
    engine: GaussianEngine | QuadratureEngine
    if groups.study.family.gaussian:
        engine = GaussianEngine(groups, units, constant)
        point = engine.profiled(engine.factor.start(0.5))
        x = engine.vector(point)
    else:
        make, nodes = (
            (QuadratureEngine, nodes_for(len(units.z_names)))
            if len(units.widths) == 1
            else (LaplaceEngine, 1)
        )
        engine = make(groups, units, constant, start, nodes)
        b = torch.zeros(len(units.x_names), dtype=torch.float64)
        b[: 1 if units.intercept else 0] = start
        x = torch.cat((b, engine.factor.start(0.5)))
    x, there, information = _scored(Partial(engine), x, share)
    point = engine.point(x)
    likelihood, nats = engine.log_likelihood(point), there.distance.nats
    done = there.inverse is not None and nats < SCORED_NATS
    words = "converged" if done else f"not converged after {SCORING_STAGES} stages"
    words += f": a Newton step promised {nats:.1g} nats at the end"
    found = SearchResult(x, -likelihood, information, nats, done, words, ())
    outcome = Estimates(
        point,
        found,
        likelihood,
        engine.words,
        engine.covariance(point),
        done,
        words,
        groups.rounds,
        f"scoring engine, whose rounds close with {share:.0%} of the sites",
    )
    return outcome, engine


def _scored(partial: Partial, x: Tensor, share: float) -> tuple[Tensor, Landing, Tensor]:
    """All parameters after stages of scoring steps, how far below a maximum that is, and the information."""
    engine, units, crowd = partial.engine, len(partial.engine.groups), 1 / share
    for stage in range(SCORING_STAGES + 1):
        whole, information = engine.score_and_information(x)
        there = landing(whole, information, torch.zeros_like(information), x.new_zeros((len(x), 0)))
        if stage == SCORING_STAGES or (there.inverse is not None and there.distance.nats < SCORED_NATS):
            break
        inverse, start = _inverse(there, information), x
        for k in range(scoring.long_enough(share)):
            change, heard = (torch.zeros_like(x), units) if not k else partial.changed(x, start)
            if not heard:
                raise EstimateError("no site could answer a round of scoring steps")
            score = whole + units / heard * change
            if heard == units and 0.5 * float(score @ inverse @ score) < 0.1 * SCORED_NATS:
                break  # everyone was heard: the score is known
            x = scoring.step(x, score, inverse, k, crowd)
    return x, there, information


def _inverse(there: Landing, information: Tensor) -> Tensor:
    """Of the information; where the likelihood curves upwards, by absolute curvatures."""
    if there.inverse is not None:
        return there.inverse
    values, vectors = torch.linalg.eigh(0.5 * (information + information.mT))
    root = information_root(vectors * values.abs() @ vectors.mT)
    return root @ root.mT
