"""pFedBayes (Zhang et al., ICML 2022): a Normal posterior of each client's whole network, under one that
everybody shares.

    client   q_i = N(m_i, diag(s_i^2)) of its own w = (phi, z), v = (m, s) everybody's. On each batch B of
             E epochs
                 a step of (m_i, s_i) on  -n_i mean_B E_q log p(y | x, w) + zeta KL(q_i, v),  S draws of w
                 a step of v on           zeta KL(q_i, v)
             sends n_i (v_i - v) and n_i;  keeps m_i, s_i
    server   v += beta sum n_i (v_i - v) / sum n_i
    predicts with draws of q_i; without data, of v

s = softplus(a), and a is what moves and what is averaged; steps are Adam's. It is FedPop with phi empty and a
whole network for z: a Normal prior, of which the server learns the mean and every weight's own scale, and a
mean-field posterior in the place of chains, which zeta makes a cold or a warm one.

The authors' code was read beside the paper. As there: both steps for each batch, in this order; means are
weighted by n_i (the paper's count alike); q_i starts as v does. Otherwise than there: Adam begins anew in
each round, where theirs lives on with its client; a batch has one step of q_i for one of v, as in the paper,
where the code has five; draws have the s_i that the bound counts with, where the code's have a thousandth of
it, so that its networks are as good as fixed; distances are of scales as they are, where the code's are of
those a step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedpop.checked import Count, Positive, Whole
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import finite, joint_loss, slope_of, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Paced, Round
from fedpop.methods.samples import log_mean_of_networks, outputs_of_networks, params_of_networks
from fedpop.methods.whole import WholeModel, split_w
from fedpop.models.modules import RowKeys
from fedpop.models.predictive import Predictive
from fedpop.server.optimisers import Adam

ADAM = Adam(beta2=0.999)
"""Whose steps are taken, at the rates of ``local``."""


@dataclass(frozen=True, kw_only=True)
class PFedBayes(Paced, WholeModel):
    """A Bayesian network for each client, by variational inference.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: Epochs, batches and the rate of Adam's steps, of a client's posterior and of the common one;
            ``fp.LocalSGD(epochs=5, rate=0.001)`` by default, the published rate.
        zeta: How much the distance between the two counts, over 0; 10 by default, as published. At 1 it is
            the bound of a Bayesian network's evidence, and more trusts the common one more.
        scale: The first standard deviation of every weight; 0.05 by default, about what was published.
        samples: Networks that are drawn from a client's posterior for each of its steps; 1 by default, as
            published.
        draws: Networks that predictions average over; 10 by default, and 0 predicts at the posterior's
            mean.
        newcomer: How a client that took part in no round finds its posterior, the common one standing
            still; ``fp.LocalSGD(epochs=10, rate=0.001)`` by default.
        beta: How much of the clients' mean move the server makes; 1 by default, as published.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (v_i - v), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(0.01))
    >>> method = fp.PFedBayes(model, local=fp.LocalSGD(epochs=20, rate=0.02), zeta=0.1)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=20)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 1) for i in (0, 1)]
    [2.0, 4.0]
    """

    local: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=5, rate=1e-3))
    zeta: Positive = 10.0
    scale: Positive = 0.05
    samples: Count = 1
    draws: Whole = 10
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10, rate=1e-3))
    beta: Positive = 1.0

    name: ClassVar[str] = "pFedBayes"
    uncertainty: ClassVar[bool] = True
    about: ClassVar[About] = About(
        "Zhang et al., ICML 2022",
        personalised=True,
        bounds=False,
        memory="2 (d + d_phi)",
        instance="phi empty, mean-field posterior",
    )
    private: ClassVar[tuple[str, ...]] = ("q",)
    guarded: ClassVar[tuple[str, ...]] = ("dv",)
    compressed: ClassVar[tuple[str, ...]] = ("dv",)
    not_private: ClassVar[str] = "Adam's steps on a posterior have no bound that holds whatever the data are"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, sgd in (("local", self.local), ("newcomer", self.newcomer)):
            if sgd.momentum or sgd.decay:
                raise SettingsError(
                    f"PFedBayes takes Adam's steps under a prior: leave momentum and decay out of {name}"
                )

    @property
    def footprint(self) -> Footprint:
        # Both posteriors, their gradients, two moments of each.
        final = max(self.draws, 1)
        return replace(super().footprint, compressed=2 * self.size, phi_copies=16, final_draws=final)

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        m = self.initial_w()
        return {"v": torch.cat((m, torch.full_like(m, self.scale).expm1().log()))}

    def broadcast(self, server: Tensors) -> Tensors:
        return server

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"q": broadcast["v"].expand(len(units), -1).clone()}

    # --- a client's round --------------------------------------------------------------------

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        v, key = round.broadcast["v"], round.key
        found = [
            self.trained(self.local, q, v, one, key, round.pace)
            for q, one in zip(local["q"], cohort.one_by_one(), strict=True)
        ]
        q, new, loss = (torch.stack(parts) for parts in zip(*found, strict=True))
        n, good = cohort.sizes.to(v.dtype).unsqueeze(1), finite(q, new)
        passes = self.local.steps(cohort) * self.samples
        cost = training_cost(cohort, loss, good, passes, passes)
        return Answer(good, {"dv": n * (new - v), "n": n}, {"q": q}, cost)

    def trained(
        self,
        steps: LocalSGD,
        q: Tensor,
        v: Tensor,
        one: Cohort,
        key: Key,
        pace: float = 1.0,
        shared: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One client's q and v ``[2 D]`` after their epochs, and the mean loss on the way; v stays where it
        is not ``shared``."""
        n, total, rate = len(one.y), q.new_zeros(()), pace * steps.rate
        of_q, of_v, unit = ADAM.init(q), ADAM.init(v), torch.ones_like(q)
        for pick, now in batches(steps, one, key):
            value, slope = self.data_slope(q, one, pick, now)
            pulled, _ = kl_slopes(q, v)
            q, of_q = ADAM.moved(q, -(n * slope + self.zeta * pulled), of_q, unit, rate)
            if shared:
                _, pulled = kl_slopes(q, v)
                v, of_v = ADAM.moved(v, -self.zeta * pulled, of_v, unit, rate)
            total = total + value * len(pick)
        return q, v, total / max(n * steps.epochs, 1)

    def data_slope(self, q: Tensor, one: Cohort, pick: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """The mean loss of some examples over draws of q, and its gradient in q ``[2 D]``."""
        m, a = q.chunk(2)
        s, x, y = softplus(a), map_inputs(lambda v: v.index_select(0, pick), one.x), one.y[pick]
        at = slope_of(joint_loss(self.model, one.embedded))
        rows = RowKeys(key, one.units.expand(len(pick)), pick)
        total, slope = q.new_zeros(()), torch.zeros_like(q)
        for xi in key.at(purpose="networks").normal(one.units, (self.samples, len(m)), m.dtype)[0]:
            g, value = at(m + s * xi, m[:0], x, y, None, rows)
            total = total + value / self.samples
            slope += torch.cat((g, g * xi * torch.sigmoid(a))) / self.samples
        return total, slope

    # --- the server's, and predictions -------------------------------------------------------

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        move = total.mean("dv", by="n")
        return server if move is None else {"v": server["v"] + self.beta * move}

    def publish(self, server: Tensors) -> Tensors:
        m, a = server["v"].chunk(2)
        return split_w(self.model, m) | {"a": a}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        v = torch.cat((published["phi"], published["z"], published["a"]))
        if local is not None:
            there = (cohort.sizes > 0).unsqueeze(1)
            return {"q": torch.where(there, local["q"], v)}
        now = key.at(purpose="newcomer")
        own = [self.trained(self.newcomer, v, v, one, now, shared=False)[0] for one in cohort.one_by_one()]
        return {"q": torch.stack(own)}

    def networks(self, q: Tensor, key: Key) -> Tensor:
        """What predictions average over ``[S, D]``."""
        m, a = q.chunk(2)
        if not self.draws:
            return m.unsqueeze(0)
        each = key.at(purpose="networks")
        xi = each.normal(each.server(m.device), (self.draws, len(m)), m.dtype)[0]
        return m + softplus(a) * xi

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        w = self.networks(personal["q"][0], key)
        eta, params = outputs_of_networks(self.model, w, x), params_of_networks(self.model, w)
        return Predictive(eta, self.model.likelihood, params, key, plug_in=not self.draws)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        own = self.personalise(published, cohort, local, key)["q"]
        each = [
            log_mean_of_networks(self.model, self.networks(q, key), one).sum()
            for q, one in zip(own, held_out.one_by_one(), strict=True)
        ]
        return torch.stack(each), held_out.sizes.double()


def batches(steps: LocalSGD, one: Cohort, key: Key) -> Iterator[tuple[Tensor, Key]]:
    """One client's examples in random order, epoch after epoch, with each batch's own key."""
    n = len(one.y)
    for epoch in range(steps.epochs if n else 0):
        now = key.at(purpose=f"epoch-{epoch}")
        order = torch.arange(n, device=one.y.device)
        if steps.batch is not None:
            order = torch.argsort(now.uniform(one.units, (n,))[0])
        for b, pick in enumerate(order.split(steps.batch or n)):
            yield pick, now.at(purpose=f"batch-{b}")


def kl_slopes(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of KL(q, v) in q and in v, each ``[2 D]``; softplus makes the scales."""
    (m, a), (mu, b) = q.chunk(2), v.chunk(2)
    s, t = softplus(a), softplus(b)
    pull, ratio = (m - mu) / t.square(), (s.square() + (m - mu).square()) / t.square()
    of_q = torch.cat((pull, (s / t.square() - 1 / s) * torch.sigmoid(a)))
    return of_q, torch.cat((-pull, (1 - ratio) / t * torch.sigmoid(b)))
