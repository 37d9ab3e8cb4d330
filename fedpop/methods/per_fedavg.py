"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, 2020): a start from which one step of one's own goes far (MAML).

    client   w_i = w, then for every batch, cut into D1, D2 and D3:
                 v     = grad f_i(w_i - alpha grad f_i(w_i; D1); D2)
                 w_i  -= beta (v - alpha H v),  H = hess f_i(w_i; D3)
             sends w_i - w   (with weights "examples": n_i (w_i - w) and n_i)
    server   w += mean of w_i - w   (or the mean weighted by n_i)
    predict  w_i = w - alpha grad f_i(w) on all of one's data, once or more often; never sent

H v is a Hessian-vector product ("exact"); (grad f_i(w + delta v; D3) - grad f_i(w - delta v; D3)) / (2 delta)
("hessian-free"); or left out ("first-order", which needs no D3). With D3 = D1 the exact direction is the
gradient of the MAML loss f_i(w - alpha grad f_i(w; D1); D2), as autograd would give it. beta is the rate of
``local``; its batch is that of D1, D2 and D3 together, dealt out in turn from shuffled examples, so that they
share none. A batch with fewer examples than parts deals them out again: with two D3 = D1, and the only
example of a client that has one is D1, D2 and D3 at once, as in public code, where batches come from one
endless loader. Such a client takes part, adapted to the example it is judged by; a warning names it. A client
without examples has f_i = 0.

