"""FedBABU (Oh et al., ICLR 2022): a shared body trained under one fixed random head, tuned when it is over.

    client   body_i = phi after E epochs of SGD on f_i, with the head z as it was given;
             sends n_i (body_i - phi) and n_i
    server   phi += sum n_i (body_i - phi) / sum n_i
    after    w_i = (phi, z) after E' epochs on f_i, body and head ("all") or the head alone; never sent

The head never learns while clients work together, so that it cannot fit the classes of those who were there
last. A client without data predicts with (phi, z). In the authors' code, read beside the paper, clients count
alike and weight decay reaches the fixed head's gradient but not the head; here means are weighted by n_i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from fedpop.checked import OneOf
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import body_loss, finite, training_cost
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel, published_w, split_w

TUNED = ("all", "head")


@dataclass(frozen=True, kw_only=True)
class FedBABU(Paced, WholeModel):
    """A body learned under a head that stays as it was given.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``. Its head should be
            a random one.
        local: How clients train the body in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01,
            one batch.
        fine_tune: How every client tunes the final model on its own data; ``fp.LocalSGD(epochs=5)`` by
            default.
        tuned: What is tuned then: "all" (the default), body and head, or the "head" alone.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (phi_i - phi), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedBABU(model, fine_tune=fp.LocalSGD(epochs=30, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=3)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    fine_tune: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=5))
    tuned: Annotated[str, OneOf(*TUNED)] = "all"

    name: ClassVar[str] = "FedBABU"
    about: ClassVar[About] = About("Oh et al., ICLR 2022", personalised=True, bounds=False)
    guarded: ClassVar[tuple[str, ...]] = ("dphi",)
    private_sums: ClassVar[tuple[str, ...]] = ("dphi",)
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, compressed=self.model.phi_layout.size)

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        return split_w(self.model, self.initial_w())

    def broadcast(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        phi = round.broadcast["phi"].expand(len(cohort), -1)
        head, loss = round.broadcast["z"].expand(len(cohort), 1, -1), body_loss(self.model, cohort.embedded)
        body = self.train(self.local, phi, cohort, round.key, aux=head, loss=loss, pace=round.pace)
        n, good, passes = cohort.sizes.to(phi.dtype).unsqueeze(1), finite(body.w), self.local.steps(cohort)
        cost = training_cost(cohort, body.loss, good, passes, passes)
        return Answer(good, {"dphi": n * (body.w - phi), "n": n}, cost=cost)

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        move = total.mean("dphi", by="n")
        return server if move is None else server | {"phi": server["phi"] + move}

    def publish(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        key = key.at(purpose="fine-tune")
        if self.tuned == "all":
            w = published_w(published, len(cohort))
            return split_w(self.model, self.train(self.fine_tune, w, cohort, key).w)
        z = published["z"].expand(len(cohort), -1)
        return {"z": self.train_head(self.fine_tune, published["phi"], z, cohort, key)}
