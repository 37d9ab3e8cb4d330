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
do no harm. The answer of a round is the chain's state, so nothing is summed over several clients: one takes
part at a time, and the relay is the method. No public code of its authors was at hand; they have Gaussians
from local chains or Laplace's approximation, and leave the choice open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, NotNegative, OneOf, Positive
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import finite, training_cost
from fedpop.client.potential import LARGEST_HESSIAN_BY_COLUMNS, Potential
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Asks, Facts, Footprint, Round
from fedpop.methods.samples import PosteriorSamples
from fedpop.questions import Question, Units
from fedpop.questions.curvature import stable_step

SURROGATES = ("auto", "full", "diagonal")


@dataclass(frozen=True, kw_only=True)
class FSGLD(PosteriorSamples, Asks):
    """Samples of the whole model by a relay.

    The step is gamma = 0.25 / (L + lambda) by default. With L_i the largest curvature of U_i where q_i
    was made, L is sum_i L_i for exact q_i. Otherwise U_i counts b times while the chain is with client
    i, and L must not be below b max_i L_i: it is b (sum_i L_i^4)^(1/4), which clients can add up.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local_steps: T, how many steps the chain makes with a client; 10 by default.
        step: gamma; None (the default) is found from curvatures, as above.
        batch: How many of a client's examples a step looks at; None (the default) is all.
        prior_precision: lambda, that of a Normal prior around 0 on the model; 1 by default.
        conducive: Whether the conducive gradient is added; True by default. False is DSGLD, which is
            wrong unless visits are short.
        surrogate: The form of P_i, the precision of q_i: "full" (up to 512 parameters), "diagonal", or
            "auto" (the default), which is full up to 100.
        local: The epochs after which q_i is made; ``fp.LocalSGD(epochs=10)`` by default. There are none
            where q_i is exact anywhere.
        samples: How many of the chain's states the server keeps, the oldest overwritten; 50 by default.
            Predictions average over them.
        burn_in: Rounds before the first state is kept; None (the default) is half of them.
        thin: Rounds from one kept state to the next; None (the default) spreads them over all rounds
            after burn-in.
        compressor: Stays "identity": what a client sends is the chain's state.
        clip: Stays None, for the same reason.
        guard: Does nothing here, for the same reason.

    >>> import torch, fedpop as fp
    >>> x = torch.ones(50, 1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.FSGLD(model, step=0.002, samples=60)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=120)
    >>> p = population.predict(0, [[1.0]])  # the posterior is N(2.97, 0.0099)
    >>> round(p.mean.item(), 1), round(p.means.std().item(), 1)
    (3.0, 0.1)
    """

    local_steps: Count = 10
    step: Positive | None = None
    batch: Count | None = None
    prior_precision: NotNegative = 1.0
    conducive: bool = True
    surrogate: Annotated[str, OneOf(*SURROGATES)] = "auto"
    local: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))

    name: ClassVar[str] = "FSGLD"
    as_it_is: ClassVar[str] = "the chain's own state travels, and a shortened state is another one"
    about: ClassVar[About] = About("El Mekkaoui et al., UAI 2021", personalised=False, memory="M (d + d_phi)")
    participation: ClassVar[str] = "one"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.surrogate == "full" and self.size > LARGEST_HESSIAN_BY_COLUMNS:
            raise SettingsError(
                f"a full surrogate of {self.size} parameters has {self.size}^2 entries; it is there for up "
                f"to {LARGEST_HESSIAN_BY_COLUMNS}, use surrogate='diagonal'"
            )

    @property
    def label(self) -> str:
        return "FSGLD" if self.conducive else "DSGLD"

    @property
    def footprint(self) -> Footprint:
        # A batch is not the same share of everybody's examples.
        return replace(super().footprint, steady=self.batch is None)

    @property
    def full(self) -> bool:
        """P_i are matrices, not diagonals."""
        return self.surrogate == "full" or (self.surrogate == "auto" and self.size <= 100)

    @property
    def quadratic(self) -> bool:
        """U_i is a quadratic function of w, so that its expansion is exact anywhere."""
        likelihood = self.model.likelihood
        fixed = likelihood.quadratic and not likelihood.initial_params()
        return fixed and self.model.linear and not self.model.phi_layout.size

    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        return (Surrogates(self),) if self.conducive or self.step is None else ()

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        server = super().init(facts, key, known)
        w = server["w"]
        server["gamma"] = known["gamma"] if self.step is None else w.new_tensor(self.step)
        server["clients"] = w.new_tensor(facts.clients)
        return server | {name: known[name] for name in self.nothing(w)}

    def grown(self, server: Tensors, facts: Facts, known: Tensors) -> Tensors:
        """q is everyone's, and so is b."""
        return server | known | {"clients": server["w"].new_tensor(facts.clients)}

    def nothing(self, w: Tensor) -> Tensors:
        """Natural parameters of no q at all, for each of w ``[..., D]``."""
        square = (*w.shape, w.shape[-1]) if self.full else w.shape
        return {"precision": w.new_zeros(square), "shift": torch.zeros_like(w)} if self.conducive else {}

    def broadcast(self, server: Tensors) -> Tensors:
        names = ("w", "gamma", "clients", "precision", "shift")
        return {name: server[name] for name in names if name in server}

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        # For one whose q_i could not be made, which is the same nothing here and in the sum.
        return self.nothing(broadcast["w"].expand(len(units), -1))

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        broadcast, key = round.broadcast, round.key
        w = broadcast["w"].expand(len(cohort), -1)
        u = Potential(self.model, cohort, self.batch)
        gamma, noise, total = broadcast["gamma"], key.at(purpose="noise"), w.new_zeros(len(cohort))
        for t in range(self.local_steps):
            value, drift = self.drift_at(w, u, broadcast, local, key.at(purpose=f"step-{t}"))
            xi = noise.normal(cohort.units, (w.shape[1],), w.dtype, t)
            w = w + gamma * drift + torch.sqrt(2 * gamma) * xi
            total = total + value
        good, loss = finite(w), total / (self.local_steps * cohort.sizes.clamp(min=1))
        passes = self.local_steps * u.examples
        return Answer(good, {"w": w}, local, training_cost(cohort, loss, good, passes, passes))

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

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        if total.count == 0:
            return server
        return self.moved(server, total.plain_sum("w", server["w"]), facts, key)


