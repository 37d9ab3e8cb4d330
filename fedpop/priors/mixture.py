"""A mixture of Normals as population prior: p(z | beta) = sum_k w_k N(z; mu_k, Sigma_k).

beta is one flat vector: log w (K numbers, which ``project`` keeps normalised), then one Normal prior's own
beta after the other. With responsibilities r_k(z) = w_k N(z; mu_k, Sigma_k) / p(z), Fisher's identity gives

    I_logw_k = E[r_k - w_k]            I_k = E[r_k s_k(z)],     s_k the score of the k-th Normal (left form),

a message of beta's size that is all EM needs too: the sums over clients of r_k, r_k z and r_k z z' are linear
in it. With rate rho, w'_k = w_k + rho I_logw_k, and component k moves by one EM step of a Normal on
I_k / w'_k: the stochastic-approximation EM of Cappe and Moulines (2009), EM itself at rho = 1, in which a
component that nobody is near stands still. The right form of I has no counterpart here: integration by parts
under the posterior gives the sum over k of I_mu_k, not each one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import OneOf, Positive, Range
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.priors.base import Guess, OfNormals, Part, Sets
from fedpop.priors.normal import COVARIANCES, Normal

MOST_COMPONENTS = 8
"""Components, at most: labels are matched over all their orders."""


@dataclass(frozen=True)
class Mixture(OfNormals):
    """A mixture of Normals; weights, means and scales are all learned.

    Args:
        components: How many Normals, 2 by default.
        covariance: That of each: "isotropic" (the default), "diagonal" or "full".
        mean: Where each entry of the average of their means starts, from the model's own centre; 0
            by default.
        scale: The first standard deviation of each; None (the default) is where a Normal prior's starts.
        spread: How far apart means start, in units of the scale, keyed by the seed; 1 by default.
            Components that start alike stay alike.
        floor: The least weight that a component keeps, below one over their number; 1e-3 by default.
        bounds: Standard deviations of every component stay between these; None has them stay within a
            factor of 1,000 of where they start, a million of a ``scale`` that was given.
        ball: The largest norm of a component's mean; None is a million standard deviations.

    >>> import fedpop as fp
    >>> fp.priors.Mixture(components=2, covariance="diagonal").size(3)
    14
    """

    components: Annotated[int, Range(least=1, most=MOST_COMPONENTS)] = 2
    covariance: Annotated[str, OneOf(*COVARIANCES)] = "isotropic"
    mean: float = 0.0
    scale: Positive | None = None
    spread: Positive = 1.0
    floor: Positive = 1e-3
    bounds: tuple[Positive, Positive] | None = None
    ball: Positive | None = None

    name: ClassVar[str] = "Mixture"
    em: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.components
        if not self.floor < 1 / count:
            raise SettingsError(f"the least weight of {count} components lies in (0, {1 / count:g})")
        assert self.component is not None  # checks the rest

    @cached_property
    def component(self) -> Normal:
        return Normal(self.covariance, self.mean, self.scale, bounds=self.bounds, ball=self.ball)

    # --- the flat vector ---------------------------------------------------------------------

    def size(self, d: int) -> int:
        return self.components * (1 + self.component.size(d))

    def dimension(self, beta: Tensor) -> int:
        return self.component.dimension(beta[: beta.shape[-1] // self.components - 1])

    def log_weights(self, beta: Tensor) -> Tensor:
        """log w, ``[K]``."""
        return beta[: self.components].log_softmax(0)

    def betas(self, v: Tensor) -> list[Tensor]:
        """The parts of beta (or of a score) that belong to each Normal."""
        return list(v[..., self.components :].chunk(self.components, dim=-1))

    def parts(self, beta: Tensor) -> list[Part]:
        pairs = zip(self.log_weights(beta), self.betas(beta), strict=True)
        return [Part(log_weight, self.component, own) for log_weight, own in pairs]

    def replaced(self, beta: Tensor, betas: Sequence[Tensor]) -> Tensor:
        return torch.cat((beta[: self.components], *betas))

    def init(self, mu: Tensor, scale: float, key: Key | None = None) -> Tensor:
        """Equal weights; means spread around mu, which stays their average."""
        key = Key(0) if key is None else key
        shape = (self.components, mu.shape[0])
        noise = key.at(purpose="spread").normal(key.server(mu.device), shape, mu.dtype)[0]
        means = mu + self.spread * scale * (noise - noise.mean(0))
        log_weights = mu.new_full((self.components,), -math.log(self.components))
        return torch.cat((log_weights, *[self.component.init(m, scale) for m in means]))

    def rescaled(self, beta: Tensor, scale: float) -> Tensor:
        means = torch.stack([self.component.mu(own) for own in self.betas(beta)])
        means = torch.lerp(means.mean(0), means, scale)  # they are spread around what stays their average
        return self.replaced(beta, [self.component.init(m, scale) for m in means])

    def mu(self, beta: Tensor) -> Tensor:
        return torch.stack([p.log_weight.exp() * p.normal.mu(p.beta) for p in self.parts(beta)]).sum(0)

    def sd(self, beta: Tensor) -> Tensor:
        mu = self.mu(beta)
        second = [
            p.log_weight.exp() * (p.normal.sd(p.beta).square() + (p.normal.mu(p.beta) - mu).square())
            for p in self.parts(beta)
        ]
        return torch.stack(second).sum(0).sqrt()

    def lines(self, beta: Tensor, states: Tensors) -> list[str]:
        first = f"Mixture of {self.components} Normals, {self.covariance}"
        return [first] + [
            f"  weight {float(p.log_weight.exp()):.3f}, {p.normal.words(p.beta)}" for p in self.parts(beta)
        ]

    def matched(self, beta: Tensor, reference: Tensor) -> Tensor:
        """Components in the order in which means and scales are nearest to the reference's."""
        (mu, sd), (mu_to, sd_to) = (self._means_and_sds(v) for v in (beta, reference))
        apart = (mu_to.unsqueeze(1) - mu).square() / (sd_to.square().unsqueeze(1) + sd.square())
        cost = (apart + (sd_to.log().unsqueeze(1) - sd.log()).square()).sum(-1)
        own = list(range(self.components))
        if cost.argmin(1).tolist() == own:
            return beta
        orders = torch.tensor(list(permutations(own)), device=beta.device)
        order = orders[cost[torch.tensor(own, device=beta.device), orders].sum(1).argmin()].tolist()
        betas = self.betas(beta)
        return torch.cat((beta[order], *[betas[k] for k in order]))

    def _means_and_sds(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """``[K, d]`` each."""
        betas = self.betas(beta)
        means = torch.stack([self.component.mu(own) for own in betas])
        return means, torch.stack([self.component.sd(own) for own in betas])

    # --- density and draws -------------------------------------------------------------------

    def _joint(self, beta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """log w_k + log N(z; mu_k, Sigma_k), ``[K, ...]``, and the gradients ``[K, ..., d]``."""
        both = [(p.log_weight, *p.normal.value_and_grad(p.beta, z)) for p in self.parts(beta)]
        values = torch.stack([log_weight + value for log_weight, value, _ in both])
        return values, torch.stack([grad for _, _, grad in both])

    def responsibilities(self, beta: Tensor, z: Tensor) -> Tensor:
        """r_k(z), ``[K, ...]``."""
        return self._joint(beta, z)[0].softmax(0)

    def value_and_grad(self, beta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        values, grads = self._joint(beta, z)
        return values.logsumexp(0), (values.softmax(0).unsqueeze(-1) * grads).sum(0)

    def cover(self, beta: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
        """z itself: a component by its weight, then that Normal."""
        parts = self.parts(beta)
        edges = torch.stack([p.log_weight for p in parts]).exp().cumsum(0)[:-1]
        chosen = (uniform.unsqueeze(-1) > edges).sum(-1)
        draws = torch.stack([p.normal.sample(p.beta, noise) for p in parts])
        index = chosen[None, ..., None].expand(1, *draws.shape[1:])
        return draws.gather(0, index).squeeze(0)

    def log_cover(self, beta: Tensor, z: Tensor) -> Tensor:
        return self.log_prob(beta, z)

    def draw(self, beta: Tensor, units: Tensor, key: Key, chains: int) -> Tensor:
        noise = key.normal(units, (chains, self.dimension(beta)), beta.dtype)
        uniform = key.at(purpose="component").uniform(units, (chains,), beta.dtype)
        return self.cover(beta, noise, uniform)

    def unit(self, beta: Tensor) -> Tensor:
        """The narrowest component's: -hess log p = sum r_k P_k - Cov_r[P_k (z - mu_k)] is at most the
        largest precision, everywhere."""
        return torch.stack([p.normal.sd(p.beta) for p in self.parts(beta)]).amin(0)

    def precision(self, beta: Tensor) -> Tensor:
        """For full covariances, which have no largest one, the sum of precisions: a bound as well."""
        if self.covariance != "full":
            return super().precision(beta)
        return torch.stack([p.normal.precision(p.beta) for p in self.parts(beta)]).sum(0)

    # --- what a client sends, and what the server does with it -------------------------------

    def score(
        self, beta: Tensor, z: Tensor, likelihood_grad: Tensor, form: str, guess: Guess | None = None
    ) -> Tensor:
        if form != "left":
            raise SettingsError(f"mixtures have the left form of I only, not {form!r}")
        clients, draws, d = z.shape
        weights = self.log_weights(beta).exp()
        share = self.responsibilities(beta, z)
        scores = [share.mean(-1).mT - weights]
        alone = z.reshape(-1, 1, d)
        for r, part in zip(share, self.parts(beta), strict=True):
            each = part.normal.score(part.beta, alone, alone, "left").reshape(clients, draws, -1)
            scores.append((r.unsqueeze(-1) * each).mean(1))
        return torch.cat(scores, dim=-1)

    def expected_score(self, beta: Tensor, log_weight: Tensor, means: Tensor, covs: Tensor) -> Tensor:
        """E[r_k s_k] is the posterior weight of component k times E[s_k] under its own posterior."""
        share = log_weight.exp()
        scores = [share - self.log_weights(beta).exp()]
        for k, part in enumerate(self.parts(beta)):
            scores.append(share[:, k : k + 1] * part.normal.moments_score(part.beta, means[:, k], covs[:, k]))
        return torch.cat(scores, dim=-1)

    def gradient(self, beta: Tensor, score: Tensor) -> Tensor:
        pairs = zip(self.betas(beta), self.betas(score), strict=True)
        grads = [self.component.gradient(own, part) for own, part in pairs]
        return torch.cat((score[: self.components], *grads))

    def units(self, beta: Tensor) -> Tensor:
        betas = [self.component.units(own) for own in self.betas(beta)]
        return torch.cat((torch.ones_like(beta[: self.components]), *betas))

    def em_step(self, beta: Tensor, score: Tensor, rate: float, floor: Tensor | float = 0.0) -> Tensor:
        weights = self.log_weights(beta).exp() + rate * score[: self.components]
        weights = weights.clamp(min=self.floor)
        pairs = zip(self.betas(beta), self.betas(score), weights, strict=True)
        moved = [self.component.em_step(own, part / w, rate, floor) for own, part, w in pairs]
        return torch.cat((weights.log(), *moved))

    def scales(self, beta: Tensor) -> tuple[float, float, float]:
        least, most, norms = zip(*[self.component.scales(own) for own in self.betas(beta)], strict=True)
        return min(least), max(most), max(norms)

    def project(self, beta: Tensor, sets: Sets | None = None) -> Tensor:
        """Weights at least ``floor`` that add up to one; every Normal inside its own sets."""
        weights = self.log_weights(beta).exp()
        # Those below are raised, the others give in proportion to what they have above it.
        above = (weights - self.floor).clamp(min=0)
        weights = self.floor + above * ((1 - self.components * self.floor) / above.sum())
        return torch.cat((weights.log(), *[self.component.project(own, sets) for own in self.betas(beta)]))

    def at_bound(self, beta: Tensor, sets: Sets | None = None) -> list[str]:
        out = [
            f"component {k} of the prior is empty: its weight is at the floor {self.floor:g}"
            for k, p in enumerate(self.parts(beta))
            if float(p.log_weight.exp()) <= 1.01 * self.floor
        ]
        for k, own in enumerate(self.betas(beta)):
            out += [f"component {k}: {word}" for word in self.component.at_bound(own, sets)]
        return out
