"""QLSD (Vono et al., 2022): Langevin dynamics on the server, with compressed gradients from the clients.

    client   g_i = C(H_i),  H_i an unbiased estimate of grad U_i(w) on a mini-batch;  sends g_i
    server   w -= gamma [lambda w + (b/|A|) sum g_i] + sqrt(2 gamma) xi

``variant`` says what is compressed. With a bar for the mini-batch's n_i/|B| sum over B:

    "plain"  (QLSD#)    H_i = grad Ubar_i(w)
    "star"   (QLSD*)    H_i = grad Ubar_i(w) - grad Ubar_i(w*);  the server adds sum_i grad U_i(w*), which
                        everyone sends once, in full, before the rounds
    "++"     (QLSD++)   H_i = grad Ubar_i(w) - grad Ubar_i(zeta) + grad U_i(zeta);  g_i = C(H_i - eta_i),
                        eta_i += alpha_i g_i on the client;  the server adds eta = sum_i eta_i to the (b/|A|)
                        sum, then eta += sum_i alpha_i g_i;  zeta = w every ``refresh`` rounds

U_i has no prior: the server adds the gradient lambda w of a Gaussian one. At a fixed step the law is biased
by order gamma, and so is the noise of compression; with memory the latter vanishes as the chain settles. What
is remembered is what the server saw, of those whose messages it received: eta stays the sum of all eta_i
whoever is lost.

The published QLSD* has w* at the posterior's mode, where the full gradient is zero and nothing need be
added; ours takes the model as it was given for w*, right for any w* and quiet near the mode (fit the model
first, by FedAvg say). Rules were read beside the authors' public code, which puts a b-th of the prior into
every U_i; its deep-learning script also compresses what was compressed already, which is not in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, NotNegative, OneOf, Positive, Proportion
from fedpop.client.losses import finite, training_cost
from fedpop.client.potential import Potential
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Asks, Facts, Footprint, Remembers, Round
from fedpop.methods.samples import PosteriorSamples
from fedpop.models.base import Model
from fedpop.questions import Question, Units
from fedpop.questions.curvature import CurvatureStep

VARIANTS = {"plain": "QLSD", "star": "QLSD*", "++": "QLSD++"}


@dataclass(frozen=True)
class Reference(Question[Tensors]):
    """sum_i grad U_i(w*), on all examples."""

    model: Model
    star: Tensor
    name: ClassVar[str] = "reference"
    lasting: ClassVar[bool] = True
    quorum: ClassVar[float] = 0.0  # a unit that is not finite at w* is in no round's sum either

    def ask(self, known: Tensors) -> Tensors:
        return {"star": self.star}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        u = Potential(self.model, units.cohort)
        gradient = u(asked["star"].expand(len(units.cohort), -1), key)[1]
        return Answer(finite(gradient), {"reference": gradient}, cost=u.cost)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return {"reference": total.plain_sum("reference", self.star)}


@dataclass(frozen=True, kw_only=True)
class QLSD(PosteriorSamples, Asks, Remembers):
    """Samples of the whole model by Langevin steps on the server.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        variant: What is compressed: "plain" (the default) gradients, "star" their differences to those
            at the model as it was given, "++" what a memory of earlier ones does not tell, with which
            the noise of compression vanishes as the chain settles.
        step: gamma. None (the default) is 0.25 / (sum_i L_i + lambda), L_i the largest curvature of U_i
            at the start, which everyone sends once: an eighth of what is stable for a Gaussian
            posterior, so that its variances are right to 15 %. Where a network's curvature grows in
            training a smaller one must be given (the authors take about 0.6 over the number of all
            examples).
        batch: How many of a client's examples a gradient is made from; None (the default) is all.
        prior_precision: lambda, that of a Normal prior around 0 on the model; 1 by default.
        memory_rate: alpha_i of "++", 0 to 1; None (the default) is 1 / (1 + omega_i), omega_i the
            compressor's relative variance, the largest that the theory allows.
        refresh: Rounds between two references zeta of "++", 100 by default.
        samples: How many of the chain's states the server keeps, the oldest overwritten; 50 by default.
            Predictions average over them.
        burn_in: Rounds before the first state is kept; None (the default) is half of them.
        thin: Rounds from one kept state to the next; None (the default) spreads them over all rounds
            after burn-in.
        compressor: Of the gradient H_i (or what is left of it), which clients send: one of
            ``fp.compressors`` or its name, or a mapping from clients' names to them. "identity" (the
            default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their sum. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.ones(50, 1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.QLSD(model, variant="++", compressor=fp.compressors.QSGD(), samples=100)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=400)
    >>> p = population.predict(0, [[1.0]])  # the posterior is N(2.97, 0.0099)
    >>> round(p.mean.item(), 1), round(p.means.std().item(), 1)
    (3.0, 0.1)
    """

    variant: Annotated[str, OneOf(*VARIANTS)] = "plain"
    step: Positive | None = None
    batch: Count | None = None
    prior_precision: NotNegative = 1.0
    memory_rate: Proportion | None = None
    refresh: Count = 100

    name: ClassVar[str] = "QLSD"
    about: ClassVar[About] = About(
        "Vono et al., AISTATS 2022", personalised=False, local_steps=False, memory="M (d + d_phi)"
    )
    guarded: ClassVar[tuple[str, ...]] = ("U",)
    compressed: ClassVar[tuple[str, ...]] = ("U",)
    remembers: ClassVar[tuple[str, ...]] = ("U",)

    @property
    def label(self) -> str:
        return VARIANTS[self.variant]

    @property
    def footprint(self) -> Footprint:
        # A batch is not the same share of everybody's examples.
        return replace(super().footprint, steady=self.batch is None)

    @property
    def anchored(self) -> bool:
        """Gradients at zeta are needed: on all examples they would cancel."""
        return self.variant == "++" and self.batch is not None

    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        w, asked = self.initial_w(), list[Question[Tensors]]()
        if self.step is None:
            asked.append(CurvatureStep(self.model, w, self.prior_precision))
        if self.variant == "star":
            asked.append(Reference(self.model, w))
        return asked

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        server = super().init(facts, key, known)
        w = server["w"]
        server["gamma"] = known["gamma"] if self.step is None else w.new_tensor(self.step)
        if self.variant == "star":
            server |= {"star": w, "reference": known["reference"]}
        if self.variant == "++":
            server["memory"] = torch.zeros_like(w)
        if self.anchored:
            server |= {"zeta": w, "version": torch.zeros((), dtype=torch.int64, device=w.device)}
        return server

    def grown(self, server: Tensors, facts: Facts, known: Tensors) -> Tensors:
        """Smaller steps for more curvature; the gradients at w* are those of everyone."""
        return server | {name: known[name] for name in ("gamma", "reference") if name in known}

    def broadcast(self, server: Tensors) -> Tensors:
        return {name: server[name] for name in ("w", "star", "zeta", "version") if name in server}

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        zeros = broadcast["w"].new_zeros((len(units), broadcast["w"].shape[0]))
        local = {"memory": zeros, "alpha": zeros.new_zeros(len(units))} if self.variant == "++" else {}
        if self.anchored:
            local |= {"anchor": zeros.clone(), "version": torch.full_like(units, -1)}
        return local

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        broadcast, key = round.broadcast, round.key
        w = broadcast["w"].expand(len(cohort), -1)
        u = Potential(self.model, cohort, self.batch)
        value, h = u(w, key)
        passes, new = u.examples, local
        named: dict[str, tuple[str, Tensor]] = {}
        if self.variant == "star":
            h = h - u(broadcast["star"].expand_as(w), key)[1]
            passes += u.examples
        if self.anchored:
            new, looked = self._anchored(local, broadcast, cohort, key)
            h = h - u(broadcast["zeta"].expand_as(w), key)[1] + new["anchor"]
            passes += u.examples + looked
        if self.variant == "++":
            h, alpha = h - local["memory"], self._alpha(round, cohort).to(h.dtype)
            new = new | {"alpha": alpha}
            named = {"memory": ("U", alpha)}  # eta is a sum of its own, whatever the weights of g_i
        good, loss = finite(h), value / cohort.sizes.clamp(min=1)
        cost = training_cost(cohort, loss, good, passes, passes)
        return Answer(good, {"U": h}, new, cost, named=named)

    def after_send(self, local: Tensors, seen: Tensors) -> Tensors:
        if self.variant != "++":
            return local
        return local | {"memory": local["memory"] + local["alpha"].unsqueeze(1) * seen["U"]}

    def _anchored(self, local: Tensors, broadcast: Tensors, cohort: Cohort, key: Key) -> tuple[Tensors, int]:
        """Local states with grad U_i(zeta) of the present zeta, and how many examples it took."""
        stale = (local["version"] != broadcast["version"]).nonzero().squeeze(1)
        if not len(stale):
            return local, 0
        u = Potential(self.model, cohort.select(stale))
        gradient = u(broadcast["zeta"].expand(len(stale), -1), key)[1]
        anchor = local["anchor"].index_copy(0, stale, gradient)
        version = broadcast["version"].expand(len(cohort)).clone()
        return local | {"anchor": anchor, "version": version}, u.examples

    def _alpha(self, round: Round, cohort: Cohort) -> Tensor:
        """The memory's rate of each unit, ``[C]``."""
        ones = torch.ones(len(cohort), dtype=torch.float64, device=cohort.device)
        if self.memory_rate is not None:
            return self.memory_rate * ones
        return ones if round.omega is None else ones / (1 + round.omega(cohort.units, self.size))

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        if total.no_step:
            return server
        w, gamma = server["w"], server["gamma"]
        gradient = self.prior_precision * w + total.estimate("U", w)
        if self.variant == "star":
            gradient = gradient + server["reference"]
        if self.variant == "++":
            gradient = gradient + server["memory"]
            server = server | {"memory": server["memory"] + total.named_sum("memory", w)}
        xi = key.at(purpose="noise").normal(key.server(w.device), tuple(w.shape), w.dtype)[0]
        w = w - gamma * gradient + torch.sqrt(2 * gamma) * xi
        if self.anchored and (key.round + 1) % self.refresh == 0:
            server = server | {"zeta": w, "version": server["version"] + 1}
        return self.moved(server, w, facts, key)
