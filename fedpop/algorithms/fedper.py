"""FedPer (Arivazhagan et al., 2019): a shared body under private heads, both trained together.

    client   (body_i, head_i) after E epochs of SGD on f_i, from (phi, head_i);  keeps head_i,
             sends n_i (body_i - phi) and n_i
    server   phi += sum n_i (body_i - phi) / sum n_i

A client predicts with the server's body and its own head. One that took part in no round trains a head on
that body, frozen, from the head as it was given. The rule is the paper's; its authors' code was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedpop.algorithms.base import About, Facts, Info, Message, Tensors, sent
from fedpop.algorithms.whole import (
    WholeModel,
    cost,
    finite,
    joined,
    kept,
    mean_move,
    parts,
    require_data,
)
from fedpop.channel import Channel
from fedpop.client.local_sgd import LocalSGD
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key


@dataclass(frozen=True, kw_only=True)
class FedPer(WholeModel):
    """A shared body with private heads, trained jointly.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedPer(model, local=fp.LocalSGD(epochs=10, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=3)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))
    """How a client's head is trained that took part in no round."""

    name: ClassVar[str] = "FedPer"
    about: ClassVar[About] = About("Arivazhagan et al., 2019", personalised=True, bounds=False)
    private: ClassVar[tuple[str, ...]] = ("z",)
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)

    @property
    def compressed_size(self) -> int:
        return self.model.phi_layout.size

    def init(self, facts: Facts, key: Key) -> Tensors:
        return parts(self.model, self.initial_w())

    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        return {"phi": server["phi"]}

    def enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"z": self.model.initial_z().expand(len(ids), -1).clone()}

    def local_round(
        self,
        phase: str,
        broadcast: Tensors,
        cohort: Cohort,
        local: Tensors,
        channel: Channel,
        key: Key,
    ) -> tuple[Tensors, Message, Info]:
        phi = broadcast["phi"].expand(len(cohort), -1)
        new = self.train(self.local, joined(phi, local["z"]), cohort, key)
        own = parts(self.model, new.w)
        n = cohort.sizes.to(phi.dtype).unsqueeze(1)
        good, message = sent(channel, cohort, finite(new.w), {"dphi": n * (own["phi"] - phi), "n": n})
        passes = self.local.steps(cohort)
        info = cost(cohort, new.loss, good, passes, passes)
        return {"z": kept(good, own["z"], local["z"])}, message, info

    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        move = mean_move(total, "dphi")
        return server if move is None else server | {"phi": server["phi"] + move}

    def publish(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is not None:
            return {"z": local["z"]}
        require_data(cohort, self, "the body is shared, but its head would be as it was given")
        z = published["z"].expand(len(cohort), -1)
        return {"z": self.train_head(self.newcomer, published["phi"], z, cohort, key.at(purpose="newcomer"))}
