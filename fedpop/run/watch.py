"""Evaluation between rounds, which leaves no trace in the model that comes out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fedpop.checked import Checked, Count, OneOf, Whole
from fedpop.errors import DataError
from fedpop.evaluation.scores import CLASSES, REAL
from fedpop.federation.clients import SPLITS, Federation
from fedpop.methods.base import PopulationPrior, role_of
from fedpop.population import Population, evaluate
from fedpop.run.callbacks import Callback

if TYPE_CHECKING:
    from fedpop.run.members import Members
    from fedpop.run.run import Run


@dataclass
class Watch(Checked, Callback):
    """Evaluates all clients every so many rounds, and after each of the last ones.

    The run goes on as if it had not been evaluated: nothing is drawn, stored or counted. Methods that sample
    in a final pass take a shorter one here; the final model is evaluated with the method's settings.

    Args:
        every: Rounds between looks; None (the default) looks at the last rounds only.
        last: How many rounds at the end (of each stage) are all evaluated, 10 by default;
            ``mean_of_last`` averages over them.
        split: Which of the clients' sets they are judged on: "test" (the default), "validation" or
            "train".
        points: What was seen, a dictionary for each look; empty at first.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 6).unsqueeze(1)
    >>> client = fp.Client(x, 2 * x[:, 0], test=(x, 2 * x[:, 0]))
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> watch = fp.callbacks.Watch(every=5, last=2)
    >>> _ = fp.FedAvg(model).fit([client], rounds=10, callbacks=[watch])
    >>> [point["round"] for point in watch.points], sorted(watch.mean_of_last())[0]
    ([5, 9, 10], 'coverage')
    """

    every: Count | None = None
    last: Whole = 10
    split: Annotated[str, OneOf(*SPLITS)] = "test"
    points: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = field(default=0.0, init=False)
    """What looking has taken, which is in no cost of the run."""

    def check(self, federation: Federation | Members) -> None:
        if self.split not in federation.splits:
            raise DataError(f"no client has {self.split} data to be judged on")

    def usually_every(self, rounds: int) -> None:
        """So many rounds between looks, where that was left open."""
        self.every = self.every or rounds

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        rounds = run.facts.rounds  # the end of this stage: which one is the last is not known before
        if (self.every and run.round % self.every == 0) or run.round > rounds - self.last:
            started = time.perf_counter()
            self.points.append(self._look(run))
            self.seconds += time.perf_counter() - started
        return False

    def _look(self, run: Run) -> dict[str, Any]:
        prior = role_of(run.algorithm, PopulationPrior)
        method = run.algorithm if prior is None else prior.for_evaluation()
        published = method.publish(run.server)
        now = Population(method, published, run.secret, run.federation, run.sites.store, rounds=run.round)
        costs = ("bytes_up", "bytes_down", "backbone_passes", "head_steps", "seconds")
        spent = {name: run.totals.get(name, 0.0) for name in costs}
        summary = evaluate(now, self.split, widths=False).summary()
        finite = {n: v if math.isfinite(v) else None for n, v in summary.items()}
        return {"round": run.round} | spent | finite

    def mean_of_last(self) -> dict[str, float | None]:
        """Each score averaged over the looks of the last rounds; None where one of them was not finite."""
        tail = self.points[-self.last :] if self.last else []
        names = [n for n in (tail[0] if tail else {}) if n.split("_")[0] in (*CLASSES, *REAL, "pooled")]
        out: dict[str, float | None] = {}
        for name in names:
            values = [point[name] for point in tail]
            out[name] = None if None in values else sum(values) / len(values)
        return out

    def state(self) -> dict[str, Any]:
        return {"points": self.points, "seconds": self.seconds}

    def restore(self, state: dict[str, Any]) -> None:
        self.points, self.seconds = list(state["points"]), float(state.get("seconds", 0.0))
