"""Every client for itself: what federation has to beat.

    client   w_i after E epochs of SGD on f_i, from where it stood;  sends nothing
    server   has nothing to do

All start from the model as it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import finite, training_cost
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Paced, Round
from fedpop.methods.whole import WholeModel, published_w, require_data, split_w


@dataclass(frozen=True, kw_only=True)
class LocalOnly(Paced, WholeModel):
    """A model of its own for every client, trained alone.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        newcomer: How a client that took part in no round trains; ``fp.LocalSGD(epochs=10)`` by default.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Stays "identity": nothing is sent.
        clip: Stays None, for the same reason.
        guard: Does nothing here, for the same reason.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.LocalOnly(model, local=fp.LocalSGD(epochs=10, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=3)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    >>> population.totals["bytes_up"]
    0.0
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))

    name: ClassVar[str] = "Local"
    as_it_is: ClassVar[str] = "they send nothing"
    about: ClassVar[About] = About(
        "no federation", personalised=True, local_steps=False, instance="limit: as FedRep, phi empty"
    )
    private: ClassVar[tuple[str, ...]] = ("w",)

    def broadcast(self, server: Tensors) -> Tensors:
        return {}

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"w": self.initial_w().expand(len(units), -1).clone()}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        new = self.train(self.local, local["w"], cohort, round.key, pace=round.pace)
        good, passes = finite(new.w), self.local.steps(cohort)
        return Answer(good, {}, {"w": new.w}, training_cost(cohort, new.loss, good, passes, passes))

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        return server

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is not None:
            return split_w(self.model, local["w"])
        require_data(cohort, self, "nothing is shared")
        start = published_w(published, len(cohort))
        return split_w(self.model, self.train(self.newcomer, start, cohort, key.at(purpose="newcomer")).w)