The means are over all active clients, as published; the public code (of pFedMe's authors; we found none of
Per-FedAvg's own) has the first-order variant only, and weights by n_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, OneOf, Positive
from fedpop.client.local_sgd import Direction, LocalSGD
from fedpop.client.losses import finite, joint_loss, slope_of, training_cost
from fedpop.errors import ModelError, SettingsError, warn_user
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, ChecksData, Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel, published_w, split_w
from fedpop.models.modules import RowKeys, inside_transform

VARIANTS = {"exact": "", "first-order": "-FO", "hessian-free": "-HF"}
WEIGHTS = ("equal", "examples")


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Paced, WholeModel, ChecksData):
    """A shared start that every client adapts by a step of its own.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        alpha: The rate of the step of adaptation, 0.01 by default.
        variant: How the Hessian comes in: "exact" (the default), "hessian-free" by a difference of
            gradients, or "first-order" without it, which is cheapest.
        third: The part of a batch that the Hessian is taken on: "own" (the default, as published) is one
            of its own, "first" that of the step of adaptation again.
        delta: The half-width of the difference in the Hessian-free variant, 1e-3 by default.
        local: The steps on the shared start; a batch is cut into two or three parts and has at least so
            many examples. ``fp.LocalSGD()`` by default.
        weights: How clients count in the server's mean: "equal" (the default, as published), or
            "examples" by how many they have.
        adapt_steps: Steps of adaptation before a client predicts, on all of its data; 1 by default.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of w_i - w (times n_i with weights="examples"), which clients send: one of
            ``fp.compressors`` or its name, or a mapping from clients' names to them. "identity" (the
            default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.PerFedAvg(model, alpha=1.0, local=fp.LocalSGD(epochs=5, rate=1.0), adapt_steps=10)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=20)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 1) for i in (0, 1)]
    [2.0, 4.0]
    """

    alpha: Positive = 0.01
    variant: Annotated[str, OneOf(*VARIANTS)] = "exact"
    third: Annotated[str, OneOf("own", "first")] = "own"
    delta: Positive = 1e-3
    local: LocalSGD = field(default_factory=LocalSGD)
    weights: Annotated[str, OneOf(*WEIGHTS)] = "equal"
    adapt_steps: Count = 1  # 0 would be FedAvg's

    name: ClassVar[str] = "Per-FedAvg"
    about: ClassVar[About] = About("Fallah et al., NeurIPS 2020", personalised=True)
    guarded: ClassVar[tuple[str, ...]] = ("dw",)
    compressed: ClassVar[tuple[str, ...]] = ("dw",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.batch is not None and self.local.batch < self.hands:
            raise SettingsError(
                f"a batch of {self.local.batch} cannot be cut into {self.hands} parts; let local.batch be "
                f"{self.hands} or more"
            )

    @property
    def label(self) -> str:
        return f"{self.name}{VARIANTS[self.variant]}"

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, phi_copies=8)  # as WholeModel, and w', v, H v with its graph

    @property
    def hands(self) -> int:
        """Into how many parts a batch is cut."""
        return 2 if self.variant == "first-order" or self.third == "first" else 3

    def check_data(self, federation: Federation) -> None:
        single = [federation.names[i] for i in (federation.train.sizes == 1).nonzero().flatten().tolist()]
        if single:
            shown = ", ".join(repr(n) for n in single[:5]) + (", ..." if len(single) > 5 else "")
            warn_user(
                f"{len(single)} client(s) have one example, which is all of D1, D2 and D3 ({shown}): they "
                f"are adapted to what they are judged by; {self.name} is meant for two examples or more"
            )

    def direction(self, embedded: bool) -> Direction:
        """(I - alpha H) grad f(w - alpha grad f(w; D1); D2), and the loss at w of D1."""
        loss = joint_loss(self.model, embedded)
        slope = slope_of(loss)

        def along(
            w: Tensor, aux: Tensor, x: Inputs, y: Tensor, mask: Tensor, rows: RowKeys | None
        ) -> tuple[Tensor, Tensor]:
            d1, d2, d3 = (dealt(k, self.hands, x, y, mask, rows) for k in (0, 1, self.hands - 1))
            if self.third == "first":
                d3 = d1
            g, value = slope(w, aux, *d1)
            v, _ = slope(w - self.alpha * g, aux, *d2)
            if self.variant == "first-order":
                return v, value
            if self.variant == "hessian-free":
                above, below = (slope(w + s * self.delta * v, aux, *d3)[0] for s in (1.0, -1.0))
                curved = (above - below) / (2 * self.delta)
            else:  # the Hessian is symmetric, so that the transposed product is the product
                curved = hessian_product(lambda u: loss(u, aux, *d3), w, v)
            return v - self.alpha * curved, value

        return along

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w = round.broadcast["w"].expand(len(cohort), -1)
        # A batch of all examples is shuffled as well, or D1, D2 and D3 would never change.
        along = self.direction(cohort.embedded)
        new = self.train(self.local, w, cohort, round.key, direction=along, pace=round.pace, shuffle=True)
        good, vectors = finite(new.w), {"dw": new.w - w}
        if self.weights == "examples":
            n = cohort.sizes.to(w.dtype).unsqueeze(1)
            vectors = {"dw": n * vectors["dw"], "n": n}
        # D1 and D2 are passed once, D3 twice: for two gradients, or for one and the way back through it.
        gradients = 2 if self.variant == "first-order" else 4
        passes = self.local.steps(cohort) * gradients / self.hands
        return Answer(good, vectors, cost=training_cost(cohort, new.loss, good, passes, passes))

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        if total.count == 0:
            return server
        if self.weights == "equal":
            return server | {"w": server["w"] + total.estimate("dw", server["w"]) / facts.clients}
        move = total.mean("dw", by="n")
        return server if move is None else server | {"w": server["w"] + move}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        adapt = LocalSGD(epochs=self.adapt_steps, rate=self.alpha)
        w = published_w(published, len(cohort))
        return split_w(self.model, self.train(adapt, w, cohort, key.at(purpose="adapt")).w)


def hessian_product(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    """The Hessian of f at w, times v: under vmap by torch.func, else by plain autograd."""
    try:
        if inside_transform():
            out: Tensor = torch.func.vjp(torch.func.grad(f), w)[1](v)[0]
            return out
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
            (product,) = torch.autograd.grad(g, leaf, v, materialize_grads=True)
    except RuntimeError as error:
        raise ModelError(
            f"the model has no second derivatives ({str(error).splitlines()[0]}), as a layer of torch's may "
            "not have them; use PerFedAvg(variant='hessian-free') or 'first-order'"
        ) from error
    return product


def dealt(
    k: int, hands: int, x: Inputs, y: Tensor, mask: Tensor, rows: RowKeys | None
) -> tuple[Inputs, Tensor, Tensor, RowKeys | None]:
    """The k-th of so many parts of a batch whose examples come first and its padding last: examples k,
    k + hands, ...; of a batch with fewer examples than hands, example k modulo their number."""
    place = torch.arange(k, max(len(mask), k + 1), hands, device=mask.device)
    count = mask.sum().to(torch.int64).clamp(min=1)
    part = ((place < count) | (place == k)).to(mask.dtype)
    place = torch.where(place < count, place, k % count)
    named = None
    if rows is not None:
        named = RowKeys(rows.key, rows.clients[place], rows.positions[place])
    return map_inputs(lambda v: v[place], x), y[place], part, named
