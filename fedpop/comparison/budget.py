"""Budgets in backbone example-passes: how many rounds of a method they buy.

Who takes part is drawn by (seed, round) alone, so the examples of every round are known beforehand. Trial
rounds of the method, away from the run, tell what it pays per example; the run then has the most rounds that
fit. The rounds of a method that differ in price (a coin decides what is done) are counted by running them
until the budget is spent; what they cost depends on (seed, round) too, so the run itself then costs the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.participation.rules import Participation
from fedpop.keys import Key
from fedpop.methods.base import Algorithm
from fedpop.run.callbacks import Callback
from fedpop.run.members import active_units
from fedpop.run.simulate import fit

TRIAL_ROUNDS = 3
"""From which the price of a round is known: the first may differ, two after it agree."""
ROUNDS_WITHOUT_PASS = 40
"""After which a method that made no pass yet is taken to make none."""
MOST_ROUNDS_TRIED = 100_000
ROUNDING = 1 + 1e-9


@dataclass
class Spending(Callback):
    """Backbone passes up to each round of a trial, which ends when it has seen enough or spent it."""

    passes: float
    totals: list[float] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)
    rows: int | None = None

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        self.totals.append(run.totals["backbone_passes"])
        seen = active_units(run.settings.participation, run.federation, run.key, run.round - 1).ids
        self.rows = run.algorithm.footprint.rows
        self.examples.append(worked_on(run.federation, seen, self.rows))
        known = run.algorithm.footprint.steady and len(self.totals) == TRIAL_ROUNDS and self.price is not None
        nothing = len(self.totals) == ROUNDS_WITHOUT_PASS and self.totals[-1] == 0
        return known or nothing or self.totals[-1] > self.passes * ROUNDING

    @property
    def price(self) -> float | None:
        """Passes per example, where all rounds after the first agree on it."""
        spent = [b - a for a, b in zip(self.totals, self.totals[1:], strict=False)]
        each = {round(s / n, 9) for s, n in zip(spent, self.examples[1:], strict=True) if n}
        return each.pop() if len(each) == 1 else None


def worked_on(federation: Federation, seen: Tensor, rows: int | None) -> int:
    """Examples of a round of these clients, of whom each has so many looked at."""
    sizes = federation.train.sizes[seen]
    return int((sizes if rows is None else sizes.clamp(max=rows)).sum())


def rounds_within(
    method: Algorithm, federation: Federation, passes: float, seed: int, rule: Participation
) -> int:
    """The most rounds that cost no more than so many backbone passes.

    >>> import torch, fedpop as fp
    >>> model = fp.Composition(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    >>> federation = fp.Federation.of([(torch.ones(5, 2), torch.ones(5))] * 4)
    >>> [rounds_within(fp.FedAvg(model, local=fp.LocalSGD(epochs=e)), federation, 100, 0,
    ...                fp.participation.Uniform(2))
    ...  for e in (1, 5)]
    [10, 2]
    """
    trial = Spending(passes)
    most = MOST_ROUNDS_TRIED
    fit(method, federation, rounds=most, seed=seed, participation=rule, callbacks=[trial], progress=False)
    totals = trial.totals
    if totals[-1] == 0:
        raise SettingsError(
            f"{method.label} makes no backbone passes here (where it has nothing to learn, features are "
            "computed once); give the budget in rounds"
        )
    if totals[0] > passes * ROUNDING:
        raise SettingsError(
            f"a budget of {passes:g} backbone passes does not pay for one round of {method.label}, which "
            f"takes {totals[0]:g}"
        )
    if totals[-1] > passes * ROUNDING or trial.price is None:
        return sum(spent <= passes * ROUNDING for spent in totals)
    spent, rounds = totals[-1], len(totals)
    while rounds < most:
        seen = active_units(rule, federation, Key(seed), rounds).ids
        spent += trial.price * worked_on(federation, seen, trial.rows)
        if spent > passes * ROUNDING:
            break
        rounds += 1
    return rounds
