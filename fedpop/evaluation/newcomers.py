"""How wide the population prior should be for a client never seen, asked of those who were.

The prior's scale is that under which all of a client's data are most probable. Where the prior is not the law
of z (heads of clients that have some of the classes each are no Normal cloud), the scale that suits clients
with hundreds of examples is too wide for one with none: its predictions are too modest. Every client can
tell, since it can play the newcomer whose answers are known: it leaves out all but a few of its examples and
scores others, with the prior's standard deviations multiplied by one factor after the other. Sums over
clients are all that is sent; the factor with the best sum is for newcomers with as few.

The prior's mean knows the client, though, and would call for a prior that is too narrow. At an optimum
sum_j (m_j - mu) = 0 with m_j = mu + W_j (z_j - mu), where m_j is a posterior mean, W_j the share of z that
data and not the prior decide, and z_j what the data alone would say. Without client i this is solved by

    mu_{-i} = mu - (m_i - mu) / sum_{j != i} W_j,

W taken as one number for each client, that in the direction of m_j - mu. It is first-order: phi and the
scale know the client, too. Mixtures go without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import EstimateError, warn_user
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.kernels import Hierarchy
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import Algorithm, PopulationPrior, role_of
from fedpop.models.base import Model
from fedpop.models.predictive import mixture_score, unit_by_unit
from fedpop.priors import Prior
from fedpop.priors.base import widened
from fedpop.questions import Question, Units

PUBLISHED = "newcomers"
"""Goes with theta: rows of (examples, factor)."""
WIDTH_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
"""Of the prior's standard deviations, that are tried; between them there is a parabola."""
UNCHANGED = WIDTH_FACTORS.index(1.0)
SCORED_ROWS = 100
"""Examples that a client scores, about: a few numbers are asked for."""
LEAST_DATA_SHARE = 0.05
"""The share of z that data decide, on average, below which it is not believed: it is made of draws."""
ERRORS_TO_BE_SURE = 2.0
"""Errors by which a factor has to be better than one: a few clients whose examples are all of one class can
make a difference by chance."""
LOWEST_SCORE = -1e9
"""The score of what cannot be; its sum has to be finite."""


@dataclass(frozen=True)
class DataShare(Question[float]):
    """The sum of W over everyone; 0 where the prior's mean is not the mean of all."""

    hierarchy: Hierarchy
    name: ClassVar[str] = "data's share of z"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("phi", "beta")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        own = data_share(self.hierarchy.prior, asked["beta"], units)[1].double()
        return Answer(torch.isfinite(own), {"share": own.unsqueeze(1)})

    def finish(self, known: Tensors, total: Total) -> float:
        return float(total.plain_sum("share", known["phi"].new_zeros(1, dtype=torch.float64)))


