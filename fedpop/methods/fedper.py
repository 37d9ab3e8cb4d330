"""FedPer (Arivazhagan et al., 2019): a shared body under private heads, both trained together.

    client   (body_i, head_i) after E epochs of SGD on f_i, from (phi, head_i);  keeps head_i,
             sends n_i (body_i - phi) and n_i
    server   phi += sum n_i (body_i - phi) / sum n_i

A client predicts with the server's body and its own head. One that took part in no round trains a head on
that body, frozen, from the head as it was given. The rule is the paper's; its authors' code was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import finite, training_cost
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel, join_w, require_data, split_w


@dataclass(frozen=True, kw_only=True)
class SharedPart(Paced, WholeModel):
    """One of phi and z is ``shared``, the other is each client's ``own``; both are trained together.
    LG-FedAvg has them the other way round."""

    local: LocalSGD = field(default_factory=LocalSGD)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))
    """How a client's own part is trained that took part in no round."""

    shared: ClassVar[str]
    own: ClassVar[str]

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, compressed=self.initial_w_parts()[self.shared].shape[0])

    def initial_w_parts(self) -> Tensors:
        """phi and z as they were given."""
        return split_w(self.model, self.initial_w())

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        return self.initial_w_parts()

    def broadcast(self, server: Tensors) -> Tensors:
        return {self.shared: server[self.shared]}

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {self.own: self.initial_w_parts()[self.own].expand(len(units), -1).clone()}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        shared = round.broadcast[self.shared].expand(len(cohort), -1)
        both = {self.shared: shared, self.own: local[self.own]}
        w = join_w(both["phi"], both["z"])
        new = self.train(self.local, w, cohort, round.key, pace=round.pace)
        after = split_w(self.model, new.w)
        n, good, passes = cohort.sizes.to(shared.dtype).unsqueeze(1), finite(new.w), self.local.steps(cohort)
        vectors = {f"d{self.shared}": n * (after[self.shared] - shared), "n": n}
        cost = training_cost(cohort, new.loss, good, passes, passes)
        return Answer(good, vectors, {self.own: after[self.own]}, cost)

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        move = total.mean(f"d{self.shared}", by="n")
        return server if move is None else server | {self.shared: server[self.shared] + move}

    def publish(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}


@dataclass(frozen=True, kw_only=True)
class FedPer(SharedPart):
    """A shared body with private heads, trained jointly.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        newcomer: How a client that took part in no round fits its head; ``fp.LocalSGD(epochs=10)``
            by default.
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
    >>> method = fp.FedPer(model, local=fp.LocalSGD(epochs=10, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=3)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    name: ClassVar[str] = "FedPer"
    about: ClassVar[About] = About("Arivazhagan et al., 2019", personalised=True, bounds=False)
    private: ClassVar[tuple[str, ...]] = ("z",)
    guarded: ClassVar[tuple[str, ...]] = ("dphi",)
    private_sums: ClassVar[tuple[str, ...]] = ("dphi",)
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)
    shared: ClassVar[str] = "phi"
    own: ClassVar[str] = "z"

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is not None:
            return {"z": local["z"]}
        require_data(cohort, self, "the body is shared, but its head would be as it was given")
        z = published["z"].expand(len(cohort), -1)
        return {"z": self.train_head(self.newcomer, published["phi"], z, cohort, key.at(purpose="newcomer"))}
