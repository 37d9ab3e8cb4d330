"""LG-FedAvg (Liang et al., 2020): private bodies under a shared head, FedPer's mirror image.

    client   (body_i, head_i) after E epochs of SGD on f_i, from (body_i, z);  keeps body_i,
             sends n_i (head_i - z) and n_i
    server   z += sum n_i (head_i - z) / sum n_i

A client predicts with its own body and the server's head. One that took part in no round trains a body under
that head, which stays fixed, from the body as it was given. The authors' code starts from a model that FedAvg
trained and counts clients alike; here the model starts as it was given (give FedAvg's to do the same), and
the mean is weighted by n_i.
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
from fedpop.client.losses import body_loss
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(WholeModel):
    """A shared head over private bodies.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> body, head = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    >>> for layer in (body, head):
    ...     _ = torch.nn.init.ones_(layer.weight)
    >>> model = fp.Composition(body, head, fp.likelihoods.Normal(1.0))
    >>> method = fp.LGFedAvg(model, local=fp.LocalSGD(epochs=5, rate=0.1))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=50)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))
    """How a client's body is trained that took part in no round."""

    name: ClassVar[str] = "LG-FedAvg"
    about: ClassVar[About] = About("Liang et al., 2020", personalised=True)
    private: ClassVar[tuple[str, ...]] = ("phi",)
    compressed: ClassVar[tuple[str, ...]] = ("dz",)

    @property
    def compressed_size(self) -> int:
        return self.model.z_layout.size

    def init(self, facts: Facts, key: Key) -> Tensors:
        return parts(self.model, self.initial_w())

    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        return {"z": server["z"]}

    def enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"phi": self.model.initial_phi().expand(len(ids), -1).clone()}

    def local_round(
        self,
        phase: str,
        broadcast: Tensors,
        cohort: Cohort,
        local: Tensors,
        channel: Channel,
        key: Key,
    ) -> tuple[Tensors, Message, Info]:
        z = broadcast["z"].expand(len(cohort), -1)
        new = self.train(self.local, joined(local["phi"], z), cohort, key)
        own = parts(self.model, new.w)
        n = cohort.sizes.to(z.dtype).unsqueeze(1)
        good, message = sent(channel, cohort, finite(new.w), {"dz": n * (own["z"] - z), "n": n})
        passes = self.local.steps(cohort)
        info = cost(cohort, new.loss, good, passes, passes)
        return {"phi": kept(good, own["phi"], local["phi"])}, message, info

    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        move = mean_move(total, "dz")
        return server if move is None else server | {"z": server["z"] + move}

    def publish(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        z = published["z"].expand(len(cohort), -1)
        if local is not None:
            return {"phi": local["phi"], "z": z}
        require_data(cohort, self, "the head is shared, but its body would be as it was given")
        phi = published["phi"].expand(len(cohort), -1)
        loss = body_loss(self.model, cohort.embedded)
        own = self.train(
            self.newcomer, phi, cohort, key.at(purpose="newcomer"), aux=z.unsqueeze(1), loss=loss
        )
        return {"phi": own.w, "z": z}
