"""What methods with point estimates of w = (phi, z) share: one flat vector on the server, and predictions
from a client's own model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpop.client.local_sgd import Direction, LocalSGD, Loss, Pull, Trained
from fedpop.client.losses import head_loss, joint_loss, plug_in, score_point
from fedpop.errors import DataError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm, Facts, Footprint, mean_loss
from fedpop.models.base import Model
from fedpop.models.local import LinearLikelihood
from fedpop.models.predictive import Predictive
from fedpop.models.probe import ANY_ROWS


def split_w(model: Model, w: Tensor) -> Tensors:
    """phi and z of flat vectors w ``[..., D]``."""
    size = model.phi_layout.size
    return {"phi": w[..., :size], "z": w[..., size:]}


def join_w(phi: Tensor, z: Tensor) -> Tensor:
    """The flat vectors w ``[..., D]`` of which these are the parts."""
    return torch.cat((phi, z), dim=-1)


def published_w(published: Tensors, clients: int) -> Tensor:
    """The published w for each of so many clients, ``[C, D]``."""
    return join_w(published["phi"], published["z"]).expand(clients, -1)


def towards(strength: float) -> Pull:
    """The gradient of strength/2 norm(w - aux)^2."""

    def pull(w: Tensor, aux: Tensor) -> Tensor:
        return strength * (w - aux)

    return pull


def require_pull(name: str, strength: float, sgd: LocalSGD, whose: str = "") -> None:
    """Raise unless this pull towards a centre is one, and steps along it alone come to rest."""
    largest = 2 * (1 + sgd.momentum)  # of explicit steps with momentum on a quadratic
    if sgd.rate * strength > largest:
        both = sgd.rate * strength
        raise SettingsError(
            f"{whose}rate {sgd.rate:g} x {name} {strength:g} = {both:g}: steps along this pull "
            f"are unstable above {largest:g}; take a {whose}rate below {largest / strength:.3g}, or a "
            f"smaller {name}"
        )


def require_data(cohort: Cohort, method: Algorithm, why: str) -> None:
    """Raise for clients without data, where a method has nothing to predict with for them."""
    if len(cohort) and int(cohort.sizes.min()) == 0:
        raise DataError(f"{method.label} has no model for a client without data that never took part: {why}")


@dataclass(frozen=True, kw_only=True)
class WholeModel(Algorithm):
    """The server holds one w = (phi, z); subclasses say how it moves and what a client predicts with."""

    @property
    def footprint(self) -> Footprint:
        # Where a client stands, its velocity, its gradient, what it sends.
        return replace(super().footprint, phi_copies=4)

    @property
    def size(self) -> int:
        return self.model.phi_layout.size + self.model.z_layout.size

    def initial_w(self) -> Tensor:
        """The model as it was given."""
        return torch.cat((self.model.initial_phi(), self.model.initial_z()))

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        return {"w": self.initial_w()}

    def broadcast(self, server: Tensors) -> Tensors:
        return {"w": server["w"]}

    def train(
        self,
        local: LocalSGD,
        w: Tensor,
        cohort: Cohort,
        key: Key,
        *,
        aux: Tensor | None = None,
        loss: Loss | None = None,
        direction: Direction | None = None,
        pull: Pull | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
        plain: int = 0,
        pace: float = 1.0,
        shuffle: bool = False,
    ) -> Trained:
        """Local steps from w ``[C, D]`` on the mean loss of (phi, z), unless another one is given, at the
        round's ``pace``."""
        return local.run(
            loss or joint_loss(self.model, cohort.embedded),
            w,
            w[:, :0] if aux is None else aux,
            cohort.x,
            cohort,
            key,
            pace * local.rate,
            most_rows=self.model.rows_side_by_side,
            direction=direction,
            pull=pull,
            project=project,
            plain=plain,
            shuffle=shuffle,
        )

    def train_head(
        self,
        sgd: LocalSGD,
        phi: Tensor,
        z: Tensor,
        cohort: Cohort,
        key: Key,
        *,
        dropout: bool = False,
        pace: float = 1.0,
    ) -> Tensor:
        """Heads ``[C, d]`` after epochs of SGD from z at a body that is frozen.

        Features are computed once, so a mask of the body's dropout serves all epochs.
        """
        if cohort.longest == 0:
            return z
        with torch.no_grad():
            rows = self.model.dropout_keys(cohort, key) if dropout else None
            features, own = self.model.features(phi, cohort, rows), key.at(purpose="head")
            local = self.model.bind(phi, features, cohort) if self.model.linear else None
            if isinstance(local, LinearLikelihood):
                return sgd.run_heads(local, z, cohort, own, pace * sgd.rate)
            loss, rate = head_loss(self.model, phi), pace * sgd.rate
            most = ANY_ROWS if self.model.heads_side_by_side else 0
            return sgd.run(loss, z, z[:, :0], features, cohort, own, rate, dropout=dropout, most_rows=most).w

    def metrics(self, server: Tensors, cost: Mapping[str, float]) -> dict[str, float | None]:
        return {"loss": mean_loss(cost)}

    def publish(self, server: Tensors) -> Tensors:
        return split_w(self.model, server["w"])

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        return {"z": published["z"].expand(len(cohort), -1)}

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        phi = personal["phi"][0] if "phi" in personal else published["phi"]
        return plug_in(self.model, phi, personal["z"], x, key)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        personal = self.personalise(published, cohort, local, key)
        if "phi" not in personal:
            return score_point(self.model, published["phi"], personal["z"], held_out)
        own = [
            score_point(self.model, personal["phi"][c], personal["z"][c : c + 1], one)[0]
            for c, one in enumerate(held_out.one_by_one())
        ]
        return torch.cat(own), held_out.sizes.double()
