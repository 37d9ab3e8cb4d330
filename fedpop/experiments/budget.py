"""Budgets in backbone example-passes: how many rounds of a method they buy.

Who takes part is drawn by (seed, round) alone, so the examples of every round are known beforehand. Trial
rounds of the method, away from the run, tell what it pays per example; the run then has the most rounds that
fit. A method whose rounds differ in price (a coin decides what is done) is tried for longer, and its run ends
when the budget is spent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedpop.algorithms.base import Algorithm
from fedpop.errors import SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Participation
from fedpop.runtime.callbacks import Callback
from fedpop.runtime.random import Key
from fedpop.runtime.simulate import simulate, who

TRIAL = 3
LONG_TRIAL = 40
MOST = 100_000


@dataclass
class Spending(Callback):
    """Backbone passes up to each round; ends a trial that has seen enough, or a run at its budget."""

    passes: float | None = None
    totals: list[float] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        self.totals.append(run.totals["backbone_passes"])
        if self.passes is not None:
            return self.totals[-1] >= self.passes
        seen = who(run.settings.participation, len(run.federation), run.key, run.round - 1).ids
        self.examples.append(int(run.federation.train.sizes[seen].sum()))
        return len(self.totals) == TRIAL and self.price is not None

    @property
    def price(self) -> float | None:
        """Passes per example, where all rounds after the first agree on it."""
        spent = [b - a for a, b in zip(self.totals, self.totals[1:], strict=False)]
        each = {round(s / n, 9) for s, n in zip(spent, self.examples[1:], strict=True) if n}
        return each.pop() if len(each) == 1 else None

    def state(self) -> dict[str, Any]:
        return {"totals": self.totals, "examples": self.examples}

    def restore(self, state: dict[str, Any]) -> None:
        self.totals, self.examples = list(state["totals"]), list(state["examples"])


def rounds_within(
    method: Algorithm, federation: Federation, passes: float, seed: int, rule: Participation
) -> int:
    """The most rounds that cost no more than so many backbone passes.

    >>> import torch, fedpop as fp
    >>> model = fp.Composition(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    >>> federation = fp.Federation.of([(torch.ones(5, 2), torch.ones(5))] * 4)
    >>> [rounds_within(fp.FedAvg(model, local=fp.LocalSGD(epochs=e)), federation, 100, 0, fp.Uniform(2))
    ...  for e in (1, 5)]
    [10, 2]
    """
    trial = Spending()
    simulate(
        method,
        federation,
        rounds=LONG_TRIAL,
        seed=seed,
        participation=rule,
        callbacks=[trial],
        progress=False,
    )
    price, before = trial.price, 0.0
    if price is not None:
        before = max(0.0, trial.totals[0] - price * trial.examples[0])  # what the method pays to start
    else:
        price = trial.totals[-1] / max(sum(trial.examples), 1)
    if price <= 0:
        raise SettingsError(
            f"{method.label} makes no backbone passes here (where it has nothing to learn, features are "
            "computed once); give the budget in rounds"
        )
    spent, rounds, sizes = before, 0, federation.train.sizes
    while rounds < MOST:
        spent += price * int(sizes[who(rule, len(federation), Key(seed), rounds).ids].sum())
        if spent > passes * (1 + 1e-9):
            break
        rounds += 1
    if rounds == 0:
        raise SettingsError(
            f"a budget of {passes:g} backbone passes does not pay for one round of {method.label}, which "
            f"takes {spent:g}"
        )
    return rounds
