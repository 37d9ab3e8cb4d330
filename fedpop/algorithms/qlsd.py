"""QLSD (Vono et al., 2022): Langevin dynamics on the server, with compressed gradients from the clients.

    client   g_i = C(H_i),  H_i an unbiased estimate of grad U_i(w) on a mini-batch;  sends g_i
    server   w -= gamma [lambda w + (b/|A|) sum g_i] + sqrt(2 gamma) xi

``variant`` says what is compressed. With a bar for the mini-batch's n_i/|B| sum over B:

    "plain"  (QLSD#)    H_i = grad Ubar_i(w)
    "star"   (QLSD*)    H_i = grad Ubar_i(w) - grad Ubar_i(w*);  the server adds sum_i grad U_i(w*), which
                        everyone sends once, in full, in an earlier phase
    "++"     (QLSD++)   H_i = grad Ubar_i(w) - grad Ubar_i(zeta) + grad U_i(zeta);  g_i = C(H_i - eta_i),
                        eta_i += alpha g_i on the client;  the server adds eta = sum_i eta_i to the (b/|A|)
                        sum, then eta += alpha sum g_i;  zeta = w every ``refresh`` rounds

U_i has no prior: the server adds the gradient lambda w of a Gaussian one. At a fixed step the law is biased
by order gamma, and so is the noise of compression; with memory the latter vanishes as the chain settles.

The published QLSD* has w* at the posterior's mode, where the full gradient is zero and nothing need be
added; ours takes the model as it was given for w*, right for any w* and quiet near the mode (fit the model
first, by FedAvg say). Rules were read beside the authors' public code, which puts a b-th of the prior into
every U_i; its deep-learning script also compresses what was compressed already, which is not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.algorithms.base import About, Facts, Info, Message, Tensors, require_whole, sent, weighted_sum
from fedpop.algorithms.samples import PosteriorSamples, check_precision, require_positive
from fedpop.algorithms.whole import cost, finite, kept
from fedpop.channel import Channel
from fedpop.client.potential import Potential, check_batch
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key

VARIANTS = ("plain", "star", "++")
STEP = 0.25
"""The step where none is given, in units of one over the largest curvature."""


@dataclass(frozen=True, kw_only=True)
class QLSD(PosteriorSamples):
    """Samples of the whole model by Langevin steps on the server.

    ``step`` is gamma. Without one it is 0.25 / (sum_i L_i + lambda), L_i the largest curvature of U_i at the
    start, which everyone sends once: an eighth of what is stable for a Gaussian posterior, so that its
    variances are right to 15 %. Where a network's curvature grows in training a smaller one must be given
    (the authors take about 0.6 over the number of all examples).

    >>> import torch, fedpop as fp
    >>> x = torch.ones(50, 1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.QLSD(model, variant="++", compressor=fp.QSGD(), samples=100)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=400)
    >>> p = population.predict(0, [[1.0]])  # the posterior is N(2.97, 0.0099)
    >>> round(p.mean.item(), 1), round(p.means.std().item(), 1)
    (3.0, 0.1)
    """

    variant: str = "plain"
    step: float | None = None
    batch: int | None = None
    prior_precision: float = 1.0
    memory_rate: float | None = None
    """alpha of QLSD++; None is 1 / (1 + omega), the largest that the theory allows."""
    refresh: int = 100
    """Rounds between two references zeta of QLSD++."""

    name: ClassVar[str] = "QLSD"
    about: ClassVar[About] = About(
        "Vono et al., AISTATS 2022", personalised=False, local_steps=False, memory="M (d + d_phi)"
    )
    compressed: ClassVar[tuple[str, ...]] = ("U",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise SettingsError(f"variant is one of {', '.join(VARIANTS)}, not {self.variant!r}")
        require_positive(step=self.step)
        check_batch(self.batch)
        check_precision(self.prior_precision)
        if self.memory_rate is not None and not 0 <= self.memory_rate <= 1:
            raise SettingsError(f"memory_rate lies in [0, 1], not {self.memory_rate}")
        require_whole(refresh=self.refresh)
        if self.refresh < 1:
            raise SettingsError(f"refresh is a number of rounds, at least 1, not {self.refresh}")

    @property
    def label(self) -> str:
        return {"plain": "QLSD", "star": "QLSD*", "++": "QLSD++"}[self.variant]

    @property
    def steady(self) -> bool:
        return self.batch is None  # a batch is not the same share of everybody's examples

    @property
    def phases(self) -> tuple[str, ...]:
        before = ("curvature",) * (self.step is None) + ("reference",) * (self.variant == "star")
        return (*before, "train")

    @property
    def anchored(self) -> bool:
        """Gradients at zeta are needed: on all examples they would cancel."""
        return self.variant == "++" and self.batch is not None

    def init(self, facts: Facts, key: Key) -> Tensors:
        server = super().init(facts, key)
        w = server["w"]
        server["gamma"] = w.new_tensor(float("nan") if self.step is None else self.step)
        if self.variant == "star":
            server |= {"star": w, "reference": torch.zeros_like(w)}
        if self.variant == "++":
            server["memory"] = torch.zeros_like(w)
        if self.anchored:
            server |= {"zeta": w, "version": torch.zeros((), dtype=torch.int64, device=w.device)}
        return server

    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        return {name: server[name] for name in ("w", "star", "zeta", "version") if name in server}

    def enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        zeros = broadcast["w"].new_zeros((len(ids), broadcast["w"].shape[0]))
        local = {"memory": zeros} if self.variant == "++" else {}
        if self.anchored:
            local |= {"anchor": zeros.clone(), "version": torch.full_like(ids, -1)}
        return local

    def local_round(
        self,
        phase: str,
        broadcast: Tensors,
        cohort: Cohort,
        local: Tensors,
        channel: Channel,
        key: Key,
    ) -> tuple[Tensors, Message, Info]:
        w = broadcast["w"].expand(len(cohort), -1)
        u = Potential(self.model, cohort, self.batch)
        if phase == "curvature":
            largest = u.largest(w, key).unsqueeze(1)
            return {}, sent(channel, cohort, finite(largest), {"curvature": largest})[1], u.info
        if phase == "reference":
            u = u.full()
            gradient = u(w, key)[1]
            return {}, sent(channel, cohort, finite(gradient), {"reference": gradient})[1], u.info
        value, h = u(w, key)
        passes, new = u.examples, local
        if self.variant == "star":
            h = h - u(broadcast["star"].expand_as(w), key)[1]
            passes += u.examples
        if self.anchored:
            zeta = broadcast["zeta"].expand_as(w)
            new, looked = self._anchored(local, broadcast, cohort, key)
            h = h - u(zeta, key)[1] + new["anchor"]
            passes += u.examples + looked
        loss = value / cohort.sizes.clamp(min=1)
        if self.variant != "++":
            good, message = sent(channel, cohort, finite(h), {"U": h})
            return {}, message, cost(cohort, loss, good, passes, passes)
        good = finite(h)
        h = torch.where(good.unsqueeze(1), h - local["memory"], torch.zeros_like(h))
        g = channel("U", h, cohort.ids)  # what the server will see is what both sides remember
        good = good & finite(g)
        alpha = self._alpha(cohort.ids).to(g.dtype)
        # eta is a plain sum, whatever the weights of g; where p_i differ, both sums must be formed.
        sums = {"U": weighted_sum(g, cohort.weights, good), "memory": weighted_sum(g, alpha, good)}
        new = new | {"memory": local["memory"] + alpha.unsqueeze(1) * g}
        new = {name: kept(good, value, local[name]) for name, value in new.items()}
        return new, Message(sums, int(good.sum())), cost(cohort, loss, good, passes, passes)

    def _anchored(self, local: Tensors, broadcast: Tensors, cohort: Cohort, key: Key) -> tuple[Tensors, int]:
        """Local states with grad U_i(zeta) of the present zeta, and examples looked at for it."""
        stale = (local["version"] != broadcast["version"]).nonzero().squeeze(1)
        if not len(stale):
            return local, 0
        u = Potential(self.model, cohort.select(stale))
        gradient = u(broadcast["zeta"].expand(len(stale), -1), key)[1]
        anchor = local["anchor"].index_copy(0, stale, gradient)
        version = broadcast["version"].expand(len(cohort)).clone()
        return local | {"anchor": anchor, "version": version}, u.examples

    def _alpha(self, ids: Tensor) -> Tensor:
        """The memory's rate of each client."""
        given = self.memory_rate
        rates = [given if given is not None else 1 / (1 + c.omega(self.size)) for c in self.compressors]
        out = torch.tensor(rates, dtype=torch.float64, device=ids.device)
        return out[ids] if isinstance(self.compressor, tuple) else out.expand(len(ids))

    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        if phase == "curvature":
            assert total is not None
            largest = float(total.sums["curvature"]) + self.prior_precision
            if not largest > 0:
                raise SettingsError("U has no curvature at the start, so a step must be given: step=...")
            return server | {"gamma": server["gamma"].new_tensor(STEP / largest)}
        if phase == "reference":
            assert total is not None
            return server | {"reference": total.sums["reference"]}
        if total is None or (total.count == 0 and total.ratio):
            return server
        w, gamma = server["w"], server["gamma"]
        gradient = self.prior_precision * w
        if "U" in total.sums:
            gradient = gradient + total.scaled("U", facts.clients)
        if self.variant == "star":
            gradient = gradient + server["reference"]
        if self.variant == "++":
            gradient = gradient + server["memory"]
            server = server | {"memory": server["memory"] + total.sums.get("memory", 0)}
        xi = key.at(purpose="noise").normal(key.server(w.device), tuple(w.shape), w.dtype)[0]
        w = w - gamma * gradient + torch.sqrt(2 * gamma) * xi
        if self.anchored and (key.round + 1) % self.refresh == 0:
            server = server | {"zeta": w, "version": server["version"] + 1}
        return self.moved(server, w, facts, key)
