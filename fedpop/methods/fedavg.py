"""FedAvg (McMahan et al., 2017): local epochs from the server's model, then a weighted mean.

    client   w_i = w after E epochs of SGD on f_i;  sends n_i (w_i - w) and n_i
    server   w  += sum n_i (w_i - w) / sum n_i

One full-batch step is gradient descent on the pooled loss. It is FedPop's limit for a prior scale of zero:
everyone has the same head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedpop.checked import Positive
from fedpop.client.local_sgd import LocalSGD, Trained
from fedpop.client.losses import finite, training_cost
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Paced, Round
from fedpop.methods.whole import WholeModel


@dataclass(frozen=True, kw_only=True)
class FedAvg(Paced, WholeModel):
    """One model for all, phi and head alike.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        server_rate: How much of the clients' mean move the server makes; 1 by default. Above 1 it goes
            beyond it.
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
    >>> method = fp.FedAvg(model, local=fp.LocalSGD(epochs=2, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=10)
    >>> round(population.predict(0, [[1.0]]).mean.item(), 2)
    3.0
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    server_rate: Positive = 1.0

    name: ClassVar[str] = "FedAvg"
    about: ClassVar[About] = About(
        "McMahan et al., AISTATS 2017", personalised=False, instance="limit: scale 0"
    )
    guarded: ClassVar[tuple[str, ...]] = ("dw",)
    private_sums: ClassVar[tuple[str, ...]] = ("dw",)
    compressed: ClassVar[tuple[str, ...]] = ("dw",)

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w = round.broadcast["w"].expand(len(cohort), -1)
        new = self.local_model(w, cohort, round.key, round.pace)
        n, good = cohort.sizes.to(w.dtype).unsqueeze(1), finite(new.w)
        passes = self.local.steps(cohort)
        cost = training_cost(cohort, new.loss, good, passes, passes)
        return Answer(good, {"dw": n * (new.w - w), "n": n}, cost=cost)

    def local_model(self, w: Tensor, cohort: Cohort, key: Key, pace: float = 1.0) -> Trained:
        """Where each client's epochs take it from the server's w ``[C, D]``."""
        return self.train(self.local, w, cohort, key, pace=pace)

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        move = total.mean("dw", by="n")
        return server if move is None else server | {"w": server["w"] + self.server_rate * move}
