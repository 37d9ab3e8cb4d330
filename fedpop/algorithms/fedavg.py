"""FedAvg (McMahan et al., 2017): local epochs from the server's model, then a weighted mean.

    client   w_i = w after E epochs of SGD on f_i;  sends n_i (w_i - w) and n_i
    server   w  += sum n_i (w_i - w) / sum n_i

One full-batch step is gradient descent on the pooled loss. It is FedPop's limit for a prior scale of zero:
everyone has the same head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.algorithms.base import (
    Algorithm,
    Facts,
    Info,
    Message,
    Tensors,
    leave_out,
    mean_loss,
    weighted_sum,
)
from fedpop.algorithms.local_sgd import LocalSGD
from fedpop.algorithms.point import joint_loss, mean_log_prob, plug_in, score_point
from fedpop.channel import Channel
from fedpop.evaluation.predictive import Predictive
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.runtime.random import Key


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """One model for all, phi and head alike.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedAvg(model, local=fp.LocalSGD(epochs=2, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=10)
    >>> round(population.predict(0, [[1.0]]).mean.item(), 2)
    3.0
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    server_rate: float = 1.0

    name: ClassVar[str] = "FedAvg"

    @property
    def phi_copies(self) -> int:
        return 4  # where a client stands, its velocity, its gradient, what it sends

    def init(self, facts: Facts, key: Key) -> Tensors:
        return {"w": torch.cat((self.model.initial_phi(), self.model.initial_z()))}

    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        return {"w": server["w"]}

    def local_round(
        self,
        phase: str,
        broadcast: Tensors,
        cohort: Cohort,
        local: Tensors,
        channel: Channel,
        key: Key,
    ) -> tuple[Tensors, Message, Info]:
        w = broadcast["w"].expand(len(cohort), -1)
        loss = joint_loss(self.model, cohort.embedded)
        new = self.local.run(loss, w, w[:, :0], cohort.x, cohort, key, batched=self.model.batchable)
        n = cohort.sizes.to(w.dtype)
        good = torch.isfinite(new).all(1)
        delta = channel("dw", n.unsqueeze(1) * (new - w))
        count = channel("n", n.unsqueeze(1))
        sums = {
            "dw": weighted_sum(delta, cohort.weights, good),
            "n": weighted_sum(count, cohort.weights, good),
        }
        passes = self.local.steps(cohort)
        value = mean_log_prob(self.model, w, cohort)
        info = Info(
            {
                "log_likelihood": float((value * n)[good].sum()),
                "examples": float(n[good].sum()),
                "backbone_passes": float(passes),
                "head_steps": float(passes),
            },
            leave_out(good, cohort),
        )
        return {}, Message(sums, int(good.sum())), info

    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        if total is None or total.count == 0 or float(total.sums["n"]) == 0:
            return server
        step = self.server_rate * total.sums["dw"] / total.sums["n"]
        return {"w": server["w"] + step}

    def metrics(self, server: Tensors, info: Info) -> dict[str, float | None]:
        return {"loss": mean_loss(info)}

    def publish(self, server: Tensors) -> Tensors:
        size = self.model.phi_layout.size
        return {"phi": server["w"][:size], "z": server["w"][size:]}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        return {"z": published["z"].expand(len(cohort), -1)}

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        return plug_in(self.model, published["phi"], personal["z"], x, key)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> Tensors:
        z: Tensor = published["z"].expand(len(cohort), -1)
        return score_point(self.model, published["phi"], z, held_out)
