"""FedProx (Li et al., MLSys 2020): FedAvg whose clients are held near the server's model.

    client   w_i = w after E epochs of SGD on f_i(u) + mu/2 norm(u - w)^2;  sends n_i (w_i - w) and n_i
    server   w  += sum n_i (w_i - w) / sum n_i

mu = 0 is FedAvg. Everyone does all of its epochs: the stragglers' partial work is not modelled. The losses
that are reported are f_i's, without the proximal term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedpop.checked import NotNegative
from fedpop.client.local_sgd import Trained
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.methods.base import About
from fedpop.methods.fedavg import FedAvg
from fedpop.methods.whole import require_pull, towards


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """One model for all, with a proximal term against drift.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        mu: The strength of the pull towards the server's model, 0 or more; 0.01 by default, and 0 is
            FedAvg. Raise it where clients differ and take many steps; ``local.rate * mu`` is at most 2
            (more with momentum).
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
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
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedProx(model, mu=0.1, local=fp.LocalSGD(epochs=2, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=10)
    >>> round(population.predict(0, [[1.0]]).mean.item(), 2)
    3.0
    """

    mu: NotNegative = 0.01

    name: ClassVar[str] = "FedProx"
    about: ClassVar[About] = About("Li et al., MLSys 2020", personalised=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_pull("mu", self.mu, self.local)

    def local_model(self, w: Tensor, cohort: Cohort, key: Key, pace: float = 1.0) -> Trained:
        return self.train(self.local, w, cohort, key, aux=w, pull=towards(self.mu), pace=pace)
