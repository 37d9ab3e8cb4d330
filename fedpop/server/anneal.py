"""Annealing of the noise variance, against local optima.

A noise variance s2 that is small next to the signal makes deep local optima: a client's z is all but
determined by a wrong phi, and neither moves. So the first K rounds are made with more noise than there is,

    v_k = v_0 (s2 / v_0)^(k/K),   v_0 = max(s2, half the variance of y about the model's intercept),

and all others with s2. A variance that is learned starts at v_0 and falls by itself as phi improves, as
slowly as it must. Nothing but the rounds sees v_k: what is published, its likelihood and its posteriors have
s2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpop.checked import Count, Whole
from fedpop.message import Tensors
from fedpop.models.base import Model
from fedpop.settings import Setting


@dataclass(frozen=True)
class Anneal(Setting):
    """Let a noise variance that was given be larger at first, and fall to its value over some rounds.

    Schedules of steps stand at their first value until then; averages and early stopping begin after it.
    A learned variance only starts larger.

    Args:
        rounds: How many of the first rounds it falls in, 100 by default; at most the first half of a
            run. 0 does neither. Raise it where restarts find different optima.
        minimum: Clients with fewer examples do not tell the size of their y before the first round; 2
            by default.

    >>> Anneal().length(500), Anneal().length(60), Anneal(rounds=0).length(500)
    (100, 30, 0)
    """

    rounds: Whole = 100
    minimum: Count = 2

    def length(self, rounds: int) -> int:
        """K in a run of so many rounds."""
        return min(self.rounds, rounds // 2)

    def warm_up(self, model: Model, rounds: int) -> int:
        """K where the noise of this model is given, else 0."""
        return 0 if model.likelihood.given_noise is None else self.length(rounds)

    def asks(self, model: Model, rounds: int) -> bool:
        """Whether the size of y is wanted."""
        learned = bool(model.likelihood.params_at(1.0))
        return self.warm_up(model, rounds) > 0 or (learned and self.rounds > 0)

    def begun(self, model: Model, phi: Tensor, size: Tensor, rounds: int) -> Tensors:
        """phi and the noise in force before the first round, given the variance of y."""
        given, start = model.likelihood.given_noise, float(size) / 2
        if given is not None:
            first = {"noise_start": phi.new_tensor(max(given, start))}
            return {"phi": phi} | self.cooled(model, first, 0, rounds)
        spans = model.phi_layout.spans()
        for name, value in model.likelihood.params_at(start).items() if start > 0 else ():
            phi = phi.clone()
            phi[spans[f"likelihood.{name}"]] = value
        return {"phi": phi}

    def cooled(self, model: Model, server: Tensors, k: int, rounds: int) -> Tensors:
        """The server's state with the noise variance of round k in force; without any from round K on."""
        length, given = self.length(rounds), model.likelihood.given_noise
        if given is None or "noise_start" not in server:
            return server
        if k >= length:
            return {n: v for n, v in server.items() if n not in ("noise", "noise_start")}
        start = float(server["noise_start"])
        noise = start * (given / start) ** (k / length)
        return server | {"noise": server["noise_start"].new_tensor(noise)}
