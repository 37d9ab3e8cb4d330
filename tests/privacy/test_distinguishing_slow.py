"""An attacker who tells runs with one unit from runs without it, by what rounds really publish."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

import fedpop as fp
from fedpop.message import Aggregate, Answer, Message, Tensors, Total
from fedpop.privacy import ledger
from fedpop.privacy.gaussian import BIT, SCORE, bound_of, bounded
from fedpop.run.private import PrivateTerms, PrivateTotals, private_method
from fedpop.site.work import private_answer
from tests.privacy.test_gaussian import model, settings

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.slow

DELTA, RUNS, ROUNDS, CONFIDENCE = 0.01, 30_000, 2, 1 - 1e-4
LEVELS = (0.02, 0.05, 0.1, 0.2)
"""Shares of runs without the unit in which the attacker may be wrong."""


@dataclass
class Game:
    """Runs of a few rounds in which all units' vectors are zero, but for a canary's where it takes part."""

    private: PrivateTotals
    broadcast: Tensors
    canary: Tensors
    totals: tuple[Total, Total]

    def statistic(self, there: bool) -> float:
        """The log-likelihood ratio of what one run publishes, for one who knows the noise there is."""
        out = 0.0
        for k in range(ROUNDS):
            noisy = self.private.noised(self.totals[there], self.method, self.broadcast, k)
            for name in self.private.vectors:
                seen = self.method.whitened(name, noisy.weighted[name].double(), self.broadcast)
                canary = self.canary[name][0].double()
                bound = bound_of(name, len(canary), self.broadcast)
                out += float(seen @ canary) / (self.private.multipliers[name] * bound) ** 2
        return out

    def __post_init__(self) -> None:
        self.method = private_method(fp.FedSOUK(model()))


def game(canary_of: Callable[[Tensors, Tensors], Tensors] | None = None) -> tuple[Game, float]:
    """The game, and epsilon as the ledger has it."""
    method = private_method(fp.FedSOUK(model()))
    sigma = ledger.noise_for(1.0, 1.0, ROUNDS, DELTA)
    private = PrivateTotals(PrivateTerms(settings(delta=DELTA), sigma, 1.0, 10.0, 10, 10**9), method, None)
    beta = method.hierarchy.prior.init(torch.zeros(2), 1.0)
    broadcast = {"phi": torch.zeros(method.model.phi_layout.size), "beta": beta} | private.bounds
    long = {"I": torch.zeros(1, 3), "J": torch.zeros(1, len(broadcast["phi"]))}
    long["I"][0, 0], long["J"][0, 1] = 100.0, 100.0
    good = torch.ones(1, dtype=torch.bool)

    def of(vectors: Tensors) -> Tensors:
        return private_answer(method, Answer(good, vectors), broadcast, adaptive=True).vectors

    canary = of(long) if canary_of is None else canary_of(long, broadcast)
    totals = []
    for there in (False, True):
        aggregate, nothing = Aggregate(), of({n: torch.zeros_like(v) for n, v in long.items()})
        aggregate.add(Message.of(Answer(good, nothing), torch.tensor([1])), torch.ones(1))
        if there:
            aggregate.add(Message(torch.tensor([2]), torch.ones(1, dtype=torch.int64), canary), torch.ones(1))
        totals.append(aggregate.total(10, ratio=True))
    return Game(private, broadcast, canary, (totals[0], totals[1])), ledger.epsilon(sigma, 1.0, ROUNDS, DELTA)


def proved(played: Game) -> float:
    """The lower bound on epsilon from all these runs; levels are chosen on a third of them."""
    out, inside = (np.array([played.statistic(there) for _ in range(RUNS)]) for there in (False, True))
    best, first = 0.0, RUNS // 3
    for level in LEVELS:
        threshold = np.quantile(out[:first], 1 - level)
        false, hits = (int((s[first:] > threshold).sum()) for s in (out, inside))
        count = RUNS - first
        most_false = stats.beta.ppf(CONFIDENCE, false + 1, count - false)
        least_hits = stats.beta.ppf(1 - CONFIDENCE, hits, count - hits + 1) if hits else 0.0
        if least_hits > DELTA:
            best = max(best, math.log((least_hits - DELTA) / most_false))
    return best


def test_what_is_proved_is_below_the_ledger_and_above_half_of_it() -> None:
    played, claimed = game()
    assert claimed == pytest.approx(1, abs=0.01)
    assert claimed / 2 < proved(played) < claimed


@pytest.mark.parametrize("vectors", [("I", "J", f"{BIT}J"), ("I",), ("J",)], ids=["halved", "no I", "no J"])
def test_noise_that_is_halved_or_left_off_a_vector_is_found(vectors: tuple[str, ...]) -> None:
    played, claimed = game()
    for name in vectors:
        played.private.multipliers[name] *= 0.5 if len(vectors) > 1 else 1e-3
    assert proved(played) > claimed


def test_bounds_of_a_site_instead_of_a_unit_are_found() -> None:
    """A unit of a site of four may add as much as all of them."""

    def wide(long: Tensors, broadcast: Tensors) -> Tensors:
        out = {n: 4 * bounded(v, bound_of(n, v.shape[1], broadcast))[0] for n, v in long.items()}
        return out | {f"{BIT}{n}": torch.full((1, 1), -0.5).double() for n in out if n != SCORE}

    played, claimed = game(wide)
    assert proved(played) > claimed
