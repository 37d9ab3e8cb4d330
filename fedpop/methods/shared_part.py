"""What FedPer and LG-FedAvg have in common: w = (phi, z) in two parts, one shared and one of each client's
own.

    client   (shared_i, own_i) after E epochs of SGD on f_i, from (shared, own_i);  keeps own_i,
             sends n_i (shared_i - shared) and n_i
    server   shared += sum n_i (shared_i - shared) / sum n_i

The two methods are mirror images: FedPer shares phi and LG-FedAvg shares z.
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
from fedpop.methods.base import Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel, join_w, split_w


@dataclass(frozen=True, kw_only=True)
class SharedPart(Paced, WholeModel):
    """One of phi and z is ``shared``, the other is each client's ``own``; both are trained together."""

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
