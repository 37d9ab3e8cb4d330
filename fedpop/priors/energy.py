"""An energy-based prior: p(z | beta) = exp(-E(z)) / Z(beta), with any network on top of a Gaussian base.

    E(z) = norm(u)^2 / 2 + net(u),    u = (z - m) / s

A bare network is not normalisable and its chains escape; the base holds them. The network sees z in the
base's units, so that m and s move and stretch the density as a whole: with features of any size it starts at
the same place. m is learned, s is not by default: a base that shrinks onto one cluster no longer covers the
others. beta is one flat vector: m, log s, then the network's parameters.

The gradient of log p needs one of log Z, which nobody can write down, but which takes no data:

    grad_beta log p(z | beta) = -grad_beta E(z) + E_{z' ~ p(. | beta)}[grad_beta E(z')].

Clients send the first term only, averaged over their draws; the server estimates the second with chains of
its own on the prior, which go on from round to round (persistent contrastive divergence, Tieleman 2008), and
adds it with the total weight of the clients' terms. Those chains also start clients off, and are what a
newcomer without data is drawn from. They follow ``JumpHMC``: leapfrog steps inside a mode, and independence
steps from the base between them, which leave p(. | beta) invariant, so that far clusters are visited in their
true shares. In many dimensions such jumps are rare, and the shares of clusters then learn slowly or not at
all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedpop.checked import Few, Positive, Range
from fedpop.errors import EstimateError, ModelError, SettingsError
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.models.base import trainable
from fedpop.models.modules import Layout, call, federated, has_dropout
from fedpop.priors.base import Guess, Sets, Unnormalised, check_scale, into_ball, moments

ESCAPED_SCALES = 50.0
"""No state of a density on a Gaussian base is so many scales from its centre."""


@dataclass(frozen=True)
class Energy(Unnormalised):
    """An energy-based prior with any network; see the module's text.

    Args:
        net: Maps ``[n, d]`` to ``[n]`` or ``[n, 1]``, without dropout; None (the default) is a network
            with two hidden layers that starts at zero.
        mean: Where each entry of the base's mean m starts, or stays, from the model's own centre; 0
            by default.
        scale: The base's first standard deviation s; None (the default) is where a Normal prior's
            starts.
        learn_mean: False keeps m where it starts.
        learn_scale: True learns s too; False by default, since a base that shrinks onto one cluster no
            longer covers the others.
        hidden: Units in each of those layers, 32 by default; not used where a network is given.
        chains: How many chains on the prior the server keeps, 8 or more, 256 by default; more lessen
            the noise of its gradient.
        steps: Transitions that each of them makes in a round, 5 by default.
        ship: How many of their states are sent out with theta, 16 by default; at most ``chains``.
        bounds: The standard deviation s stays between these; (1e-3, 1e3) by default.
        ball: The largest norm of m, and of the network's parameters; 1e6 by default.

    >>> from torch import nn
    >>> import fedpop as fp
    >>> prior = fp.priors.Energy(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))
    >>> prior.size(2)
    68
    """

    net: nn.Module | None = None
    mean: float = 0.0
    scale: Positive | None = None
    learn_mean: bool = True
    learn_scale: bool = False
    hidden: Few = 32
    chains: Annotated[int, Range(least=8, most=1_000_000)] = 256
    steps: Few = 5
    ship: Few = 16
    bounds: tuple[Positive, Positive] = (1e-3, 1e3)
    ball: Positive = 1e6

    name: ClassVar[str] = "Energy"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self.scale, self.bounds)
        if self.ship > self.chains:
            raise SettingsError(f"an energy with {self.chains} chains cannot ship {self.ship} states")
        if self.net is not None:
            net = federated(self.net)
            if has_dropout(net):
                raise ModelError("an energy is a function of z: its network cannot have dropout")
            object.__setattr__(self, "net", net)

    # --- the flat vector ---------------------------------------------------------------------

    def network(self, d: int) -> tuple[nn.Module, Layout]:
        """The network for z of d dimensions, and where its parameters lie."""
        return _default_network(d, self.hidden) if self.net is None else (self.net, self._own_layout)

    @cached_property
    def _own_layout(self) -> Layout:
        assert self.net is not None
        return _layout(self.net)

    def size(self, d: int) -> int:
        return d + 1 + self.network(d)[1].size

    def dimension(self, beta: Tensor) -> int:
        if self.net is not None:
            return beta.shape[-1] - 1 - self._own_layout.size
        constant = _default_network(1, self.hidden)[1].size - self.hidden
        return (beta.shape[-1] - 1 - constant) // (1 + self.hidden)

    def split(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """m ``[d]``, log s ``[1]`` and the network's parameters."""
        d = self.dimension(beta)
        mean, log_scale, weights = torch.split(beta, [d, 1, beta.shape[-1] - d - 1], dim=-1)
        return mean, log_scale, weights

    def init(self, mu: Tensor, scale: float, key: Key | None = None) -> Tensor:
        d = mu.shape[0]
        if self.net is not None:
            own = {n: p.to(mu) for n, p in trainable(self.net).items()}
            weights = self._own_layout.flatten(own) if own else mu.new_zeros(0)
        else:
            weights = _keyed_weights(_default_network(d, self.hidden)[1], mu, key)
        beta = torch.cat((mu, mu.new_full((1,), math.log(scale)), weights))
        self._probe(beta, key)
        return beta

    def _probe(self, beta: Tensor, key: Key | None) -> None:
        """One pass over draws of the base: does the network fit, and is it finite?"""
        d = self.dimension(beta)
        if d < 1:
            raise ModelError("beta is too short for this energy's network")
        key = Key(0) if key is None else key
        noise = key.at(purpose="probe").normal(key.server(beta.device), (64, d), beta.dtype)[0]
        try:
            with torch.no_grad():
                energy = self.energy(beta, beta[:d] + self.split(beta)[1].exp() * noise)
        except RuntimeError as error:
            raise ModelError(f"the energy's network does not accept z of {d} dimensions: {error}") from error
        self._require_finite(energy)

    def _require_finite(self, energy: Tensor) -> None:
        if not bool(torch.isfinite(energy).all()):
            name = "its own network" if self.net is None else type(self.net).__name__
            raise ModelError(
                f"the energy of the prior is NaN or infinite at {int((~torch.isfinite(energy)).sum())} of "
                f"{energy.numel()} points ({name}): a network that is not finite everywhere has no density; "
                "check it, or lower the rate of beta_step"
            )

    def rescaled(self, beta: Tensor, scale: float) -> Tensor:
        mean, log_scale, weights = self.split(beta)
        return torch.cat((mean, torch.full_like(log_scale, math.log(scale)), weights))

    def mu(self, beta: Tensor) -> Tensor:
        """The base's centre; ``moments`` has the density's own."""
        return self.split(beta)[0]

    def sd(self, beta: Tensor) -> Tensor:
        """The base's scale; ``moments`` has the density's own."""
        mean, log_scale, _ = self.split(beta)
        return log_scale.exp().expand_as(mean)

    def lines(self, beta: Tensor, states: Tensors) -> list[str]:
        mean, sd = moments(self, beta, states)
        d = mean.shape[0]
        size, base = self.network(d)[1].size, float(self.split(beta)[1].exp())
        return [
            f"Energy: network of {size} parameters on N(m, s^2), norm of m "
            f"{float(self.mu(beta).norm()):.3f}, s {base:.3f}",
            f"  its chains: norm of mean {float(mean.norm()):.3f}, sd {float(sd.min()):.3f} to "
            f"{float(sd.max()):.3f}",
        ]

    # --- density and draws -------------------------------------------------------------------

    def energy(self, beta: Tensor, z: Tensor) -> Tensor:
        """E(z) along the last axis."""
        d = z.shape[-1]
        mean, log_scale, weights = self.split(beta)
        u = (z - mean) * (-log_scale).exp()
        net, layout = self.network(d)
        out = call(net, layout.views(weights), u.reshape(-1, d)).reshape(u.shape[:-1])
        return 0.5 * u.square().sum(-1) + out

    def value_and_grad(self, beta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """-E(z) and its gradient."""

        def total(at: Tensor) -> tuple[Tensor, Tensor]:
            value = -self.energy(beta, at)
            return value.sum(), value

        try:
            free = z.detach().requires_grad_()
        except RuntimeError:  # inside a transform of torch.func, where only its own gradients compose
            grad, value = torch.func.grad(total, has_aux=True)(z)
            return value, grad
        with torch.enable_grad():
            whole, value = total(free)
            (grad,) = torch.autograd.grad(whole, free)
        return value.detach(), grad

    def log_prob(self, beta: Tensor, z: Tensor) -> Tensor:
        """-E(z): up to the constant log Z."""
        return -self.energy(beta, z)

    # --- what a client sends, and what the server does with it -------------------------------

    def score(
        self, beta: Tensor, z: Tensor, likelihood_grad: Tensor, form: str, guess: Guess | None = None
    ) -> Tensor:
        """-grad_beta E averaged over draws: what a client can know of its score."""
        if form != "left":
            raise SettingsError(f"energies have the left form of I only, not {form!r}")
        return -self._mean_grad(beta, z)

    def _mean_grad(self, beta: Tensor, z: Tensor) -> Tensor:
        """grad_beta of the mean energy of draws ``[C, S, d]``, ``[C, size]``."""
        grad = torch.func.grad(lambda at, rows: self.energy(at, rows).mean())
        out: Tensor = torch.func.vmap(grad, in_dims=(None, 0))(beta, z)
        return out

    def mask(self, v: Tensor) -> Tensor:
        keep = torch.ones_like(v)
        d = self.dimension(v)
        keep[..., :d] *= float(self.learn_mean)
        keep[..., d] *= float(self.learn_scale)
        return v * keep

    def units(self, beta: Tensor) -> Tensor:
        """m moves in units of s, log s in units of one, weights in those that keep outputs of order one."""
        mean, log_scale, _ = self.split(beta)
        _, layout = self.network(mean.shape[0])
        pairs = zip(layout.sizes, _weight_units(layout), strict=True)
        parts = [beta.new_full((n,), unit) for n, unit in pairs]
        return torch.cat((self.sd(beta), torch.ones_like(log_scale), *parts))

    def project(self, beta: Tensor, sets: Sets | None = None) -> Tensor:
        mean, log_scale, weights = self.split(beta)
        (low, high), ball = self._sets(sets)
        return torch.cat(
            (
                into_ball(mean, ball),
                log_scale.clamp(math.log(low), math.log(high)),
                into_ball(weights, ball),
            )
        )

    def _sets(self, sets: Sets | None) -> tuple[tuple[float, float], float]:
        own = sets or Sets()
        return own.bounds or self.bounds, own.ball or self.ball

    def at_bound(self, beta: Tensor, sets: Sets | None = None) -> list[str]:
        mean, log_scale, weights = self.split(beta)
        scale, ((low, high), ball) = float(log_scale.exp()), self._sets(sets)
        out = []
        if scale <= 1.0001 * low or scale >= 0.9999 * high:
            out.append(f"the scale of the energy's base is at its bound {low if scale < 1 else high:g}")
        if max(float(mean.norm()), float(weights.norm())) >= 0.9999 * ball:
            out.append(f"the energy's parameters are at the edge of their ball, {ball:g}")
        return out

    # --- for the chains that draw from it ----------------------------------------------------

    def check_chains(self, beta: Tensor, z: Tensor) -> None:
        with torch.no_grad():
            self._require_finite(self.energy(beta, z))
        farthest = float(((z - self.mu(beta)) / self.sd(beta)).abs().max())
        if not farthest < ESCAPED_SCALES:
            raise EstimateError(
                f"the chains of the energy prior escape ({farthest:.0f} scales from its centre): its network "
                "falls faster than the Gaussian base rises, so there is no density; use a network whose "
                "output grows at most linearly, such as one with Tanh or ReLU layers"
            )


def _layout(net: nn.Module) -> Layout:
    return Layout.of({n: tuple(p.shape) for n, p in trainable(net).items()})


@lru_cache
def _default_network(d: int, hidden: int) -> tuple[nn.Module, Layout]:
    """Two hidden layers, for functional calls: it holds no values of its own."""
    net = nn.Sequential(
        nn.Linear(d, hidden, device="meta"),
        nn.SiLU(),
        nn.Linear(hidden, hidden, device="meta"),
        nn.SiLU(),
        nn.Linear(hidden, 1, bias=False, device="meta"),
    )
    return net, _layout(net)


def _weight_units(layout: Layout) -> list[float]:
    """fan_in^-1/2 for matrices, one for vectors."""
    return [math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 1.0 for shape in layout.shapes]


def _keyed_weights(layout: Layout, like: Tensor, key: Key | None) -> Tensor:
    """Random hidden layers, and a last one of zeros: the prior starts as its Gaussian base."""
    key = Key(0) if key is None else key
    noise = key.at(purpose="network").normal(key.server(like.device), (layout.size,), like.dtype)[0]
    units = _weight_units(layout)
    units[-1] = 0.0
    scale = torch.cat([like.new_full((n,), unit) for n, unit in zip(layout.sizes, units, strict=True)])
    return noise * scale