@dataclass(frozen=True)
class Surrogates(Question[Tensors]):
    """q_i of every client, which it keeps and sends, and its largest curvature; known are q and the step.

    One that could not be made is left out: of the sum as of what its client keeps.
    """

    method: FSGLD
    name: ClassVar[str] = "surrogates"
    lasting: ClassVar[bool] = True
    quorum: ClassVar[float] = 0.0

    def ask(self, known: Tensors) -> Tensors:
        return {"w": self.method.initial_w()}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        method, cohort = self.method, units.cohort
        w, u = asked["w"].expand(len(cohort), -1), Potential(method.model, cohort)
        if not method.quadratic:
            w = method.train(method.local, w, cohort, key.at(purpose="local")).w
            u.count(method.local.steps(cohort))
        gradient = u(w, key)[1]
        largest = u.largest(w, key).unsqueeze(1)
        vectors, own = {"curvature": largest if method.quadratic else largest.double() ** 4}, Tensors()
        if method.conducive:
            precision = self._precision(u, w, key)
            own = {"precision": precision, "shift": _times(precision, w) - gradient}
            vectors |= {name: value.flatten(1) for name, value in own.items()}
        return Answer(finite(*vectors.values()), vectors, own, u.cost)

    def _precision(self, u: Potential, w: Tensor, key: Key) -> Tensor:
        """P_i: the Hessian of U_i, or its diagonal, without what is negative."""
        if not self.method.full:
            return u.diagonal(w, key).clamp(min=0)
        hessian = u.hessian(w)
        good = finite(hessian)
        values, vectors = torch.linalg.eigh(torch.where(good[:, None, None], hessian, 0.0))
        cut = (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT
        return torch.where(good[:, None, None], cut, hessian)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        method, w = self.method, self.method.initial_w()
        q = {name: total.plain_sum(name, like) for name, like in method.nothing(w).items()}
        if method.step is not None:
            return q
        largest = float(total.plain_sum("curvature", w.new_zeros(())))
        if not method.quadratic:
            largest = total.of * largest**0.25
        return q | {"gamma": stable_step(largest + method.prior_precision, w)}


def _slope(q: Tensors, w: Tensor) -> Tensor:
    """grad log q = s - P w."""
    return q["shift"] - _times(q["precision"], w)


def _times(p: Tensor, w: Tensor) -> Tensor:
    """P w for each client, P ``[C, D, D]`` or its diagonal ``[C, D]``."""
    return p * w if p.dim() == 2 else torch.einsum("cij,cj->ci", p, w)
