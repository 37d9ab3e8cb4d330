"""What may happen between rounds: early stopping on validation data, or anything of the user's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fedpop.checked import Checked, Count
from fedpop.errors import DataError
from fedpop.methods.base import Staged, role_of

if TYPE_CHECKING:
    from fedpop.federation.clients import Federation
    from fedpop.run.members import Members
    from fedpop.run.run import Run


class Callback:
    """Called after every round; returning True ends the run. State goes into the checkpoint.

    >>> import torch, fedpop as fp
    >>> class Losses(Callback):
    ...     seen = []
    ...     def after_round(self, run, metrics):
    ...         self.seen.append(metrics["loss"])
    ...         return False
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> _ = fp.FedAvg(model).fit([(torch.ones(2, 1), torch.ones(2))], rounds=3, callbacks=[Losses()])
    >>> len(Losses.seen)
    3
    """

    def check(self, federation: Federation | Members) -> None:
        """Raise before the first round when this cannot work on these clients."""

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        """May add to the round's numbers."""
        return False

    def recorded(self, run: Run, metrics: dict[str, Any]) -> None:
        """Called once the round's numbers are complete: these are what ``metrics.jsonl`` gets."""

    def finished(self, run: Run) -> None:
        """Called after the last round."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass
class EarlyStop(Checked, Callback):
    """Stop when the clients' validation log-likelihood has not risen for some looks.

    The published theta goes back to the one with the best score. Rounds in which the noise variance is
    annealed (``steps.Anneal``) are not evaluated; the one in which a method ends by itself always is.

    Args:
        every: Rounds between evaluations, 10 by default.
        patience: How many evaluations in a row without a better score end the run, 5 by default. Raise it
            where scores are noisy.

    >>> import torch, fedpop as fp
    >>> x, y = torch.linspace(-1, 1, 6).unsqueeze(1), torch.linspace(-1, 1, 6)
    >>> clients = [fp.Client(x[:4], y[:4], validation=(x[4:], y[4:]))]
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> stop = EarlyStop(every=2, patience=1)
    >>> population = fp.FedSOUL(model).fit(clients, rounds=4, callbacks=[stop])
    >>> "validation_log_likelihood" in population.history[-1]
    True
    """

    looks_at_data: ClassVar[bool] = True
    every: Count = 10
    patience: Count = 5
    best: float = field(default=float("-inf"), init=False)
    best_round: int = field(default=0, init=False)
    looks: int = field(default=0, init=False)

    def check(self, federation: Federation | Members) -> None:
        if "validation" not in federation.splits:
            raise DataError("early stopping needs validation data: give clients a validation set")

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        due, staged = run.round % self.every == 0 or run.over, role_of(run.algorithm, Staged)
        if not due or (staged is not None and run.round <= staged.warm_up(run.ends[0])):
            return False
        score = run.validation_score()
        if math.isnan(score):  # whoever has validation examples is away
            return False
        metrics["validation_log_likelihood"] = score
        if score > self.best:
            self.best, self.best_round, self.looks = score, run.round, 0
            run.remember()
            return False
        self.looks += 1
        if self.looks < self.patience:
            return False
        run.recall()
        return True

    def state(self) -> dict[str, Any]:
        best = None if self.best == float("-inf") else self.best
        return {"best": best, "best_round": self.best_round, "looks": self.looks}

    def restore(self, state: dict[str, Any]) -> None:
        self.best = float("-inf") if state["best"] is None else state["best"]
        self.best_round, self.looks = state["best_round"], state["looks"]
