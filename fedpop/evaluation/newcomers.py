"""How wide the population prior should be for a client never seen, asked of those who were.

The prior's scale is that under which all of a client's data are most probable. Where the prior is not the
law of z (heads of clients that hold some of the classes each are no Normal cloud), the scale that suits
clients with hundreds of examples is too wide for one with none: its predictions are too modest. Every client
can tell, since it can play the newcomer whose answers are known: it forgets all but a few of its examples and
scores the others, with the prior's standard deviations multiplied by one factor after the other. Sums of
these scores are all that is sent; the factor with the best sum is for newcomers with as few.

The prior's mean knows the client, though. At an optimum it is the mean of all posterior means, of which a
client can take its own away: mu_{-i} = mu - (E[z_i | D_i] - mu) / (b - 1). Without it a client with no
examples would find its own classes in the population's head, and call for a prior that is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.algorithms.base import Algorithm
from fedpop.channel import Answer, Tensors, Total
from fedpop.errors import EstimateError, warn_user
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.predictive import mixture_score
from fedpop.priors import Prior
from fedpop.questions import Question, Units

PUBLISHED = "newcomers"
"""Goes with theta: rows of (examples, factor)."""
FACTORS = tuple(2.0**power for power in range(-4, 2))
ROWS = 100
"""Examples at most that a client scores: a few numbers are asked for."""


@dataclass(frozen=True)
class NewcomerWidth(Question[Tensor]):
    """For each of these numbers of examples, the factor of the prior's width that predicts best: rows of
    (examples, factor). Clients with too few examples to play the newcomer say nothing.

    ``split`` says which examples are scored: of "train", those that a client has not been given.
    """

    method: Algorithm
    examples: Sequence[int]
    clients: int
    split: str = "train"
    name: ClassVar[str] = "newcomers' prior"
    quorum: ClassVar[float] = 0.0  # what is made of it is a mean

    def ask(self, known: Tensors) -> Tensors:
        return {n: v for n, v in known.items() if n != PUBLISHED}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        own = units.cohort.thinned(ROWS + max(self.examples))
        order = shuffled(own, key)
        judged = own if self.split == "train" else units.split(self.split).thinned(ROWS)
        with torch.no_grad():
            shift = self._left_out(asked, units) if 0 in self.examples else None
            features = self.method.model.features(asked["phi"], judged)
            parts = []
            for count in self.examples:
                given = own.take(order < count, own.units, own.sizes.clamp(max=count))
                rest, at = judged, features
                if self.split == "train":
                    rest = own.take(order >= count, own.units, own.sizes - given.sizes)
                    at = map_inputs(lambda v, rows=order >= count: v[rows], features)
                there = (given.sizes == count) & (rest.sizes > 0)
                mine = self._scores(asked, given, None if count else shift, rest, at, key)
                parts.append(mine * there.unsqueeze(1))
        scores = torch.cat(parts, 1)
        return Answer(torch.isfinite(scores).all(1), {"scores": scores})

    def _left_out(self, asked: Tensors, units: Units) -> Tensor:
        """Where the prior's mean would be without each unit, less where it is, ``[C, d]``."""
        hierarchy = self.method.hierarchy
        assert hierarchy is not None
        mean, own = hierarchy.prior.mu(asked["beta"]), units.personal()["draws"].mean((1, 2))
        normal = hierarchy.prior.component
        if normal is not hierarchy.prior or not normal.learn_mean or self.clients < 2:
            return torch.zeros_like(own)
        return (mean - own) / (self.clients - 1)

    def _scores(
        self, asked: Tensors, given: Cohort, shift: Tensor | None, rest: Cohort, features: Inputs, key: Key
    ) -> Tensor:
        """The number of examples that were judged, and their log-probability for each factor, ``[C, 1 + F]``;
        all factors with the same random numbers. Without examples draws are the prior's, moved by
        ``shift``."""
        method, out = self.method.judged(), [rest.sizes.double()]
        assert method.hierarchy is not None
        for factor in FACTORS:
            beta = method.hierarchy.prior.widened(asked["beta"], factor)
            theta = asked | {"beta": beta}
            if shift is None:
                drawn = method.personalise(theta, given, None, key)["draws"].flatten(1, 2)
            else:
                drawn = method.without_data(theta, given, key)["draws"].flatten(1, 2) + shift.unsqueeze(1)
            out.append(mixture_score(method.model, theta["phi"], drawn, features, rest)[0])
        return torch.stack(out, 1)

    def finish(self, known: Tensors, total: Total) -> Tensor:
        size = len(self.examples) * (1 + len(FACTORS))
        sums = total.plain_sum("scores", known["phi"].new_zeros(size, dtype=torch.float64))
        found = [
            (count, best_of(row[1:]))
            for count, row in zip(
                self.examples, sums.double().cpu().unflatten(0, (-1, 1 + len(FACTORS))), strict=True
            )
            if float(row[0])
        ]
        if not found:
            raise EstimateError(
                f"nobody has more than {min(self.examples)} example(s) to play the newcomer with"
                if self.split == "train"
                else f"nobody has {self.split} examples to play the newcomer with"
            )
        return torch.tensor(found, dtype=torch.float64)


def judges(model: Model, federation: Federation | None) -> str:
    """Which examples are scored unless told: those of "validation" where there are any, else of "train", with
    a warning where phi may know these by heart."""
    held = None if federation is None else federation.splits.get("validation")
    if held is not None and len(held.y):
        return "validation"
    examples = 0 if federation is None else len(federation.train.y)
    if model.network and model.weights > examples:
        warn_user(
            "newcomers' prior: clients judge it by examples that phi was trained on, and a network may know "
            "few of them by heart, which makes newcomers too sure; keep some for validation "
            "(fedpop.hold_out(clients, validation=0.1)), or give split='train' where they are many"
        )
    return "train"


def shuffled(cohort: Cohort, key: Key) -> Tensor:
    """For each row its place among its unit's, in random order: rows may lie class by class."""
    draws = key.at(purpose="order").uniform(cohort.units, (cohort.longest,), torch.float64)
    if cohort.mask is not None:
        draws = draws.masked_fill(~cohort.mask, math.inf)
    return cohort.packed(draws.argsort(1).argsort(1))


def best_of(scores: Tensor) -> float:
    """The factor with the highest score, between those that were tried: on the parabola through the best of
    them and its neighbours.

    >>> best_of(-(torch.tensor(FACTORS).log2() + 1.25).square())
    0.42...
    """
    best = int(scores.argmax())
    shift = 0.0
    if 0 < best < len(FACTORS) - 1:
        low, high = float(scores[best] - scores[best - 1]), float(scores[best] - scores[best + 1])
        shift = 0.5 * (low - high) / (low + high) if low + high > 0 else 0.0
    return FACTORS[best] * math.exp2(shift)


def for_newcomer(prior: Prior, published: Tensors, examples: int) -> Tensors:
    """theta with the prior as wide as it should be for a newcomer with so many examples, where clients were
    asked; between the numbers that they were asked about, straight lines of logarithms."""
    if PUBLISHED not in published:
        return published
    known = published[PUBLISHED].cpu()
    at, factors = torch.log1p(known[:, 0]).tolist(), known[:, 1].log().tolist()
    place = min(max(math.log1p(examples), at[0]), at[-1])
    right = next(i for i, value in enumerate(at) if place <= value)
    left = max(right - 1, 0)
    share = (place - at[left]) / (at[right] - at[left]) if right > left else 0.0
    factor = math.exp(factors[left] + share * (factors[right] - factors[left]))
    return published | {"beta": prior.widened(published["beta"], factor)}
