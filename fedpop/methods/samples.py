"""What Bayesian methods about the whole w = (phi, z) share: models stored by the server, and predictions that
average over them.

None of them is personalised: every client, old or new, has the same predictive distribution

    p(y | x) = 1/S sum_s p(y | x, w_s),

each w_s with its own phi. It asks for S networks where a prediction is made, which is the M (d + d_phi) of
the feature table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, Few, Whole
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import Facts
from fedpop.methods.whole import WholeModel, split_w
from fedpop.models.base import Model
from fedpop.models.likelihoods import Params
from fedpop.models.predictive import Predictive

_SLOT = "sample."


def outputs_of_networks(model: Model, samples: Tensor, x: Inputs) -> Tensor:
    """Head outputs ``[S, n, o]`` of whole models ``[S, D]``, each with its own phi."""
    each = split_w(model, samples)
    with torch.no_grad():
        if not model.phi_layout.size:
            return model.outputs_at(each["phi"][0], each["z"], x)
        pairs = zip(each["phi"], each["z"], strict=True)
        return torch.cat([model.outputs_at(phi, z.unsqueeze(0), x) for phi, z in pairs])


def params_of_networks(model: Model, samples: Tensor) -> Params:
    """The likelihood's own parameters in each of whole models, ``[S, 1, 1]``."""
    own = [model.params(phi) for phi in split_w(model, samples)["phi"]]
    return {name: torch.stack([p[name] for p in own]).reshape(-1, 1, 1) for name in own[0]}


def log_mean_of_networks(model: Model, samples: Tensor, cohort: Cohort) -> Tensor:
    """log of the mean over whole models of p(y_j | x_j, w), of every example of a cohort."""
    each, log_prob = split_w(model, samples), []
    with torch.no_grad():
        for phi, z in zip(each["phi"], each["z"], strict=True):
            log_prob.append(model.log_prob(phi, z.unsqueeze(0), model.features(phi, cohort), cohort.y))
    return (torch.logsumexp(torch.cat(log_prob), 0) - math.log(len(log_prob))).double()


@dataclass(frozen=True, kw_only=True)
class Ensemble(WholeModel):
    """The server holds w and up to ``samples`` models, one tensor each: those that stay are not copied."""

    samples: Few = 50

    uncertainty: ClassVar[bool] = True

    def members(self, server: Tensors) -> Tensor:
        """The models stored, ``[S, D]``; before there is any, the server's own."""
        stored = [server[f"{_SLOT}{s}"] for s in range(self.samples) if f"{_SLOT}{s}" in server]
        return torch.stack(stored or [server["w"]])

    def put(self, slot: int, w: Tensor) -> Tensors:
        """The entry of the server's state for a member."""
        return {f"{_SLOT}{slot}": w}

    def publish(self, server: Tensors) -> Tensors:
        samples = self.members(server)
        stored = sum(name.startswith(_SLOT) for name in server)
        count = torch.tensor(stored, device=samples.device)
        return split_w(self.model, samples.mean(0)) | {"samples": samples, "count": count}

    def outputs(self, samples: Tensor, x: Inputs) -> Tensor:
        """Head outputs ``[S, n, o]``, each sample with its own phi."""
        return outputs_of_networks(self.model, samples, x)

    def likelihood_params(self, samples: Tensor) -> Params:
        """The likelihood's own parameters in each sample, ``[S, 1, 1]``."""
        return params_of_networks(self.model, samples)

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        samples = published["samples"]
        eta, params = self.outputs(samples, x), self.likelihood_params(samples)
        return Predictive(eta, self.model.likelihood, params, key, plug_in=False)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        mixture = log_mean_of_networks(self.model, published["samples"], held_out)
        own = mixture.new_zeros(len(held_out)).index_add(0, held_out.owner, mixture)
        return own, held_out.sizes.double()


@dataclass(frozen=True, kw_only=True)
class PosteriorSamples(Ensemble):
    """A Markov chain on w, of which the server keeps a ring of states after ``burn_in`` rounds, one in
    ``thin`` rounds, the oldest of them overwritten.

    Without more said, half of the rounds are burn-in (the usual caution with a chain whose start is a
    network's random weights), and the ring is spread over all the others. A run that is extended writes over
    it in the same way: half of the further rounds, then the others.
    """

    burn_in: Whole | None = None
    thin: Count | None = None

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        if self._burn_in(facts) >= facts.rounds:
            raise SettingsError(
                f"burn_in={self.burn_in} leaves none of {facts.rounds} rounds to keep samples of; run more "
                "rounds, or burn in for fewer"
            )
        return super().init(facts, key, known)

    def _burn_in(self, facts: Facts) -> int:
        return sum(facts.stage) // 2 if self.burn_in is None else max(self.burn_in, facts.start)

    def moved(self, server: Tensors, w: Tensor, facts: Facts, key: Key) -> Tensors:
        """The server's state after its chain moved to w in round ``key.round``."""
        burn_in = self._burn_in(facts)
        every = self.thin or max(1, (facts.rounds - burn_in) // self.samples)
        since = key.round - burn_in
        kept = self.put(since // every % self.samples, w) if since >= 0 and since % every == 0 else {}
        return server | {"w": w} | kept
