"""FedSOUL, the paper's name for FedSOUK with Langevin steps, in two presets.

``FedSOUL(model)`` is what works best: the kernel that the head asks for, Adam on phi, EM steps on the prior,
a spectral start where there is one. ``FedSOUL.paper(model)`` is Algorithm 1 to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedpop.algorithms.fedsouk import FedSOUK
from fedpop.checked import OneOf
from fedpop.client.sampler import Chain
from fedpop.kernels import ULA
from fedpop.models.base import Model
from fedpop.priors import Normal
from fedpop.server.anneal import Anneal
from fedpop.server.averaging import Averaging
from fedpop.server.beta_step import BetaStep
from fedpop.server.optimisers import SGD
from fedpop.server.schedules import Polynomial


@dataclass(frozen=True, kw_only=True)
class FedSOUL(FedSOUK):
    """FedSOUK with the kernel that the head asks for: exact steps where the posterior is Gaussian, HMC
    elsewhere. ``FedSOUL.paper()`` is the paper's Algorithm 1 to the letter.

    >>> from torch import nn
    >>> import fedpop as fp
    >>> model = fp.Composition(nn.Linear(4, 2), nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    >>> fp.FedSOUL(model).sampler.kernel, fp.FedSOUL.paper(model).sampler.kernel
    (Exponential(h=1.0), ULA(step_size=0.8, decay=0.0))
    """

    preset: Annotated[str, OneOf("default", "paper")] = "default"
    name: ClassVar[str] = "FedSOUL"

    @property
    def label(self) -> str:
        return self.name if self.preset == "default" else f"{self.name}-{self.preset}"

    @classmethod
    def paper(
        cls, model: Model, *, rate: float | None = None, power: float = 0.6, **settings: Any
    ) -> FedSOUL:
        """Unadjusted Langevin with gamma_i = 0.8 / L_i; eta1 = eta2 = rate (1 + k)^-power, plain steps,
        from the modules' own values and N(0, 1); no averaging.

        ``rate`` None finds the largest power of ten whose 20 trial rounds do not lower the likelihood.
        """
        step = SGD(rate, Polynomial(power))
        defaults: dict[str, Any] = {
            "preset": "paper",
            "kernel": ULA(),
            "chain": Chain(burn_in=0, follow=False),
            "prior": Normal(scale=1.0),
            "phi_step": step,
            "beta_step": BetaStep(step, form="left"),
            "start": "random",
            "anneal": Anneal(rounds=0),
            "average": Averaging("last"),
            "guard": None,
        }
        return cls(model, **(defaults | settings))
