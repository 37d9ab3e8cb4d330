"""What may happen between rounds: early stopping on validation data, or anything of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpop.errors import DataError, SettingsError

if TYPE_CHECKING:
    from fedpop.federation.clients import Federation
    from fedpop.runtime.simulate import Run


class Callback:
    """Called after every round; returning True ends the run. State goes into the checkpoint."""

    def check(self, federation: Federation) -> None:
        """Raise before the first round when this cannot work on these clients."""

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass
class EarlyStop(Callback):
    """Stop when the clients' validation log-likelihood has not risen for ``patience`` looks.

    The published theta goes back to the one with the best score.
    """

    every: int = 10
    patience: int = 5
    best: float = float("-inf")
    best_round: int = 0
    looks: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.patience < 1:
            raise SettingsError("EarlyStop: every and patience must be at least 1")

    def check(self, federation: Federation) -> None:
        if "validation" not in federation.splits:
            raise DataError("early stopping needs validation data: give clients a validation set")

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        if run.round % self.every:
            return False
        score = run.validation_score()
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
