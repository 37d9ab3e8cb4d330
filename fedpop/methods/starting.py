"""Where theta starts: what everyone is asked before the first round, and what is made of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor

from fedpop.checked import OneOf
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import Facts
from fedpop.methods.engine import WithEngine
from fedpop.priors.base import FAR
from fedpop.questions import Question, starts
from fedpop.questions.spectral import Spectral
from fedpop.questions.targets import TargetSize
from fedpop.server.units import natural_units, redrawn


@dataclass(frozen=True, kw_only=True)
class WithStart(WithEngine):
    """A method that may ask for a start of phi and the prior that suits the data."""

    start: Annotated[str, OneOf(*starts.STARTS)] | Spectral = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        prior, phi = self.hierarchy.prior, self.model.initial_phi()
        starts.questions(self.start, self.model, prior, phi)  # raises where it cannot be

    def restarted(self) -> Self:
        return replace(self, start="random")

    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        phi, prior = self._first_phi(facts, key), self.hierarchy.prior
        exact = self.exact is not None
        asked = starts.questions(self.start, self.model, prior, phi, facts.restart, anneals=exact)
        told = self.model.likelihood.given_noise is None and any(q.starts_noise for q in asked)
        if exact or told or not self.anneal.asks(self.model, facts.first_stage):
            return asked
        return (*asked, TargetSize(self.model, self.anneal.minimum))

    def _first_phi(self, facts: Facts, key: Key) -> Tensor:
        phi = self.model.initial_phi()
        if facts.restart == 0:
            return phi
        return redrawn(self.model, phi, key.at(purpose=f"restart-{facts.restart}"))

    def first_theta(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        """phi and beta before the first round, given the answers; phi's natural units, the bounds and radii
        of the projection sets, and the noise variance that annealing begins at."""
        prior, own = self.hierarchy.prior, key.at(purpose=f"prior-{facts.restart}")
        phi, beta = starts.theta(self.model, prior, self._first_phi(facts, key), known, own)
        server = {"phi": phi}
        if "target_size" in known:
            server = self.anneal.begun(self.model, phi, known["target_size"], facts.first_stage)
            phi = server["phi"]
        ball = self.on_phi.ball or FAR * max(1.0, float(phi.norm()))
        sets = {"sets": prior.first_sets(beta), "ball": phi.new_tensor(ball, dtype=torch.float64)}
        return server | {"beta": beta, "unit": natural_units(self.model, phi)} | sets
