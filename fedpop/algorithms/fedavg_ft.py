"""FedAvg with fine-tuning: FedAvg's model, then each client's own epochs on its own data.

    client   w_i = w after E' epochs of SGD on f_i, from the final w; never sent

Training is FedAvg's, to the bit; only what a client predicts with differs. A client without data keeps w.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fedpop.algorithms.base import About
from fedpop.algorithms.fedavg import FedAvg
from fedpop.algorithms.whole import published_w, split_w
from fedpop.channel import Tensors
from fedpop.client.local_sgd import LocalSGD
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key


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
    about: ClassVar[About] = About("McMahan et al., AISTATS 2017; tuned locally", personalised=True)

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        w = published_w(published, len(cohort))
        return split_w(self.model, self.train(self.fine_tune, w, cohort, key.at(purpose="fine-tune")).w)
