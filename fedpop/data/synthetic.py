"""The paper's synthetic task: y = x' phi z_i + noise, with a few clients of more data than most."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedpop.checked import Checked, Count, Positive, Proportion, Whole
from fedpop.errors import SettingsError
from fedpop.federation.clients import Client
from fedpop.keys import Key
from fedpop.models import likelihoods
from fedpop.models.composition import Composition
from fedpop.models.modules import blank


@dataclass(frozen=True)
class SyntheticTask(Checked):
    """Settings of the task; the defaults are those of the paper's main figure.

    >>> task = SyntheticTask(b=4, k=3, share_small=0.75)
    >>> [len(c.y) for c in task.make(seed=0).clients]
    [5, 5, 5, 10]
    """

    b: Count = 100
    d: Count = 2
    k: Count = 20
    share_small: Proportion = 0.9
    n_small: Count = 5
    n_large: Count = 10
    variance: Positive = 0.1
    held_out: Whole = 50
    logistic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d > self.k:
            raise SettingsError(f"d is at most k, not {self.d} of {self.k}")

    def make(self, seed: int, validation: int = 0) -> Synthetic:
        """Draw truth and data, with so many validation examples for each client beside the held-out ones."""
        key = Key(seed, purpose="synthetic")
        ids = torch.arange(self.b)
        phi = key.at(purpose="phi").normal(key.server(), (self.k, self.d), torch.float64)[0]
        # An orthonormal basis, as in Collins et al.: the task's difficulty is then that of z alone.
        phi = torch.linalg.qr(phi)[0]
        z = self._effects(ids, key.at(purpose="z"))
        small = round(self.share_small * self.b)
        sizes = [self.n_small if i < small else self.n_large for i in range(self.b)]
        longest = max(sizes)
        clients = []
        x_all = key.at(purpose="x").normal(ids, (longest, self.k), torch.float64)
        x_new = key.at(purpose="x.new").normal(ids, (self.held_out, self.k), torch.float64)
        y_all = self._targets(x_all, phi, z, key.at(purpose="y"))
        y_new = self._targets(x_new, phi, z, key.at(purpose="y.new"))
        x_own = key.at(purpose="x.validation").normal(ids, (validation, self.k), torch.float64)
        y_own = self._targets(x_own, phi, z, key.at(purpose="y.validation"))
        for i, n in enumerate(sizes):
            held_out = (x_new[i].float(), y_new[i].float())
            chosen_on = (x_own[i].float(), y_own[i].float()) if validation else None
            clients.append(Client(x_all[i, :n].float(), y_all[i, :n].float(), chosen_on, held_out))
        return Synthetic(self, clients, phi, z)

    def newcomers(self, seed: int, count: int) -> list[Client]:
        """Further clients of the same population, ``n_small`` examples each; none is among ``make``'s."""
        return replace(self, b=self.b + count, share_small=1.0).make(seed).clients[self.b :]

    def _effects(self, ids: Tensor, key: Key) -> Tensor:
        """z of these clients, ``[C, d]``."""
        return key.normal(ids, (self.d,), torch.float64)

    def _targets(self, x: Tensor, phi: Tensor, z: Tensor, key: Key) -> Tensor:
        eta = torch.einsum("cnk,kd,cd->cn", x, phi, z)
        ids = torch.arange(self.b)
        if self.logistic:
            return (key.uniform(ids, eta.shape[1:], eta.dtype) <= torch.sigmoid(eta)).to(eta.dtype)
        out: Tensor = eta + self.variance**0.5 * key.normal(ids, eta.shape[1:], eta.dtype)
        return out

    def model(self, seed: int) -> Composition:
        """The model, with a keyed random start (the same for every method)."""
        backbone = blank(nn.Linear, self.k, self.d, bias=False)
        head = blank(nn.Linear, self.d, 1, bias=False)
        key = Key(seed, purpose="start")
        with torch.no_grad():
            noise = key.normal(key.server(), (self.d * self.k + self.d,))[0]
            backbone.weight.copy_(noise[: self.d * self.k].view(self.d, self.k) / self.k**0.5)
            head.weight.copy_(noise[self.d * self.k :].view(1, self.d) / self.d**0.5)
        likelihood = "bernoulli" if self.logistic else likelihoods.Normal(self.variance)
        return Composition(backbone, head, likelihood)


@dataclass(frozen=True)
class Synthetic:
    """Data with the truth behind them: phi ``[k, d]`` and z ``[b, d]``."""

    task: SyntheticTask
    clients: list[Client]
    phi: Tensor
    z: Tensor