def data_share(prior: Prior, beta: Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """m - mu of each unit, ``[C, d]``, and its W along that, ``[C]``: one less the share of the prior's
    variance that is left."""
    draws = units.personal()["draws"].flatten(1, 2)
    normal = prior.component
    if normal is not prior or not normal.learn_mean:
        return torch.zeros_like(draws[:, 0]), torch.zeros_like(draws[:, 0, 0])
    white = normal.whiten(beta, draws - normal.mu(beta))
    moved = white.mean(1)
    along = (white @ moved.unsqueeze(2)).squeeze(2) / moved.norm(dim=1, keepdim=True).clamp(min=1e-12)
    share = (1 - along.var(1)).clamp(0, 1) * (units.cohort.sizes > 0)
    return normal.colour(beta, moved), share


@dataclass(frozen=True)
class NewcomerWidth(Question[Tensor]):
    """For each of these numbers of examples, the factor of the prior's width that predicts best: rows of
    (examples, factor). Clients with too few examples to play the newcomer say nothing.

    ``split`` says which examples are scored: of "train", those that a client has not been given. ``shares``
    is what ``DataShare`` found, 0 where the prior does not know the clients.
    """

    method: Algorithm
    examples: tuple[int, ...]
    split: str = "train"
    shares: float = 0.0
    clients: int = 0
    name: ClassVar[str] = "newcomers' prior"
    quorum: ClassVar[float] = 0.0  # a choice can be made without those who are away

    def ask(self, known: Tensors) -> Tensors:
        return {n: v for n, v in known.items() if n != PUBLISHED}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        own = units.cohort.thinned(SCORED_ROWS + max(self.examples))
        order, given_away = shuffled(own, key), self.split == "train"
        judged = own if given_away else units.split(self.split).thinned(SCORED_ROWS)
        out = own.sizes.new_zeros((len(own), len(self.examples), 1 + len(WIDTH_FACTORS)), dtype=torch.float64)
        with torch.no_grad():
            features = self.method.model.features(asked["phi"], judged)
            shift = self._left_out(asked, units) if 0 in self.examples else None
            for row, count in enumerate(self.examples):
                left = own.sizes - count if given_away else judged.sizes
                there = ((own.sizes >= count) & (left > 0)).nonzero().squeeze(1)
                if not len(there):
                    continue
                given = picked(own, chosen(own, there) & (order < count), there)
                rows = chosen(judged, there)
                rows = rows & (order >= count) if given_away else rows
                at = map_inputs(lambda v, r=rows: v[r], features)
                moved = None if count or shift is None else shift[there]
                rest = picked(judged, rows, there)
                out[there, row] = self._scores(asked, given, count, moved, rest, at, key)
        differences = (out[:, :, 1:] - out[:, :, 1 + UNCHANGED, None]).square()
        vector = torch.cat((out, differences), 2).flatten(1)
        return Answer(torch.isfinite(vector).all(1), {"scores": vector})

    @property
    def _learned(self) -> PopulationPrior:
        found = role_of(self.method, PopulationPrior)
        assert found is not None
        return found

    def _left_out(self, asked: Tensors, units: Units) -> Tensor | None:
        """Where the prior's mean would be without each unit, less where it is, ``[C, d]``."""
        if self.shares <= 0 or self.clients < 2:
            return None
        moved, share = data_share(self._learned.hierarchy.prior, asked["beta"], units)
        return -moved / (self.shares - share).clamp(min=LEAST_DATA_SHARE * (self.clients - 1)).unsqueeze(1)

    def _scores(
        self,
        asked: Tensors,
        given: Cohort,
        count: int,
        shift: Tensor | None,
        rest: Cohort,
        features: Inputs,
        key: Key,
    ) -> Tensor:
        """The number of examples that were judged, and their log-probability for each factor, ``[C, 1 + F]``;
        all factors with the same random numbers."""
        method, out = self._learned.for_verdict(), [rest.sizes.double()]
        hierarchy, prior = self._learned.hierarchy, role_of(method, PopulationPrior)
        assert prior is not None
        gaussian = hierarchy.closed_form and hierarchy.prior.component is hierarchy.prior
        for factor in WIDTH_FACTORS:
            theta = asked | {"beta": widened(hierarchy.prior, asked["beta"], factor)}
            made = (
                method.personalise(theta, given, None, key)
                if count
                else prior.without_data(theta, given, key)
            )
            drawn = made["draws"].flatten(1, 2)
            drawn = drawn if shift is None else drawn + shift.unsqueeze(1)
            score = gaussian_score if gaussian else mixture_score
            out.append(score(method.model, asked["phi"], drawn, features, rest)[0].clamp(min=LOWEST_SCORE))
        return torch.stack(out, 1)

    def finish(self, known: Tensors, total: Total) -> Tensor:
        width = 1 + 2 * len(WIDTH_FACTORS)
        if not total.count:
            raise EstimateError(f"{self.name}: nobody answered")
        zeros = known["phi"].new_zeros(len(self.examples) * width, dtype=torch.float64)
        sums = total.plain_sum("scores", zeros).double().cpu().unflatten(0, (-1, width))
        found = [
            (count, best_of(row[1 : 1 + len(WIDTH_FACTORS)], row[1 + len(WIDTH_FACTORS) :].sqrt()))
            for count, row in zip(self.examples, sums, strict=True)
            if float(row[0])
        ]
        if not found:
            more = "another" if self.split == "train" else f"a {self.split} example"
            raise EstimateError(
                f"{self.name}: nobody has {min(self.examples)} training example(s) and {more} to be judged "
                "by; ask about fewer examples"
            )
        return torch.tensor(found, dtype=torch.float64)


def widths_in_words(newcomers: Mapping[int, float]) -> str:
    """What was found, for people.

    >>> widths_in_words({0: 0.183, 5: 1.0})
    "the prior's sd times 0.18 with 0 example(s), 1 with 5 example(s)"
    """
    words = (f"{factor:.2g} with {count} example(s)" for count, factor in newcomers.items())
    return f"the prior's sd times {', '.join(words)}"


def judges(model: Model, federation: Federation | None) -> str:
    """Which examples are scored by default: those of "validation" where half of the clients have any, else of
    "train", with a warning where phi may have memorised these."""
    if federation is None:  # they are elsewhere
        return "train"
    validation = federation.splits.get("validation")
    if validation is not None and 2 * int((validation.sizes > 0).sum()) >= len(federation):
        return "validation"
    if model.network and model.weights > len(federation.train.y):
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


def chosen(cohort: Cohort, index: Tensor) -> Tensor:
    """The rows of the units at these positions, as flags."""
    mine = torch.zeros(len(cohort), dtype=torch.bool, device=cohort.device)
    mine[index] = True
    return mine[cohort.owner]


def picked(cohort: Cohort, rows: Tensor, index: Tensor) -> Cohort:
    """Rows with a flag, all of them of the units at these positions."""
    sizes = torch.zeros_like(cohort.sizes).index_add(0, cohort.owner, rows.to(cohort.sizes.dtype))
    return cohort.take(rows, cohort.units[index], sizes[index])


def gaussian_score(
    model: Model, phi: Tensor, draws: Tensor, features: Inputs, cohort: Cohort
) -> tuple[Tensor, Tensor]:
    """``mixture_score`` of a linear head with normal targets and Gaussian z, from moments of its outputs: a
    mean of densities would rest on the few draws that hit an example where there is little noise."""
    out, params = [], model.params(phi)
    for z, own, targets in unit_by_unit(draws, features, cohort):
        eta = model.head_outputs(phi, z, own).double()
        y = model.likelihood.encode(targets, model.outputs, phi.dtype).double()
        variance = eta.var(0) + model.likelihood.variance_at(eta, params).mean(0)
        square = (y.reshape(eta.shape[1:]) - eta.mean(0)).square() / variance
        out.append(-0.5 * (square + variance.log() + math.log(2 * math.pi)).sum())
    return torch.stack(out), cohort.sizes.double()


def best_of(scores: Tensor, errors: Tensor) -> float:
    """The factor with the highest score, or one: where the best is not above it by more than twice its error
    (``errors`` are those of differences), nothing is known against the prior as it is. Between factors that
    were tried it is on the parabola through the best of them and its neighbours.

    >>> best_of(-10 * (torch.tensor(WIDTH_FACTORS).log2() + 1.25).square(), torch.ones(6))
    0.42...
    """
    best = int(scores.argmax())
    if float(scores[best] - scores[UNCHANGED]) <= ERRORS_TO_BE_SURE * float(errors[best]):
        return 1.0
    shift = 0.0
    if 0 < best < len(WIDTH_FACTORS) - 1:
        low, high = float(scores[best] - scores[best - 1]), float(scores[best] - scores[best + 1])
        shift = 0.5 * (low - high) / (low + high) if low + high > 0 else 0.0
    return WIDTH_FACTORS[best] * math.exp2(shift)


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
    return published | {"beta": widened(prior, published["beta"], factor)}
