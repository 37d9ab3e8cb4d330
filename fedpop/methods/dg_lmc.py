"""DG-LMC (Plassier et al., 2021): a Gibbs sampler between the clients' models and the server's.

The joint law of theta and everyone's z_i, all of them whole models w = (phi, z), has density

    exp(-lambda norm(theta)^2 / 2 - sum_i [U_i(z_i) + norm(z_i - theta)^2 / (2 rho_i)]).

    client   N times  z_i -= gamma_i [grad U_i(z_i) + (z_i - theta) / rho_i] + sqrt(2 gamma_i) xi;
             sends z_i / rho_i and 1 / rho_i
    server   theta ~ N(sum (z_i / rho_i) / R, I / R),  R = lambda + sum 1 / rho_i

Everyone takes part in every round. The marginal of theta is the posterior as rho -> 0, where the chain
stops moving; for Gaussian U_i with precisions H_i its precision is lambda + sum_i (H_i^-1 + rho_i I)^-1, so
rho is a bias, not noise. lambda = 0 is the paper's law, in which a prior is part of the U_i.

It is FedPop's structure with phi empty, z_i whole and mu drawn instead of maximised: FedSOUK's mu (with
sigma^2 = rho fixed) is the mode of theta's marginal. What is sent is z_i itself, up to rho_i: nothing here is
private. Rules were read beside the authors' public code, which has gamma_i = 1 / (N_i (1 / rho_i + L_i)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Count, NotNegative, Positive
from fedpop.client.losses import finite, training_cost
from fedpop.client.potential import Potential
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key, unit_of
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Asks, Facts, Round
from fedpop.methods.samples import PosteriorSamples
from fedpop.questions import Question
from fedpop.questions.curvature import STEP, Curvature


@dataclass(frozen=True, kw_only=True)
class DGLMC(PosteriorSamples, Asks):
    """Samples of the whole model by Gibbs steps between clients and server.

    Below, L_i is the largest curvature of U_i at the start, which a client keeps to itself.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local_steps: N, how many steps a client makes in a round; 10 by default.
        rho: How far clients' models may be from the server's (a variance): one number for all, or one
            for each client by name. None (the default) is 1 / L_i: the stiffest direction's precision is
            then halved, every other one's changed less. Smaller ones have less bias and mix more slowly.
        step: gamma_i for everyone; None (the default) is 0.25 / (L_i + 1 / rho_i). A network whose
            curvature grows in training needs a smaller one.
        batch: How many of a client's examples a step looks at; None (the default) is all.
        prior_precision: lambda, that of a Normal prior around 0 on the server's model; 0 by default, as
            in the paper.
        samples: How many of the chain's states the server keeps, the oldest overwritten; 50 by default.
            Predictions average over them.
        burn_in: Rounds before the first state is kept; None (the default) is half of them.
        thin: Rounds from one kept state to the next; None (the default) spreads them over all rounds
            after burn-in.
        compressor: Stays "identity": what clients send are states.
        clip: Stays None: a shortened state is another one.
        guard: How many times the usual norm makes a client's state absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.ones(50, 1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.DGLMC(model, rho=0.01, local_steps=10, samples=60)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=120)
    >>> p = population.predict(0, [[1.0]])  # N(3, 0.015); the posterior is N(3, 0.01)
    >>> round(p.mean.item(), 1), round(p.means.std().item(), 1)
    (3.0, 0.1)
    """

    local_steps: Count = 10
    rho: Positive | Mapping[str, Positive] | None = None
    step: Positive | None = None
    batch: Count | None = None
    prior_precision: NotNegative = 0.0

    name: ClassVar[str] = "DG-LMC"
    as_it_is: ClassVar[str] = "clients send states, and a shortened state is another one"
    about: ClassVar[About] = About(
        "Plassier et al., ICML 2021",
        personalised=False,
        memory="M (d + d_phi)",
        instance="phi empty, z whole, mu drawn",
    )
    participation: ClassVar[str] = "full"
    guarded: ClassVar[tuple[str, ...]] = ("z/rho", "1/rho")
    sends_states: ClassVar[bool] = True

    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        known = self.step is not None and self.rho is not None
        return () if known else (Curvature(self.model, self.initial_w()),)

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"z": broadcast["w"].expand(len(units), -1).clone()}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        u = Potential(self.model, cohort, self.batch)
        theta, z, key = round.broadcast["w"].expand(len(cohort), -1), local["z"], round.key
        # Nobody was asked for it where rho and step were given.
        curvature = local.get("curvature", z.new_zeros(len(cohort)))
        stiffness = self._stiffness(cohort.units, curvature)
        gamma = self._gamma(stiffness, curvature)
        noise, total = key.at(purpose="noise"), z.new_zeros(len(cohort))
        for m in range(self.local_steps):
            value, slope = u(z, key.at(purpose=f"step-{m}"))
            xi = noise.normal(cohort.units, (z.shape[1],), z.dtype, m)
            z = z - gamma * (slope + stiffness * (z - theta)) + torch.sqrt(2 * gamma) * xi
            total = total + value
        good = finite(z, stiffness, curvature.unsqueeze(1))
        loss, passes = total / (self.local_steps * cohort.sizes.clamp(min=1)), self.local_steps * u.examples
        vectors = {"z/rho": stiffness * z, "1/rho": stiffness}
        return Answer(good, vectors, local | {"z": z}, training_cost(cohort, loss, good, passes, passes))

    @cached_property
    def _own_rho(self) -> dict[int, float]:
        """rho_i by the hash of a client's name, where there is one for each."""
        return {unit_of(name): r for name, r in self.rho.items()} if isinstance(self.rho, Mapping) else {}

    def _stiffness(self, units: Tensor, curvature: Tensor) -> Tensor:
        """1 / rho_i, ``[C, 1]``."""
        if self.rho is None:
            return curvature.unsqueeze(1)
        if isinstance(self.rho, Mapping):
            rho = curvature.new_tensor([self._own_rho[unit] for unit in units.tolist()])
            return 1 / rho.unsqueeze(1)
        return 1 / curvature.new_full((len(units), 1), self.rho)

    def _gamma(self, stiffness: Tensor, curvature: Tensor) -> Tensor:
        """gamma_i, ``[C, 1]``; a client without data and without a rho has nowhere to go."""
        if self.step is not None:
            if self.step > torch.finfo(stiffness.dtype).max:
                raise SettingsError(
                    f"DG-LMC: a step of {self.step:g} is beyond the model's {stiffness.dtype}"
                )
            return torch.full_like(stiffness, self.step) * (stiffness > 0)
        total = stiffness + curvature.unsqueeze(1)
        return torch.where(total > 0, STEP / total, torch.zeros_like(total))

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        if total.count == 0:
            return server
        w = server["w"]
        precision = self.prior_precision + total.plain_sum("1/rho", w.new_zeros(()))
        if not float(precision) > 0:
            return server
        xi = key.at(purpose="theta").normal(key.server(w.device), tuple(w.shape), w.dtype)[0]
        theta = total.plain_sum("z/rho", w) / precision + xi / torch.sqrt(precision)
        return self.moved(server, theta, facts, key)
