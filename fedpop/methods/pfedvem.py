"""pFedVEM (Zhu, Ma and Blaschko, CVPR 2023): a Normal posterior of each client's head, whose mean counts in
the common one by how sure of it the client is.

    client   q_i = N(m_i, diag(s_i^2)) of its head, under the prior N(mu, rho_i^2 I)
             rho_i^2 = mean over weights of s_i^2 + (m_i - mu)^2                                  M step
             (m_i, s_i) after E steps along the gradient of
                 E_q log p(D_i | phi, z) - KL(q_i, N(mu, rho_i^2 I)),  S draws at each            E step
             phi_i = phi after E' epochs of SGD on E_q f_i(phi, z), S draws of z
             sends n_i (phi_i - phi), n_i, (m_i - mu) / rho_i^2 and 1 / rho_i^2;  keeps m_i, s_i
    server   phi += sum n_i (phi_i - phi) / sum n_i
             mu  += sum (m_i - mu) / rho_i^2 over sum 1 / rho_i^2
    predicts with draws of q_i, after one more E step at the final phi; without data, at mu

s = softplus(a), and a is what moves. It is FedPop with a prior for each client, of which the server learns
the mean, and a mean-field posterior in the place of chains. The authors' code was read beside the paper: it
has the same two steps in this order, and weighs with the rho_i of before the E step, as here. There every
client works in every round and the server hears a tenth of them; here active ones work. There heads are drawn
anew for each batch of the body's, here once a round. There a client predicts at m_i; ``draws=0`` does so
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedpop.checked import Count, Positive, Whole
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import body_loss, finite, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel
from fedpop.models.local import LocalLikelihood, NoData
from fedpop.models.predictive import Predictive, mixture_score


@dataclass(frozen=True, kw_only=True)
class PFedVEM(Paced, WholeModel):
    """A Bayesian head for each client over a shared body, by variational expectation maximisation.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        head: The E step of a round: so many steps on all examples at once, along the gradient of the sum
            over them; ``fp.LocalSGD(epochs=10, rate=0.001, momentum=0.9)`` by default, as published.
        body: How clients then train the body; ``fp.LocalSGD(epochs=5, rate=0.001, batch=10, momentum=0.9)``
            by default, as published.
        samples: Heads that are drawn from a client's posterior for each step of its own, and for the body's
            epochs; 5 by default, as published.
        scale: The first standard deviation of every weight of a head; 1 by default, as published.
        draws: Heads that predictions average over; 100 by default, and 0 predicts at the mean of the
            posterior alone.
        newcomer: How often a client that took part in no round makes its two steps; 10 by default.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (phi_i - phi), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.PFedVEM(model, head=fp.LocalSGD(epochs=20, rate=0.01), samples=50)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=20)
    >>> [round(population.predict(i, [[1.0]]).mean.item()) for i in (0, 1)]
    [2, 4]
    """

    head: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10, rate=1e-3, momentum=0.9))
    body: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=5, rate=1e-3, batch=10, momentum=0.9))
    samples: Count = 5
    scale: Positive = 1.0
    draws: Whole = 100
    newcomer: Count = 10

    name: ClassVar[str] = "pFedVEM"
    uncertainty: ClassVar[bool] = True
    about: ClassVar[About] = About(
        "Zhu et al., CVPR 2023",
        personalised=True,
        bounds=False,
        memory="M d + d_phi",
        instance="mean-field posterior, a scale for each client",
    )
    private: ClassVar[tuple[str, ...]] = ("a",)
    guarded: ClassVar[tuple[str, ...]] = ("dphi", "dm")
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)
    not_private: ClassVar[str] = "the precisions by which its heads are weighted have no bound"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.batch is not None or self.head.decay:
            raise SettingsError(
                "PFedVEM's head takes steps on all examples at once under a prior: leave batch and decay "
                "out of head"
            )

    @property
    def footprint(self) -> Footprint:
        size, final = self.model.phi_layout.size, max(self.draws, 1)
        return replace(super().footprint, compressed=size, draws=self.samples, final_draws=final)

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        return {"phi": self.model.initial_phi(), "mu": self.model.initial_z()}

    def broadcast(self, server: Tensors) -> Tensors:
        return server

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        m = broadcast["mu"].expand(len(units), -1).clone()
        return {"m": m, "a": torch.full_like(m, self.scale).expm1().log()}

    # --- a client's round --------------------------------------------------------------------

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        phi, mu, key = round.broadcast["phi"], round.broadcast["mu"], round.key
        rho2 = self.spread(local["m"], local["a"], mu)
        target = self.likelihood(phi, cohort, key)
        m, a = self.e_step(target, local["m"], local["a"], mu, rho2, cohort, key, pace=round.pace)
        heads = drawn(m, a, cohort, key.at(purpose="body"), self.samples)
        start, loss = phi.expand(len(cohort), -1), body_loss(self.model, cohort.embedded)
        body = self.train(
            self.body, start, cohort, key.at(purpose="body"), aux=heads, loss=loss, pace=round.pace
        )
        n, good = cohort.sizes.to(phi.dtype).unsqueeze(1), finite(body.w, m, a)
        precision = (n > 0) / rho2  # who has no data knows nothing of mu
        vectors = {"dphi": n * (body.w - start), "n": n, "dm": precision * (m - mu), "1/rho^2": precision}
        examples, steps = cohort.examples, self.body.steps(cohort)
        work = examples * self.head.epochs * self.samples + steps
        cost = training_cost(cohort, body.loss, good, examples / 3 + steps, work)
        return Answer(good, vectors, {"m": m, "a": a}, cost)

    def spread(self, m: Tensor, a: Tensor, mu: Tensor) -> Tensor:
        """rho^2 ``[C, 1]``."""
        return (softplus(a).square() + (m - mu).square()).mean(1, keepdim=True)

    def likelihood(self, phi: Tensor, cohort: Cohort, key: Key | None) -> LocalLikelihood:
        """log p(D_i | phi, z) of everyone on features that stand still; with dropout where there is a key."""
        if cohort.longest == 0:
            return NoData()
        with torch.no_grad():
            rows = None if key is None else self.model.dropout_keys(cohort, key)
            features: Inputs = map_inputs(Tensor.detach, self.model.features(phi, cohort, rows))
        return self.model.bind(phi, features, cohort, rows)

    def e_step(
        self,
        target: LocalLikelihood,
        m: Tensor,
        a: Tensor,
        mu: Tensor,
        rho2: Tensor,
        cohort: Cohort,
        key: Key,
        *,
        pace: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """(m, a) ``[C, d]`` after E steps with momentum."""
        rate, beta = pace * self.head.rate, self.head.momentum
        of_m, of_a = torch.zeros_like(m), torch.zeros_like(a)
        for e in range(self.head.epochs):
            s = softplus(a)
            xi = key.at(purpose=f"head-{e}").normal(cohort.units, (self.samples, m.shape[1]), m.dtype)
            _, g = target.value_and_grad(m.unsqueeze(1) + s.unsqueeze(1) * xi)
            of_m = beta * of_m + (m - mu) / rho2 - g.mean(1)
            of_a = beta * of_a + (s / rho2 - 1 / s - (g * xi).mean(1)) * torch.sigmoid(a)
            m, a = m - rate * of_m, a - rate * of_a
        return m, a

    # --- the server's, and predictions -------------------------------------------------------

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        body, head = total.mean("dphi", by="n"), total.mean("dm", by="1/rho^2")
        if body is None or head is None:
            return server
        return {"phi": server["phi"] + body, "mu": server["mu"] + head}

    def publish(self, server: Tensors) -> Tensors:
        return {"phi": server["phi"], "z": server["mu"]}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        phi, mu = published["phi"], published["z"]
        state = self.enter(cohort.units, {"mu": mu}, key) if local is None else local
        m, a, target = state["m"], state["a"], self.likelihood(phi, cohort, None)
        for k in range(self.newcomer if local is None else 1):
            m, a = self.e_step(target, m, a, mu, self.spread(m, a, mu), cohort, key.at(purpose=f"final-{k}"))
        z = drawn(m, a, cohort, key.at(purpose="final"), self.draws) if self.draws else m.unsqueeze(1)
        there = (cohort.sizes > 0)[:, None, None]
        return {"z": torch.where(there, z, mu)}

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        phi = published["phi"]
        with torch.no_grad():
            eta = self.model.outputs_at(phi, personal["z"][0], x)
        return Predictive(eta, self.model.likelihood, self.model.params(phi), key, plug_in=not self.draws)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        phi, z = published["phi"], self.personalise(published, cohort, local, key)["z"]
        with torch.no_grad():
            return mixture_score(self.model, phi, z, self.model.features(phi, held_out), held_out)


def drawn(m: Tensor, a: Tensor, cohort: Cohort, key: Key, count: int) -> Tensor:
    """Heads from everyone's q ``[C, count, d]``."""
    xi = key.at(purpose="heads").normal(cohort.units, (count, m.shape[1]), m.dtype)
    return m.unsqueeze(1) + softplus(a).unsqueeze(1) * xi
