"""FSGLD (El Mekkaoui et al., 2021): a Langevin chain that visits one client at a time.

    once     every client fits a Gaussian q_i to exp(-U_i): log q_i(w) = s_i' w - w' P_i w / 2 + const;
             sends its natural parameters s_i and P_i, whose sums are those of q = prod_i q_i
    client   (one a round, chosen with probability f_i = 1/b) T times
             w += gamma [-lambda w - grad Ubar_i(w) / f_i + grad log q(w) - grad log q_i(w) / f_i]
                  + sqrt(2 gamma) xi;  sends w
    server   hands w on

with Ubar_i the mini-batch's estimate of U_i, and lambda w the gradient of a Gaussian prior. The last two
terms are the conducive gradient: zero on average over clients, whatever the q_i, and for exact q_i it makes
the drift the full gradient at every client, however long the chain stays. Without it (``conducive=False``)
this is DSGLD (Ahn et al., 2014), which follows one client's data and is wrong unless visits are short.

q_i is the quadratic expansion of -U_i where local epochs of SGD end (``local``), with curvature below zero
cut off; the gradient left there is part of it. For a linear head alone with a normal likelihood of known
variance that is exact wherever it is made, and there are no epochs. q needs no inverse, so flat directions
do no harm. The message is the chain's state and the sum of one: the relay is the method. No public code of
its authors was at hand; they have Gaussians from local chains or Laplace's approximation, and leave the
choice open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.algorithms.base import About, Facts, Info, Message, Tensors, require_whole, sent
from fedpop.algorithms.samples import PosteriorSamples, check_precision, require_positive
from fedpop.algorithms.whole import cost, finite, kept
from fedpop.channel import Channel
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.potential import LARGEST_EXACT, Potential, check_batch
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key

SURROGATES = ("auto", "full", "diagonal")
STEP = 0.25
"""The step where none is given, in units of one over the largest curvature."""


@dataclass(frozen=True, kw_only=True)
class FSGLD(PosteriorSamples):
    """Samples of the whole model by a relay.

    ``step`` is gamma. Without one it is 0.25 / (L + lambda). With L_i the largest curvature of U_i where q_i
    was made, L is sum_i L_i for exact q_i. Otherwise U_i counts b times while the chain is with client i, and
    L must not be below b max_i L_i: it is b (sum_i L_i^4)^(1/4), which clients can add up. ``surrogate`` is
    the form of P_i: full (up to 512 parameters) or diagonal; auto is full up to 100.

    >>> import torch, fedpop as fp
    >>> x = torch.ones(50, 1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.FSGLD(model, step=0.002, samples=200)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=400)
    >>> p = population.predict(0, [[1.0]])  # the posterior is N(2.97, 0.0099)
    >>> round(p.mean.item(), 1), round(p.means.std().item(), 1)
    (3.0, 0.1)
    """

    local_steps: int = 10
    step: float | None = None
    batch: int | None = None
    prior_precision: float = 1.0
    conducive: bool = True
    surrogate: str = "auto"
    local: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))

    name: ClassVar[str] = "FSGLD"
    about: ClassVar[About] = About("El Mekkaoui et al., UAI 2021", personalised=False, memory="M (d + d_phi)")
    participation: ClassVar[str] = "one"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(local_steps=self.local_steps)
        if self.local_steps < 1:
            raise SettingsError(f"local_steps must be at least 1, not {self.local_steps}")
        require_positive(step=self.step)
        check_batch(self.batch)
        check_precision(self.prior_precision)
        if self.surrogate not in SURROGATES:
            raise SettingsError(f"surrogate is one of {', '.join(SURROGATES)}, not {self.surrogate!r}")
        if self.surrogate == "full" and self.size > LARGEST_EXACT:
            raise SettingsError(
                f"a full surrogate of {self.size} parameters has {self.size}^2 entries; it is there for up "
                f"to {LARGEST_EXACT}, use surrogate='diagonal'"
            )

    @property
    def label(self) -> str:
        return "FSGLD" if self.conducive else "DSGLD"

    @property
    def steady(self) -> bool:
        return self.batch is None  # a batch is not the same share of everybody's examples

    @property
    def phases(self) -> tuple[str, ...]:
        return ("surrogate", "train") if self.conducive or self.step is None else ("train",)

    @property
    def _full(self) -> bool:
        return self.surrogate == "full" or (self.surrogate == "auto" and self.size <= 100)

    @property
    def _quadratic(self) -> bool:
        """U_i is a quadratic function of w, so that its expansion is exact anywhere."""
        likelihood = self.model.likelihood
        fixed = likelihood.name == "normal" and not likelihood.initial_params()
        return fixed and self.model.linear and not self.model.phi_layout.size

    def init(self, facts: Facts, key: Key) -> Tensors:
        server = super().init(facts, key)
        w = server["w"]
        server["gamma"] = w.new_tensor(float("nan") if self.step is None else self.step)
        server["clients"] = w.new_tensor(facts.clients)
        return server | self._nothing(w)

    def _nothing(self, w: Tensor) -> Tensors:
        """Natural parameters of no q at all."""
        square = (*w.shape, w.shape[-1]) if self._full else w.shape
        return {"precision": w.new_zeros(square), "shift": torch.zeros_like(w)} if self.conducive else {}

    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        names = ("w",) if phase == "surrogate" else ("w", "gamma", "clients", "precision", "shift")
        return {name: server[name] for name in names if name in server}

    def enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return self._nothing(broadcast["w"].expand(len(ids), -1))

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
        if phase == "surrogate":
            return self._fit(w, cohort, channel, key)
        u = Potential(self.model, cohort, self.batch)
        gamma, noise, total = broadcast["gamma"], key.at(purpose="noise"), w.new_zeros(len(cohort))
        for t in range(self.local_steps):
            value, drift = self.drift_at(w, u, broadcast, local, key.at(purpose=f"step-{t}"))
            xi = noise.normal(cohort.ids, (w.shape[1],), w.dtype, t)
            w = w + gamma * drift + torch.sqrt(2 * gamma) * xi
            total = total + value
        good, message = sent(channel, cohort, finite(w), {"w": w})
        loss = total / (self.local_steps * cohort.sizes.clamp(min=1))
        passes = self.local_steps * u.examples
        return local, message, cost(cohort, loss, good, passes, passes)

    def drift_at(
        self, w: Tensor, u: Potential, broadcast: Tensors, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        """U_i and the drift of the chain while it is with client i, at w ``[C, D]``."""
        value, slope = u(w, key)
        b = broadcast["clients"]  # 1 / f_i
        drift = -self.prior_precision * w - b * slope
        if self.conducive:
            everyone = {n: broadcast[n].expand_as(local[n]) for n in ("precision", "shift")}
            drift = drift + _slope(everyone, w) - b * _slope(local, w)
        return value, drift

    def _fit(self, w: Tensor, cohort: Cohort, channel: Channel, key: Key) -> tuple[Tensors, Message, Info]:
        """q_i of every client, and its largest curvature."""
        u = Potential(self.model, cohort)
        nothing = self._nothing(w)
        if not self._quadratic:
            w = self.train(self.local, w, cohort, key.at(purpose="local")).w
            u.passes += self.local.steps(cohort)
        gradient = u(w, key)[1]
        largest = u.largest(w, key).unsqueeze(1)
        values = {"curvature": largest if self._quadratic else largest.double() ** 4}
        if self.conducive:
            precision = self._curvature(u, w, key)
            values |= {"precision": precision.flatten(1), "shift": _times(precision, w) - gradient}
        good, message = sent(channel, cohort, finite(*values.values()), values)
        # One that could not be made is the same nothing here and in the sum.
        new = {n: kept(good, values[n].reshape(v.shape), v) for n, v in nothing.items()}
        return new, message, u.info

    def _curvature(self, u: Potential, w: Tensor, key: Key) -> Tensor:
        """P_i: the Hessian of U_i, or its diagonal, without what is negative."""
        if not self._full:
            return u.diagonal(w, key).clamp(min=0)
        hessian = u.hessian(w)
        good = finite(hessian)
        values, vectors = torch.linalg.eigh(torch.where(good[:, None, None], hessian, 0.0))
        cut = (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT
        return torch.where(good[:, None, None], cut, hessian)

    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        if total is None or total.count == 0:
            return server
        if phase == "train":
            return self.moved(server, total.sums["w"], facts, key)
        new: Tensors = {
            n: total.sums[n].reshape(server[n].shape) for n in ("precision", "shift") if n in server
        }
        if self.step is None:
            largest = float(total.sums["curvature"])
            if not self._quadratic:
                largest = facts.clients * largest**0.25
            largest += self.prior_precision
            if not largest > 0:
                raise SettingsError("U has no curvature at the start, so a step must be given: step=...")
            new["gamma"] = server["gamma"].new_tensor(STEP / largest)
        return server | new


def _slope(q: Tensors, w: Tensor) -> Tensor:
    """grad log q = s - P w."""
    return q["shift"] - _times(q["precision"], w)


def _times(p: Tensor, w: Tensor) -> Tensor:
    """P w for each client, P ``[C, D, D]`` or its diagonal ``[C, D]``."""
    return p * w if p.dim() == 2 else torch.einsum("cij,cj->ci", p, w)
