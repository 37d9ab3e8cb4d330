"""L2GD (Hanzely and Richtarik, 2020): everyone's own model, pulled towards the mean of all now and then.

    F(x_1, ..., x_b) = 1/b sum f_i(x_i) + lambda/(2b) sum norm(x_i - xbar)^2,   xbar the mean of all x_i

    a round  one coin for all, keyed by (seed, round), comes with the broadcast:
             with probability 1 - p   x_i -= eta/(b (1 - p)) grad f_i(x_i);    nothing is sent
             with probability p       x_i -= eta lambda/(b p) (x_i - xbar);    x_i is sent, xbar comes back
    predict  x_i, after a step towards the mean that is still due

The expected direction is grad F. A client has xbar only after everyone has sent: it takes that step when xbar
comes with the next broadcast, before anything else in that round, and after the last round in
``personalise``, so that what is computed is the method as written. The server holds the mean only, each
client in it once. ``local.rate`` is eta/b, the size of a client's own step, so that it need not grow with the
federation; ``schedule`` is a factor on it over rounds: with a constant one x wanders about the minimiser. The
theory has a single full-batch step as a local round, the default; several epochs or batches are a practical
variant of it.

A newcomer with data goes from xbar towards argmin f_i(x) + lambda/2 norm(x - xbar)^2, which the x_i of a
client solves where F is smallest, by the steps of ``newcomer``; one without data has xbar. A client without
examples has f_i = 0. We found no code of the authors; this is the paper's algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import Positive, Range
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import finite, joint_loss, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Round, Staged
from fedpop.methods.whole import WholeModel, published_w, require_pull, split_w, towards
from fedpop.server.optimisers import Constant, Schedule


@dataclass(frozen=True, kw_only=True)
class L2GD(WholeModel, Staged):
    """Everyone's own model, held near the mean of all by a penalty.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        lam: lambda, how strongly clients are held near their mean, above 0; 1 by default.
        p: The probability of a round that averages, between 0 and 1; the others are local. 0.2 by default;
            ``local.rate * lam / p`` is below 2.
        local: A client's steps in a local round, at a rate of ``local.rate / (1 - p)``;
            ``fp.LocalSGD()`` by default: one full-batch step, as in the theory.
        schedule: What the rate is multiplied by over the rounds; ``fp.steps.Constant()`` by default,
            with which models wander about the optimum.
        newcomer: The steps of a client that was not there in training; ``fp.LocalSGD(epochs=50)`` by
            default.
        compressor: Stays "identity": what clients send are states.
        clip: Stays None: a shortened state is another one.
        guard: How many times the usual norm makes a client's state absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.L2GD(model, lam=0.1, p=0.2, local=fp.LocalSGD(rate=0.3), schedule=fp.steps.Cosine())
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=200)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 1) for i in (0, 1)]
    [2.2, 3.8]
    """

    lam: Positive = 1.0
    p: Annotated[float, Range(above=0, below=1)] = 0.2
    local: LocalSGD = field(default_factory=LocalSGD)
    schedule: Schedule = field(default_factory=Constant)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=50))

    name: ClassVar[str] = "L2GD"
    as_it_is: ClassVar[str] = "clients send states, and a shortened state is another one"
    about: ClassVar[About] = About("Hanzely and Richtarik, 2020", personalised=True)
    participation: ClassVar[str] = "full"
    guarded: ClassVar[tuple[str, ...]] = ("x",)
    sends_states: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.local.rate * self.lam / self.p < 2:
            raise SettingsError(
                f"steps of local.rate lam / p = {self.local.rate * self.lam / self.p:.3g} towards the mean "
                f"grow without bound; let local.rate be below 2 p / lam = {2 * self.p / self.lam:.3g}"
            )
        require_pull("lam", self.lam, self.newcomer, "newcomer.")

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, steady=False)  # a round that averages makes no pass

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        w = self.initial_w()
        # The first broadcast brings w as a mean that pulls nobody.
        return {"w": w, "due": _truth(True, w), "pull": w.new_zeros(())} | self._next(0, w, facts, key)

    def _next(self, k: int, w: Tensor, facts: Facts, key: Key) -> Tensors:
        """The coin and the rate of round k."""
        coin = Key(key.seed).at(round=k, purpose="coin").uniform(key.server(), ()) <= self.p
        rate = self.local.rate * self.schedule.factor(k, facts.stage)
        return {"averaging": _truth(bool(coin), w), "rate": w.new_tensor(rate)}

    def extended(self, server: Tensors, facts: Facts, inverse: Tensor | None = None) -> Tensors:
        rate = self.local.rate * self.schedule.factor(facts.start, facts.stage)
        return server | {"rate": server["w"].new_tensor(rate)}

    def broadcast(self, server: Tensors) -> Tensors:
        news = {"averaging": server["averaging"], "rate": server["rate"]}
        return news | ({"w": server["w"], "pull": server["pull"]} if bool(server["due"]) else {})

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"x": broadcast["w"].expand(len(units), -1).clone()}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        x, broadcast = local["x"], round.broadcast
        if "w" in broadcast:
            x = x - broadcast["pull"] * (x - broadcast["w"])
        if bool(broadcast["averaging"]):
            return Answer(finite(x), {"x": x}, {"x": x})
        rate, most = float(broadcast["rate"]) / (1 - self.p), self.model.rows_side_by_side
        loss = joint_loss(self.model, cohort.embedded)
        new = self.local.run(loss, x, x[:, :0], cohort.x, cohort, round.key, rate, most_rows=most)
        good, passes = finite(new.w), self.local.steps(cohort)
        return Answer(good, {}, {"x": new.w}, training_cost(cohort, new.loss, good, passes, passes))

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        mean = server | {"due": _truth(False, server["w"])}
        if bool(server["averaging"]) and total.count > 0:
            mean |= {
                "w": total.estimate("x", server["w"]) / facts.clients,
                "due": _truth(True, server["w"]),
                "pull": server["rate"] * self.lam / self.p,
            }
        return mean | self._next(key.round + 1, server["w"], facts, key)

    def publish(self, server: Tensors) -> Tensors:
        pull = server["pull"] if bool(server["due"]) else torch.zeros_like(server["pull"])
        return split_w(self.model, server["w"]) | {"pull": pull}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        xbar = published_w(published, len(cohort))
        if local is not None:
            return split_w(self.model, local["x"] - published["pull"] * (local["x"] - xbar))
        key = key.at(purpose="newcomer")
        new = self.train(self.newcomer, xbar, cohort, key, aux=xbar, pull=towards(self.lam))
        return split_w(self.model, new.w)


def _truth(value: bool, like: Tensor) -> Tensor:
    return torch.tensor(value, device=like.device)
