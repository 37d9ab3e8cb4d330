"""Ditto (Li et al., ICML 2021): FedAvg, and beside it a model of its own for each client, held near w.

    client   w_i = w after E epochs of SGD on f_i;  sends n_i (w_i - w) and n_i
             v_i after E' epochs of  v -= eta (grad f_i(v) + lambda (v - w));  keeps v_i
    server   w += sum n_i (w_i - w) / sum n_i

w is FedAvg's, to the bit, and never sees v_i. v_i starts at the w of the client's first round. lambda = 0 is
training alone; with a large lambda v_i tends to w, but these explicit steps are unstable for
eta lambda > 2 (2 (1 + momentum) with momentum), which is refused. The authors' code draws clients by size and
counts them alike; here sums are weighted by n_i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from fedpop.checked import NotNegative
from fedpop.client.local_sgd import LocalSGD, Trained
from fedpop.client.losses import finite, training_cost
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors
from fedpop.methods.base import About, Footprint, Round
from fedpop.methods.fedavg import FedAvg
from fedpop.methods.whole import published_w, require_pull, split_w, towards


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """A common model, and personal ones that are pulled towards it.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        lam: lambda, the strength of the pull, 0 or more; 1 by default, and 0 is training alone. Times
            the rate of ``personal`` or ``newcomer`` it is at most 2 (more with momentum).
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        personal: How clients train their personal models in a round; ``fp.LocalSGD()`` by default.
        newcomer: How a client that took part in no round trains its personal model, from the common one;
            ``fp.LocalSGD(epochs=10)`` by default.
        server_rate: How much of the clients' mean move the server makes; 1 by default. Above 1 it goes
            beyond it.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (w_i - w), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> sgd = fp.LocalSGD(epochs=20, rate=0.5)
    >>> method = fp.Ditto(model, lam=float((x**2).mean()), local=sgd, personal=sgd)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=10)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]  # halfway to the common 3
    [2.5, 3.5]
    """

    lam: NotNegative = 1.0
    personal: LocalSGD = field(default_factory=LocalSGD)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))

    name: ClassVar[str] = "Ditto"
    about: ClassVar[About] = About("Li et al., ICML 2021", personalised=True)
    private: ClassVar[tuple[str, ...]] = ("v",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_pull("lam", self.lam, self.personal, "personal.")
        require_pull("lam", self.lam, self.newcomer, "newcomer.")

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, phi_copies=6)

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"v": broadcast["w"].expand(len(units), -1).clone()}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w, key = round.broadcast["w"].expand(len(cohort), -1), round.key
        new, now = self.local_model(w, cohort, key, round.pace), key.at(purpose="personal")
        own = self.personal_model(self.personal, local["v"], w, cohort, now, round.pace)
        n, good = cohort.sizes.to(w.dtype).unsqueeze(1), finite(new.w, own.w)
        passes = self.local.steps(cohort) + self.personal.steps(cohort)
        cost = training_cost(cohort, own.loss, good, passes, passes)
        return Answer(good, {"dw": n * (new.w - w), "n": n}, {"v": own.w}, cost)

    def personal_model(
        self, sgd: LocalSGD, v: Tensor, w: Tensor, cohort: Cohort, key: Key, pace: float = 1.0
    ) -> Trained:
        """v ``[C, D]`` after steps on f_i(v) + lambda/2 norm(v - w)^2."""
        return self.train(sgd, v, cohort, key, aux=w, pull=towards(self.lam), pace=pace)

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is not None:
            return split_w(self.model, local["v"])
        w = published_w(published, len(cohort))  # and there it stays, without data
        v = self.personal_model(self.newcomer, w, w, cohort, key.at(purpose="newcomer")).w
        return split_w(self.model, v)
