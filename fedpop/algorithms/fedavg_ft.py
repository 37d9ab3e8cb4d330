"""FedAvg with fine-tuning: FedAvg's model, then each client's own epochs on its own data.

    client   w_i = w after E' epochs of SGD on f_i, from the final w; never sent

Training is FedAvg's, to the bit; only what a client predicts with differs. A client without data keeps w.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.algorithms.base import Tensors
from fedpop.algorithms.fedavg import FedAvg
from fedpop.algorithms.local_sgd import LocalSGD
from fedpop.algorithms.point import joint_loss, plug_in, score_point
from fedpop.evaluation.predictive import Predictive
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.runtime.random import Key


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    """One model for all, then tuned by every client for itself.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedAvgFT(model, fine_tune=fp.LocalSGD(epochs=30, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=3)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    fine_tune: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))

    name: ClassVar[str] = "FedAvg-FT"

    def tuned(self, published: Tensors, cohort: Cohort, key: Key) -> Tensor:
        """Every client's own (phi, z) ``[C, D]``."""
        w = torch.cat((published["phi"], published["z"])).expand(len(cohort), -1)
        key = key.at(purpose="fine-tune")
        loss = joint_loss(self.model, cohort.embedded)
        return self.fine_tune.run(loss, w, w[:, :0], cohort.x, cohort, key, batched=self.model.batchable)

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        w = self.tuned(published, cohort, key)
        size = self.model.phi_layout.size
        return {"phi": w[:, :size], "z": w[:, size:]}

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        return plug_in(self.model, personal["phi"][0], personal["z"], x, key)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> Tensors:
        w = self.tuned(published, cohort, key)
        size = self.model.phi_layout.size
        total = torch.zeros((), dtype=torch.float64, device=w.device)
        for c in range(len(cohort)):
            one = held_out.select(torch.tensor([c], device=w.device))
            total = total + score_point(self.model, w[c, :size], w[c : c + 1, size:], one)["log_prob"]
        return {"log_prob": total, "examples": held_out.sizes.sum().double()}
