"""FedRep (Collins et al., 2021): a shared body, heads fitted locally and never sent.

    client   head_i fitted with the body frozen (epochs of SGD, or exactly where that is possible);
             then body_i = phi after epochs of SGD with head_i frozen;  sends n_i (body_i - phi) and n_i
    server   phi += sum n_i (body_i - phi) / sum n_i   (or an optimiser on that as a gradient)

It is FedPop's limit for an infinite prior scale and temperature zero: nothing is shared between heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor

from fedpop.checked import OneOf
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import body_loss, finite, training_cost
from fedpop.errors import PrivacyError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.message.message import prefixed, unprefixed
from fedpop.methods.base import About, Asks, Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel, require_data
from fedpop.models.local import LinearLikelihood
from fedpop.questions import Question
from fedpop.questions.spectral import Spectral
from fedpop.server.optimisers import Optimiser, natural_units

HEADS = ("sgd", "exact")
STARTS = ("random", "spectral")


@dataclass(frozen=True, kw_only=True)
class FedRep(Paced, WholeModel, Asks):
    """A shared representation with private heads.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        heads: How heads are fitted in a round: "sgd" (the default) by epochs of SGD, or "exact" by least
            squares, for a linear head with a normal likelihood.
        head: The epochs of "sgd"; ``fp.LocalSGD(epochs=10)`` by default.
        body: How clients then train the body with their heads frozen; ``fp.LocalSGD()`` by default: one
            epoch, rate 0.01, one batch.
        phi_step: An optimiser of ``fp.steps`` that takes the mean move over the body's rate for a
            gradient; None (the default) makes the mean move itself.
        start: Where the body starts: "random" (the default) as the model was given, "spectral" or
            ``fp.steps.Spectral()`` from second moments of the data, for a linear body and a linear head
            with one output, both without bias.
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
    >>> clients = [(x, 2 * x[:, 0]), (x, 4 * x[:, 0])]
    >>> population = fp.FedRep(model, heads="exact").fit(clients, rounds=2)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    heads: Annotated[str, OneOf(*HEADS)] = "sgd"
    head: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))
    body: LocalSGD = field(default_factory=LocalSGD)
    phi_step: Optimiser | None = None
    start: Annotated[str, OneOf(*STARTS)] | Spectral = "random"

    name: ClassVar[str] = "FedRep"
    about: ClassVar[About] = About(
        "Collins et al., ICML 2021", personalised=True, instance="limit: scale infinite, temperature 0"
    )
    private: ClassVar[tuple[str, ...]] = ("z",)
    guarded: ClassVar[tuple[str, ...]] = ("dphi",)
    private_sums: ClassVar[tuple[str, ...]] = ("dphi",)
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)

    def __post_init__(self) -> None:
        super().__post_init__()
        exact = self.model.linear and self.model.likelihood.quadratic
        if self.heads == "exact" and not exact:
            raise SettingsError("exact heads need a linear head with a normal likelihood")
        self._spectral()  # raises where it does not apply

    @property
    def label(self) -> str:
        # From the same start as FedSOUL or not: the two are different baselines.
        return "FedRep" if self.start == "random" else "FedRep-spectral"

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, compressed=self.model.phi_layout.size)

    @cached_property
    def _moves_phi(self) -> dict[float, Optimiser]:
        """``phi_step`` where everyone has so many examples together; made once."""
        return {}

    def _spectral(self) -> Sequence[Question[Tensors]]:
        if self.start == "random":
            return ()
        start = self.start if isinstance(self.start, Spectral) else Spectral()
        return start.questions(self.model)

    def under_privacy(self) -> Self:
        if self.start != "random":
            raise PrivacyError("start questions see data that no budget covers; use start='random'")
        return super().under_privacy()

    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        return self._spectral()

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        phi = known["phi"] if "phi" in known else self.model.initial_phi()
        server = {"phi": phi, "z": self.model.initial_z(), "unit": natural_units(self.model, phi)}
        return server | (prefixed("phi.", self.phi_step.init(phi)) if self.phi_step else {})

    def broadcast(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"z": broadcast["z"].expand(len(units), -1).clone()}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        phi, key = round.broadcast["phi"], round.key
        z = self.fit_head(phi, cohort, local["z"], key, dropout=True, pace=round.pace)
        start = phi.expand(len(cohort), -1)
        loss = body_loss(self.model, cohort.embedded)
        now, heads = key.at(purpose="body"), z.unsqueeze(1)
        body = self.train(self.body, start, cohort, now, aux=heads, loss=loss, pace=round.pace)
        n, good = cohort.sizes.to(phi.dtype).unsqueeze(1), finite(body.w, z)
        examples, steps = cohort.examples, self.body.steps(cohort)
        head_steps = examples * (1 if self.heads == "exact" else self.head.epochs)
        # Heads are fitted on features computed once: a forward pass is a third.
        cost = training_cost(cohort, body.loss, good, examples / 3 + steps, head_steps + steps)
        return Answer(good, {"dphi": n * (body.w - start), "n": n}, {"z": z}, cost)

    def fit_head(
        self, phi: Tensor, cohort: Cohort, z: Tensor, key: Key, dropout: bool = False, pace: float = 1.0
    ) -> Tensor:
        """Heads ``[C, d]`` at this body: least squares (of least norm), or epochs of SGD."""
        if self.heads == "sgd":
            return self.train_head(self.head, phi, z, cohort, key, dropout=dropout, pace=pace)
        with torch.no_grad():
            rows = self.model.dropout_keys(cohort, key) if dropout else None
            local = self.model.bind(phi, self.model.features(phi, cohort, rows), cohort)
            assert isinstance(local, LinearLikelihood)
            f, y = local.features.double(), local.y.double()
            out: Tensor = (torch.linalg.pinv(f) @ y).mT.flatten(1).to(phi.dtype)
            return out

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        step = total.mean("dphi", by="n")
        if step is None:
            return server
        if self.phi_step is None:
            return server | {"phi": server["phi"] + step}
        state = unprefixed("phi.", server)
        if facts.examples not in self._moves_phi:
            self._moves_phi[facts.examples] = self.phi_step.for_weights(self.model.weights, facts.examples)
        phi, state = self._moves_phi[facts.examples].step(
            server["phi"], step / self.body.rate, state, server["unit"], key.round, facts.stage
        )
        return server | {"phi": phi} | prefixed("phi.", state)

    def publish(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["z"]}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is None:
            require_data(cohort, self, "the body is shared, but its head would be as it was given")
            local = {"z": published["z"].expand(len(cohort), -1)}
        return {"z": self.fit_head(published["phi"], cohort, local["z"], key)}
