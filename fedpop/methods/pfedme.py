"""pFedMe (Dinh, Tran and Nguyen, 2020): a shared model by gradient steps on clients' Moreau envelopes.

    client   w_i = theta_i = w, then R times on a batch:
                 theta_i -= rate' (grad f_i(theta_i) + lambda (theta_i - w_i))   K times, towards
                     argmin f_i(theta) + lambda/2 norm(theta - w_i)^2
                 w_i     -= eta lambda (w_i - theta_i),   the gradient of the envelope for an exact argmin
             sends w_i - w   (with weights "examples": n_i (w_i - w) and n_i)
    server   w += beta mean of w_i - w,   which is (1 - beta) w + beta mean w_i
    predict  theta_i, as it comes out of these R steps at the final w on one's own data; never sent

eta is the rate of ``local``, and R the number of its batches. In the paper all clients take these steps in
every round and the mean is over a sample of them; here only the active ones do, which gives the server the
same w, since a client starts from w each time. What a client predicts with is made anew from the final w, for
everyone alike, clients that were never active and newcomers among them; without data theta_i = w.

Means are over all active clients, as published. The authors' code weights them by n_i and adds a weight decay
of 0.001 to the inner steps, which the paper does not have and neither have we. A client without examples has
f_i = 0. For R = 1 a round is a gradient step on the mean of the envelopes; for R > 1 clients drift apart, and
the limit is another point unless eta falls.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, OneOf, Positive
from fedpop.client.local_sgd import Direction, LocalSGD
from fedpop.client.losses import finite, joint_loss, slope_of, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel, published_w, split_w
from fedpop.models.modules import RowKeys

WEIGHTS = ("equal", "examples")


@dataclass(frozen=True, kw_only=True)
class PFedMe(Paced, WholeModel):
    """Personal models near a shared one, which follows them.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        lam: lambda, how strongly personal models are held near the shared one, above 0; 15 by default.
            A small one has clients more on their own.
        inner_steps: K, the steps on the personal model for each of those on the shared one; 5 by
            default.
        inner_rate: Their step size, below 2 / lam; 0.05 by default.
        local: The steps on a client's copy of the shared model, plain ones at a rate below 2 / lam;
            ``fp.LocalSGD(epochs=20, rate=0.005)`` by default.
        beta: The server's step, above 0; 1 by default, and above 1 it goes beyond the mean.
        weights: How clients count in the server's mean: "equal" (the default, as published), or
            "examples" by how many they have.
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
    >>> method = fp.PFedMe(model, lam=0.1, inner_steps=20, inner_rate=1.0, local=fp.LocalSGD(rate=5.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=30)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 1) for i in (0, 1)]
    [2.2, 3.8]
    """

    lam: Positive = 15.0
    inner_steps: Count = 5
    inner_rate: Positive = 0.05
    local: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=20, rate=0.005))
    beta: Positive = 1.0
    weights: Annotated[str, OneOf(*WEIGHTS)] = "equal"

    name: ClassVar[str] = "pFedMe"
    about: ClassVar[About] = About("Dinh et al., NeurIPS 2020", personalised=True)
    guarded: ClassVar[tuple[str, ...]] = ("dw",)
    private_sums: ClassVar[tuple[str, ...]] = ("dw",)
    compressed: ClassVar[tuple[str, ...]] = ("dw",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.momentum or self.local.decay:
            raise SettingsError("pFedMe's steps on w are plain: leave momentum and decay out of local")
        for name, rate in (("inner_rate", self.inner_rate), ("local.rate", self.local.rate)):
            if not rate * self.lam < 2:
                raise SettingsError(
                    f"steps of {name} = {rate} with lam = {self.lam} grow without bound whatever the data "
                    f"are; let {name} be below 2 / lam = {2 / self.lam:.3g}"
                )

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, phi_copies=8)  # w and theta: as WholeModel, twice

    def direction(self, embedded: bool, rate: float) -> Direction:
        """For (w, theta): the gradient of w's envelope, and what K steps change in theta."""
        slope = slope_of(joint_loss(self.model, embedded))

        def along(
            both: Tensor, aux: Tensor, x: Inputs, y: Tensor, mask: Tensor, rows: RowKeys | None
        ) -> tuple[Tensor, Tensor]:
            w, start = both.chunk(2)
            theta = start
            for _ in range(self.inner_steps):
                g, value = slope(theta, aux, x, y, mask, rows)
                theta = theta - self.inner_rate * (g + self.lam * (theta - w))
            # A step of the rate of w is to take theta where it is now.
            return torch.cat((self.lam * (w - theta), (start - theta) / rate)), value

        return along

    def personal_round(
        self, w: Tensor, cohort: Cohort, key: Key, pace: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """w_i and theta_i ``[C, D]`` after R steps from w, and the mean loss at theta_i on the way."""
        along = self.direction(cohort.embedded, pace * self.local.rate)
        new = self.train(self.local, torch.cat((w, w), 1), cohort, key, direction=along, pace=pace)
        own, theta = new.w.chunk(2, dim=1)
        return own, theta, new.loss

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w = round.broadcast["w"].expand(len(cohort), -1)
        own, theta, loss = self.personal_round(w, cohort, round.key, round.pace)
        good, vectors = finite(own, theta), {"dw": own - w}
        if self.weights == "examples":
            n = cohort.sizes.to(w.dtype).unsqueeze(1)
            vectors = {"dw": n * vectors["dw"], "n": n}
        passes = self.local.steps(cohort) * self.inner_steps
        return Answer(good, vectors, cost=training_cost(cohort, loss, good, passes, passes))

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        if total.count == 0:
            return server
        if self.weights == "equal":
            mean = total.estimate("dw", server["w"]) / facts.clients
            return server | {"w": server["w"] + self.beta * mean}
        move = total.mean("dw", by="n")
        return server if move is None else server | {"w": server["w"] + self.beta * move}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        w = published_w(published, len(cohort))
        _, theta, _ = self.personal_round(w, cohort, key.at(purpose="theta"))
        return split_w(self.model, theta)
