"""SCAFFOLD (Karimireddy et al., ICML 2020), option II: control variates against the drift of local steps.

    client   y_i = w;  T_i times: y_i -= eta (grad f_i(y_i) - c_i + c)
             c_i+ = c_i - c + (w - y_i) / (T_i eta);  sends y_i - w and c_i+ - c_i
    server   w += server_rate (mean of y_i - w);  c += (1/b) sum (c_i+ - c_i), so c is the mean of all c_i

Clients count alike, whatever their sizes: the objective is (1/b) sum f_i. T_i is the client's own number of
steps, and they are plain: with momentum (w - y_i) / (T_i eta) would not be a mean of gradients. A client
without data takes no step and its c_i stays 0. Under 1/p_i weights the mean of y_i - w is the unbiased one;
c takes the plain sum under every rule. c_i is kept by the client, but it is no secret: the changes that it
sends add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Positive
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import finite, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Paced, Remembers, Round
from fedpop.methods.whole import WholeModel


@dataclass(frozen=True, kw_only=True)
class SCAFFOLD(Paced, WholeModel, Remembers):
    """One model for all, without the drift of local steps.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round, without momentum; ``fp.LocalSGD()`` by default: one epoch,
            rate 0.01, one batch.
        server_rate: How much of the clients' mean move the server makes; 1 by default. Above 1 it goes
            beyond it.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Stays "identity": no compressed form of the method was published.
        clip: The largest norm of y_i - w, and of c_i+ - c_i; longer ones are shortened, which biases their
            mean. A client keeps the c_i that the server knows of, so that c stays the mean of them. None
            (the default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.SCAFFOLD(model, local=fp.LocalSGD(epochs=5, rate=0.5))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=20)
    >>> round(population.predict(0, [[1.0]]).mean.item(), 2)
    3.0
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    server_rate: Positive = 1.0

    name: ClassVar[str] = "SCAFFOLD"
    guarded: ClassVar[tuple[str, ...]] = ("dw", "dc")
    plain_sums: ClassVar[tuple[str, ...]] = ("dc",)
    clipped: ClassVar[tuple[str, ...]] = ("dw", "dc")
    remembers: ClassVar[tuple[str, ...]] = ("dc",)
    as_it_is: ClassVar[str] = "no such form of it was published"
    about: ClassVar[About] = About("Karimireddy et al., ICML 2020", personalised=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.momentum:
            raise SettingsError(
                f"SCAFFOLD needs plain local steps, not momentum {self.local.momentum:g}: its control "
                "variates are means of gradients along them; use LocalSGD(momentum=0)"
            )

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, phi_copies=6)

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        w = self.initial_w()
        return {"w": w, "c": torch.zeros_like(w)}

    def broadcast(self, server: Tensors) -> Tensors:
        return {"w": server["w"], "c": server["c"]}

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"c": broadcast["c"].new_zeros((len(units), self.size))}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w, c = round.broadcast["w"].expand(len(cohort), -1), round.broadcast["c"]
        shift = c - local["c"]
        new = self.train(self.local, w, cohort, round.key, aux=shift, pull=_shifted, pace=round.pace)
        updates = self.local.updates(cohort).unsqueeze(1)
        moved = (w - new.w) / (updates.clamp(min=1) * (round.pace * self.local.rate)) - shift
        own = torch.where(updates > 0, moved, local["c"])
        good, passes = finite(new.w, own), self.local.steps(cohort)
        vectors = {"dw": new.w - w, "dc": own - local["c"]}
        kept = {"c": own} if self.clip is None else {"c": local["c"]}  # what it sends is not yet known
        return Answer(good, vectors, kept, training_cost(cohort, new.loss, good, passes, passes))

    @property
    def remembered(self) -> tuple[str, ...]:
        return () if self.clip is None else self.remembers

    def after_send(self, local: Tensors, seen: Tensors) -> Tensors:
        return {"c": local["c"] + seen["dc"]}

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        if total.count == 0:
            return server
        move = total.estimate("dw", server["w"]) / facts.clients
        c = server["c"] + total.plain_sum("dc", server["c"]) / facts.clients
        return {"w": server["w"] + self.server_rate * move, "c": c}


def _shifted(w: Tensor, aux: Tensor) -> Tensor:
    return aux
