"""Trial rounds: what a method does with some settings on a run's members, before the run itself begins."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedpop.errors import FedpopError
from fedpop.evaluation.marginal import MarginalLikelihood
from fedpop.methods.base import hierarchy_of

if TYPE_CHECKING:
    from fedpop.run.run import Run


def likelihoods_of(run: Run, rounds: int) -> list[float]:
    """The likelihood before and after each of the rounds of a fresh run, which has separate states; falling
    without end where the run breaks down.

    It is the marginal one where that is closed-form, else the expected complete-data one that the rounds
    themselves report.
    """
    path: list[float] = []
    hierarchy = hierarchy_of(run.algorithm)
    exact = hierarchy is not None and hierarchy.closed_form
    try:
        run.begin()
        for k in range(rounds + 1):
            metrics = run.train_round() if k else {}
            if exact and hierarchy is not None:
                theta = {name: run.server[name] for name in ("phi", "beta")}
                path.append(run.ask(MarginalLikelihood(hierarchy), theta, run.secret)[0].value)
            elif metrics.get("loss") is not None:
                path.append(-metrics["loss"] * run.members.examples)
    except (FedpopError, ArithmeticError, RuntimeError):
        return [0.0, -math.inf]
    return path if all(math.isfinite(v) for v in path) else [0.0, -math.inf]
