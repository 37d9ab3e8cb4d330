"""FedRep (Collins et al., 2021): a shared body, heads fitted locally and never sent.

    client   head_i fitted with the body frozen (epochs of SGD, or exactly where that is possible);
             then body_i = phi after epochs of SGD with head_i frozen;  sends n_i (body_i - phi) and n_i
    server   phi += sum n_i (body_i - phi) / sum n_i   (or an optimiser on that as a gradient)

It is FedPop's limit for an infinite prior scale and temperature zero: nothing is shared between heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.algorithms.base import About, Facts, Info, Message, Tensors, sent
from fedpop.algorithms.whole import WholeModel, cost, finite, kept, mean_move, require_data
from fedpop.channel import Channel
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import body_loss
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.models.local import LinearLikelihood
from fedpop.server.optimisers import Optimiser
from fedpop.server.start import SpectralStart, applies, natural_units
from fedpop.server.state import prefixed, unprefixed

HEADS = ("sgd", "exact")


@dataclass(frozen=True, kw_only=True)
class FedRep(WholeModel):
    """A shared representation with private heads.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> clients = [(x, 2 * x[:, 0]), (x, 4 * x[:, 0])]
    >>> population = fp.FedRep(model, heads="exact").fit(clients, rounds=2)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    heads: str = "sgd"
    head: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))
    body: LocalSGD = field(default_factory=LocalSGD)
    phi_step: Optimiser | None = None
    start: str = "random"
    spectral: SpectralStart = field(default_factory=SpectralStart)

    name: ClassVar[str] = "FedRep"
    about: ClassVar[About] = About(
        "Collins et al., ICML 2021", personalised=True, instance="limit: scale infinite, temperature 0"
    )
    private: ClassVar[tuple[str, ...]] = ("z",)
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads not in HEADS:
            raise SettingsError(f"heads are fitted by {' or '.join(HEADS)}, not {self.heads!r}")
        exact = self.model.linear and self.model.likelihood.name == "normal"
        if self.heads == "exact" and not exact:
            raise SettingsError("exact heads need a linear head with a normal likelihood")
        if self.start not in ("random", "spectral"):
            raise SettingsError(f"start is 'random' or 'spectral', not {self.start!r}")
        if self.start == "spectral" and not applies(self.model):
            raise SettingsError("a spectral start needs a linear backbone and head without bias")

    @property
    def label(self) -> str:
        # From the same start as FedSOUL or not: the two are different baselines.
        return "FedRep-spectral" if self.start == "spectral" else "FedRep"

    @property
    def phases(self) -> tuple[str, ...]:
        return ("moments", "spectral", "train") if self.start == "spectral" else ("train",)

    @property
    def compressed_size(self) -> int:
        return self.model.phi_layout.size

    def init(self, facts: Facts, key: Key) -> Tensors:
        return self._server(self.model.initial_phi())

    def _server(self, phi: Tensor) -> Tensors:
        server = {"phi": phi, "z": self.model.initial_z(), "unit": natural_units(self.model, phi)}
        return server | (prefixed("phi.", self.phi_step.init(phi)) if self.phi_step else {})

    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        if phase == "train":
            return {"phi": server["phi"], "z": server["z"]}
        return {"whitener": server["whitener"]} if phase == "spectral" else {}

    def enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"z": broadcast["z"].expand(len(ids), -1).clone()}

    def local_round(
        self,
        phase: str,
        broadcast: Tensors,
        cohort: Cohort,
        local: Tensors,
        channel: Channel,
        key: Key,
    ) -> tuple[Tensors, Message, Info]:
        if phase != "train":
            sums = self.spectral.local(phase, self.model, broadcast, cohort, channel)
            return local, Message(sums, len(cohort)), Info()
        phi = broadcast["phi"]
        z = self.fit_head(phi, cohort, local["z"], key, dropout=True)
        start = phi.expand(len(cohort), -1)
        loss = body_loss(self.model, cohort.embedded)
        body = self.train(self.body, start, cohort, key.at(purpose="body"), aux=z.unsqueeze(1), loss=loss)
        n = cohort.sizes.to(phi.dtype).unsqueeze(1)
        moves = {"dphi": n * (body.w - start), "n": n}
        good, message = sent(channel, cohort, finite(body.w, z), moves)
        examples, steps = int(cohort.sizes.sum()), self.body.steps(cohort)
        head_steps = examples * (1 if self.heads == "exact" else self.head.epochs)
        # Heads are fitted on features computed once: a forward pass is a third.
        info = cost(cohort, body.loss, good, examples / 3 + steps, head_steps + steps)
        return {"z": kept(good, z, local["z"])}, message, info

    def fit_head(self, phi: Tensor, cohort: Cohort, z: Tensor, key: Key, dropout: bool = False) -> Tensor:
        """Heads ``[C, d]`` at this body: least squares (of least norm), or epochs of SGD."""
        if self.heads == "sgd":
            return self.train_head(self.head, phi, z, cohort, key, dropout=dropout)
        with torch.no_grad():
            rows = self.model.dropout_keys(cohort, key) if dropout else None
            local = self.model.bind(phi, self.model.features(phi, cohort, rows), cohort)
            assert isinstance(local, LinearLikelihood)
            f, y = local.features.double(), local.y.double()
            out: Tensor = (torch.linalg.pinv(f) @ y).mT.flatten(1).to(phi.dtype)
            return out

    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        if phase == "moments":
            assert total is not None
            return server | {"whitener": self.spectral.whitener(total.sums)}
        if phase == "spectral":
            assert total is not None
            width = self.model.z_layout.size
            return self._server(self.spectral.phi(total.sums, server["whitener"], server["phi"], width))
        step = mean_move(total, "dphi")
        if step is None:
            return server
        if self.phi_step is None:
            return server | {"phi": server["phi"] + step}
        state = unprefixed("phi.", server)
        phi, state = self.phi_step.step(
            server["phi"], step / self.body.rate, state, server["unit"], key.round, facts.rounds
        )
        return server | {"phi": phi} | prefixed("phi.", state)

    def publish(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is None:
            require_data(cohort, self, "the body is shared, but its head would be as it was given")
            local = {"z": published["z"].expand(len(cohort), -1)}
        return {"z": self.fit_head(published["phi"], cohort, local["z"], key)}
