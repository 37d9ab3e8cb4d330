"""A unit's own model: draws of its z, and a client that was not there in training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpop.checked import Level, checked
from fedpop.errors import DataError, SettingsError, TrainingError
from fedpop.evaluation.newcomers import for_newcomer
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, as_inputs, map_inputs, narrowed, require_finite, rows_of
from fedpop.keys import NEWCOMER, Key
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm, PopulationPrior, hierarchy_of, role_of
from fedpop.models.base import Model
from fedpop.models.modules import Layout
from fedpop.models.predictive import Predictive

PREDICTED_ENTRIES_AT_ONCE = 2**24
"""Numbers that predictions of held-out examples take at a time: 64 MiB, and several times that on the way."""


@dataclass(frozen=True)
class Posterior:
    """Draws of one client's z with theta fixed, ``[chains, n, d]``."""

    draws: Tensor
    layout: Layout

    def __repr__(self) -> str:
        chains, n, d = self.draws.shape
        return f"Posterior({chains} chains of {n} draws, {d} dimensions)"

    @property
    def flat(self) -> Tensor:
        """All draws, ``[L, d]``."""
        return self.draws.reshape(-1, self.draws.shape[-1])

    @property
    def mean(self) -> Tensor:
        return self.flat.mean(0)

    @property
    def sd(self) -> Tensor:
        return self.flat.std(0)

    @checked
    def interval(self, level: Level = 0.9) -> tuple[Tensor, Tensor]:
        """Equal-tailed credible interval of every coordinate.

        Args:
            level: Its probability (default: 0.9).
        """
        tail = (1 - level) / 2
        wanted = torch.tensor([tail, 1 - tail], dtype=self.draws.dtype, device=self.draws.device)
        low, high = torch.quantile(self.flat, wanted, dim=0)
        return low, high

    def named(self) -> dict[str, Tensor]:
        """Draws under the names of the head's parameters."""
        return self.layout.views(self.flat)


@dataclass(frozen=True)
class Newcomer:
    """A client that was not there in training: from the prior alone, or with its own few data."""

    algorithm: Algorithm
    published: Tensors
    personal: Tensors
    key: Key

    @property
    def posterior(self) -> Posterior:
        if "draws" not in self.personal:
            raise SettingsError(f"{self.algorithm.label} has a point estimate of z, not a posterior")
        return Posterior(self.personal["draws"][0], self.algorithm.model.z_layout)

    @checked
    def predict(self, x: Any) -> Predictive:
        """The predictive distribution at new x.

        Args:
            x: Rows to predict for, as in training.
        """
        x = checked_inputs(self.algorithm.model, x)
        found = self.algorithm.predict(self.published, self.personal, x, self.key)
        return finite(replace(found, labels=self.algorithm.model.labels), "the new client")


def finite(found: Predictive, whose: str) -> Predictive:
    """What is predicted, unless the model's outputs overflow: nobody is to read nan."""
    if not bool(torch.isfinite(found.eta).all()):
        raise TrainingError(
            f"predictions for {whose} are not finite: theta is, but outputs overflow; training has diverged "
            "(lower its rate, or scale x and y), or x is far from all that it was trained on"
        )
    return found


def newcomer(method: Algorithm, published: Tensors, x: Any, y: Any, key: Key) -> Newcomer:
    """The model of a client without data (x and y are None), or with a few."""
    if (x is None) != (y is None):
        raise DataError("a new client needs both x and y, or neither")
    model, phi = method.model, published["phi"]
    unit = torch.tensor([NEWCOMER], device=phi.device)
    if x is None:
        published = _as_wide(method, published, 0)
        none, rows = torch.zeros_like(unit), phi.new_zeros(0)
        nobody, prior = Cohort(unit, none, rows, rows, 0), role_of(method, PopulationPrior)
        if prior is None:
            personal = method.personalise(published, nobody, None, key)
        else:
            personal = prior.without_data(published, nobody, key)
        return Newcomer(method, published, personal, key)
    own = Federation.of({"the new client": (x, y)}, model.labels)
    one = model.prepared(own.example).checked(own)  # raises where they do not fit the model
    c = one.cohort(torch.tensor([0]), phi.device)
    cohort = Cohort(unit, c.sizes, c.x, c.y, c.longest, c.embedded)
    published = _as_wide(method, published, c.examples)
    return Newcomer(method, published, method.personalise(published, cohort, None, key), key)


def _as_wide(method: Algorithm, published: Tensors, examples: int) -> Tensors:
    """theta with the prior that suits a newcomer with so many examples, where clients were asked."""
    hierarchy = hierarchy_of(method)
    return published if hierarchy is None else for_newcomer(hierarchy.prior, published, examples)


def in_pieces(x: Inputs, y: Tensor, each: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Examples so many at a time that their predictions fit into memory, where a row takes ``each`` numbers;
    few ones all at once."""
    rows = max(1, PREDICTED_ENTRIES_AT_ONCE // each)
    for start in range(0, len(y), rows):
        yield map_inputs(lambda v, at=start: v[at : at + rows], x), y[start : start + rows]


def embedded(model: Model, phi: Tensor, each: list[Inputs]) -> list[Inputs]:
    """The features of several clients' rows, by one pass over all of them."""
    counts = [rows_of(x) for x in each]
    features = model.features_at(phi, map_inputs(lambda *parts: torch.cat(parts), *each))
    ends = list(itertools.accumulate(counts))
    return [
        map_inputs(lambda v, end=end, n=n: v[end - n : end], features)
        for end, n in zip(ends, counts, strict=True)
    ]


def checked_inputs(model: Model, x: Any) -> Inputs:
    """x to predict at, in the model's type; what is not finite is refused by row."""
    phi = model.initial_phi()

    def cast(leaf: Tensor) -> Tensor:
        return narrowed(leaf, phi.dtype, lambda row: f"prediction, row {row}: x").to(phi.device)

    inputs = as_inputs(x, "prediction")
    require_finite(inputs, "prediction")
    return map_inputs(cast, inputs)
