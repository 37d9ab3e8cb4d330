"""The hyperprior p(phi, beta): it enters the objective once, whatever the number of clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.checked import Positive
from fedpop.errors import SettingsError
from fedpop.priors.base import Prior
from fedpop.settings import Setting


@dataclass(frozen=True)
class Hyperprior(Setting):
    """log p(phi, beta), flat by default: phi and mu Normal around 0, log sigma Normal around a value.

    Args:
        phi_scale: The standard deviation of phi around 0; None (the default) is flat.
        mean_scale: That of the prior's mean around 0, for Normal priors; None (the default) is flat.
        log_scale: The mean and the standard deviation of log sigma, for Normal priors that are isotropic
            or diagonal; None (the default) is flat. Give it where clients are few.

    >>> import torch
    >>> Hyperprior(phi_scale=2.0).phi_grad(torch.tensor([4.0]))
    tensor([-1.])
    """

    phi_scale: Positive | None = None
    mean_scale: Positive | None = None
    log_scale: tuple[float, Positive] | None = None

    def check(self, prior: Prior) -> None:
        """Raise unless this is a hyperprior for such a prior."""
        if prior.covariance == "full" and self.log_scale is not None:
            raise SettingsError("a hyperprior on the scale is there for isotropic or diagonal priors")
        if self.on_beta and prior.component is not prior:
            raise SettingsError(
                f"a hyperprior on the prior's mean or scale is there for Normal priors, not {prior.name}"
            )

    @property
    def on_beta(self) -> bool:
        """It says something about the prior's mean or scale."""
        return self.mean_scale is not None or self.log_scale is not None

    def plus_phi(self, phi: Tensor, j: Tensor) -> Tensor:
        """A gradient in phi, with this one's added where there is one."""
        return j if self.phi_scale is None else j + self.phi_grad(phi)

    def plus_beta(self, prior: Prior, beta: Tensor, i: Tensor) -> Tensor:
        """A score, with this one's added where there is one."""
        return i + self.beta_grad(prior, beta) if self.on_beta else i

    def value(self, prior: Prior, phi: Tensor, beta: Tensor) -> float:
        """log p(phi, beta), up to a constant."""
        out, d = 0.0, prior.dimension(beta)
        if self.phi_scale is not None:
            out -= 0.5 * float(phi.square().sum()) / self.phi_scale**2
        if self.mean_scale is not None:
            out -= 0.5 * float(beta[:d].square().sum()) / self.mean_scale**2
        if self.log_scale is not None:
            centre, spread = self.log_scale
            out -= 0.5 * float((beta[d:] - centre).square().sum()) / spread**2
        return out

    def curvature(self, prior: Prior, phi: Tensor, beta: Tensor) -> Tensor:
        """-hess log p(phi, beta), which is diagonal, ``[p, p]``."""
        of_phi, of_beta, d = torch.zeros_like(phi), torch.zeros_like(beta), prior.dimension(beta)
        if self.phi_scale is not None:
            of_phi += self.phi_scale**-2
        if self.mean_scale is not None:
            of_beta[:d] += self.mean_scale**-2
        if self.log_scale is not None:
            of_beta[d:] += self.log_scale[1] ** -2
        return torch.diag(torch.cat((of_phi, of_beta)))

    def phi_grad(self, phi: Tensor) -> Tensor:
        return torch.zeros_like(phi) if self.phi_scale is None else -phi / self.phi_scale**2

    def stiffness(self, prior: Prior, beta: Tensor, floor: float) -> float:
        """How far one full EM step would carry beta along this gradient, relative to where it pulls:
        above one, steps must be shortened or they overshoot."""
        largest = 0.0
        if self.mean_scale is not None:
            largest = max(float(prior.sd(beta).square().max()), floor) / self.mean_scale**2
        if self.log_scale is not None:
            largest = max(largest, 0.5 / self.log_scale[1] ** 2)
        return largest

    def beta_grad(self, prior: Prior, beta: Tensor) -> Tensor:
        """In the coordinates of the score: they are beta's own for the scales this is allowed for."""
        grad = torch.zeros_like(beta)
        if not self.on_beta:
            return grad
        d = prior.dimension(beta)
        if self.mean_scale is not None:
            grad[:d] = -beta[:d] / self.mean_scale**2
        if self.log_scale is not None:
            centre, spread = self.log_scale
            grad[d:] = (centre - beta[d:]) / spread**2
        return grad
