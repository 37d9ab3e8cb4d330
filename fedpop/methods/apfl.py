"""APFL (Deng et al., 2020): a mixture of a local and a common model, in a proportion that is learned.

    client   from the server's w and its own v_i and alpha_i, E epochs of SGD on the same batches:
                 w_i     -= eta grad f_i(w_i)
                 v_i     -= eta alpha_i grad f_i(m),         m = alpha_i v_i + (1 - alpha_i) w_i
                 alpha_i -= eta <v_i - w_i, grad f_i(m)>,    clipped to [0, 1]
             sends n_i (w_i - w) and n_i;  keeps v_i, alpha_i, and w_i for its predictions
    server   w += sum n_i (w_i - w) / sum n_i

The three are one gradient step on f_i(w) + f_i(alpha v + (1 - alpha) w'), with w' = w held fixed; alpha takes
it without momentum or decay. A client predicts with the mixture of v_i and its *own* last w_i, not the
server's; one that took part in no round trains all three from the server's w, and without data predicts with
that w. Where alpha reaches 0, v stands still, and alpha leaves it only once w has passed v: a rule of the
method's own. The authors' code moves alpha at the first step of a round only, adds 0.02 alpha to its gradient
and takes m after w's step; this is the paper's rule, at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Proportion
from fedpop.client.local_sgd import Direction, LocalSGD, Loss, Trained
from fedpop.client.losses import finite, joint_loss, slope_of, training_cost
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors
from fedpop.methods.base import About, Footprint, Round
from fedpop.methods.fedavg import FedAvg
from fedpop.methods.whole import published_w, split_w


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    """Each client mixes a model of its own with the common one.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        alpha: The share of a client's own model in the mixture, 0 to 1: where it starts, or always if it
            is not adaptive. 0.5 by default.
        adaptive: Whether clients learn their share; True by default.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        newcomer: How a client that took part in no round trains; ``fp.LocalSGD(epochs=10)`` by default.
        server_rate: How much of the clients' mean move the server makes; 1 by default. Above 1 it goes
            beyond it.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Stays "identity": no compressed form of the method was published.
        clip: The largest norm of n_i (w_i - w), which clients send; longer ones are shortened, which biases
            their mean. None (the default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.APFL(model, alpha=0.75, adaptive=False, local=fp.LocalSGD(rate=0.5))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=60)
    >>> [round(population.predict(i, [[1.0]]).mean.item()) for i in (0, 1)]
    [2, 4]
    """

    alpha: Proportion = 0.5
    adaptive: bool = True
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))

    name: ClassVar[str] = "APFL"
    about: ClassVar[About] = About("Deng et al., 2020", personalised=True)
    private: ClassVar[tuple[str, ...]] = ("v", "alpha")
    compressed: ClassVar[tuple[str, ...]] = ()
    clipped: ClassVar[tuple[str, ...]] = ("dw",)
    as_it_is: ClassVar[str] = "no such form of it was published"

    @property
    def footprint(self) -> Footprint:
        # w, v, their gradients, velocities and next values, what is sent.
        return replace(super().footprint, phi_copies=9)

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        w = broadcast["w"].expand(len(units), -1)
        return {"w": w.clone(), "v": w.clone(), "alpha": w.new_full((len(units), 1), self.alpha)}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w = round.broadcast["w"].expand(len(cohort), -1)
        start = (w, local["v"], local["alpha"])
        new, loss = self.mix(self.local, start, cohort, round.key, round.pace)
        n, good = cohort.sizes.to(w.dtype).unsqueeze(1), finite(*new.values())
        passes = 2 * self.local.steps(cohort)  # w and the mixture
        cost = training_cost(cohort, loss, good, passes, passes)
        return Answer(good, {"dw": n * (new["w"] - w), "n": n}, new, cost)

    def mix(
        self,
        sgd: LocalSGD,
        start: tuple[Tensor, Tensor, Tensor],
        cohort: Cohort,
        key: Key,
        pace: float = 1.0,
    ) -> tuple[Tensors, Tensor]:
        """w, v ``[C, D]`` and alpha ``[C, 1]`` after local steps on them; the mixtures' losses ``[C]``."""
        direction = three_updates(joint_loss(self.model, cohort.embedded), self.size, self.adaptive)
        both = torch.cat(start, dim=1)
        end: Trained = self.train(
            sgd, both, cohort, key, direction=direction, project=_clip_alpha, plain=1, pace=pace
        )
        w, v, alpha = end.w.split((self.size, self.size, 1), dim=1)
        return {"w": w, "v": v, "alpha": alpha}, end.loss

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is None:
            w = published_w(published, len(cohort))
            alpha = w.new_full((len(cohort), 1), self.alpha)
            local, _ = self.mix(self.newcomer, (w, w, alpha), cohort, key.at(purpose="newcomer"))
        return split_w(self.model, torch.lerp(local["w"], local["v"], local["alpha"]))


def three_updates(f: Loss, size: int, adaptive: bool) -> Direction:
    """APFL's steps as one direction for u = (w, v, alpha), and the loss of the mixture."""

    def total(u: Tensor, *batch: object) -> tuple[Tensor, Tensor]:
        w, v, alpha = u.split((size, size, 1))
        mixture = f(torch.lerp(w.detach(), v, alpha if adaptive else alpha.detach()), *batch)
        return f(w, *batch) + mixture, mixture.detach()

    slope = slope_of(total, has_aux=True)

    def direction(u: Tensor, *batch: object) -> tuple[Tensor, Tensor]:
        gradient, (_, mixture) = slope(u, *batch)
        return gradient, mixture

    return direction


def _clip_alpha(u: Tensor) -> Tensor:
    return torch.cat((u[..., :-1], u[..., -1:].clamp(0, 1)), dim=-1)
