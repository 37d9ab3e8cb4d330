"""What each unit would add to the score and to the information of theta, before a search for an optimum.

Values and gradients of a likelihood have no usual size, and a search needs the same units at every trial. So
who is out of all proportion is found once, where theta starts: each unit sends how far its data lie from what
theta expects of them, r' V^-1 r (the score in a factor on all variances is half of it, less half the number
of targets), and the trace of its likelihood's curvature in z, its information. Both are judged against the
median over all units, as norms of messages are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.kernels.evidence import exact_target
from fedpop.kernels.target import Hierarchy
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.questions.base import Question, Units
from fedpop.questions.starts import theta


@dataclass(frozen=True)
class Contributions(Question[Tensors]):
    """Nothing is known by it, but who takes no part."""

    hierarchy: Hierarchy
    phi: Tensor
    name: ClassVar[str] = "contributions"
    quorum: ClassVar[float] = 0.0  # a unit that is not finite is left out of each round
    guarded: ClassVar[tuple[str, ...]] = ("departure", "curvature")
    excludes: ClassVar[bool] = True

    def ask(self, known: Tensors) -> Tensors:
        # The prior is one Normal, in whose start nothing is random.
        phi, beta = theta(self.hierarchy.model, self.hierarchy.prior, self.phi, known, Key(0))
        return {"phi": phi, "beta": beta}

    def possible(self, vectors: Tensors) -> Tensor | None:
        return (vectors["departure"] >= 0).all(1) & (vectors["curvature"] >= 0).all(1)

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        at = torch.cat((asked["phi"], asked["beta"])).double()
        with torch.no_grad():
            target = exact_target(self.hierarchy, at, units.cohort)
            departure, curvature = target.departure(), target.likelihood_curvature()
        assert curvature is not None
        vectors = {"departure": departure.unsqueeze(1), "curvature": curvature}
        own = self.phi.dtype  # what it cannot hold is left out of the rounds, too
        good = torch.stack([torch.isfinite(v.to(own)).all(1) for v in vectors.values()]).all(0)
        return Answer(good, vectors)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {}
