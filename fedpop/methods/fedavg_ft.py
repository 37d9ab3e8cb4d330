"""FedAvg with fine-tuning: FedAvg's model, then each client's own epochs on its own data.

    client   w_i = w after E' epochs of SGD on f_i, from the final w; never sent

Training is FedAvg's, to the bit; only what a client predicts with differs. A client without data keeps w.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fedpop.client.local_sgd import LocalSGD
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import About
from fedpop.methods.fedavg import FedAvg
from fedpop.methods.whole import published_w, split_w


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    """One model for all, then tuned by every client for itself.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        server_rate: How much of the clients' mean move the server makes; 1 by default. Above 1 it goes
            beyond it.
        fine_tune: How every client tunes the final model on its own data; ``fp.LocalSGD(epochs=10)``
            by default.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (w_i - w), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

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
