"""Predictions that do not take theta for granted: draws of theta, and of z at each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedpop.blocks import CLIENTS_AT_ONCE
from fedpop.errors import EstimateError
from fedpop.evaluation.information import reweighted
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.kernels import Hierarchy
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.models.predictive import Predictive

DRAWS_PER_THETA = 10
"""Of z, at each of the draws of theta: a thousand in all. A 5 % quantile is then known to .07 standard
deviations where the spread is z's own, and to .2 where all of it is theta's, sqrt(.05 .95 / n) / .103."""


@dataclass
class ThetaDraws:
    """Draws of theta around the returned one, and clients' models at each; made once, group by group."""

    hierarchy: Hierarchy
    published: Tensors
    thetas: list[tuple[Tensor, Tensor]]
    names: list[str]
    cohort: Callable[[Tensor], Cohort]
    draws: Callable[[Tensor], Tensor]
    """Posterior draws of clients at the returned theta, ``[C, L, d]``."""
    key: Key
    _groups: dict[int, list[Tensor]] = field(default_factory=dict)

    def of(self, client: int) -> list[Tensor]:
        """Draws of one client's z at each theta, ``[L, d]``."""
        group = client // CLIENTS_AT_ONCE
        if group not in self._groups:
            ids = torch.arange(group * CLIENTS_AT_ONCE, min((group + 1) * CLIENTS_AT_ONCE, len(self.names)))
            exact = self.hierarchy.closed_form
            self._groups[group] = self._exact(ids) if exact else self._resampled(ids)
        return [z[client % CLIENTS_AT_ONCE] for z in self._groups[group]]

    def predict(self, client: int, x: Inputs, key: Key) -> Predictive:
        """The predictive distribution of a client at x, over theta and z."""
        model = self.hierarchy.model
        with torch.no_grad():
            pairs = zip(self.thetas, self.of(client), strict=True)
            outputs = [model.outputs_at(phi, z, x) for (phi, _), z in pairs]
        own = [model.params(phi) for phi, _ in self.thetas]
        params = {
            name: torch.stack([p[name] for p in own]).repeat_interleave(len(outputs[0]))[:, None, None]
            for name in own[0]
        }
        return Predictive(torch.cat(outputs), model.likelihood, params, key, False, model.labels)

    def _exact(self, ids: Tensor) -> list[Tensor]:
        cohort, out = self.cohort(ids), []
        with torch.no_grad():
            for t, (phi, beta) in enumerate(self.thetas):
                mean, cov = self.hierarchy.target_at(phi, beta, cohort).moments()
                root = torch.linalg.cholesky(cov.double()).to(mean.dtype)
                key = self.key.at(purpose=f"theta.{t}")
                noise = key.normal(cohort.units, (DRAWS_PER_THETA, mean.shape[1]), mean.dtype)
                out.append(mean.unsqueeze(1) + noise @ root.mT)
        return out

    def _resampled(self, ids: Tensor) -> list[Tensor]:
        """Draws of z out of those at the returned theta, weighted anew."""
        cohort, draws = self.cohort(ids), self.draws(ids)
        models, sizes = [], []
        with torch.no_grad():
            for t, theta in enumerate(self.thetas):
                uniform = self.key.at(purpose=f"theta.{t}").uniform(cohort.units, (DRAWS_PER_THETA,))
                z, size = reweighted(self.hierarchy, self.published, theta, cohort, draws, uniform)
                models.append(z)
                sizes.append(size.cpu())
        usual = torch.stack(sizes).quantile(0.1, dim=0)
        if float(usual.min()) < DRAWS_PER_THETA:
            name = self.names[int(ids[int(usual.argmin())])]
            raise EstimateError(
                f"theta is so uncertain that the posterior of client {name!r} moves out of its own draws "
                f"({float(usual.min()):.1f} of {draws.shape[1]} still count): theta_uncertainty needs more "
                "clients or fewer parameters"
            )
        return models
