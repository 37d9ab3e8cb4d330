"""The averaged dynamics of FedSOUL with Langevin steps, in closed form: where theta goes, bias included.

On a Gaussian posterior N(m, Q^-1) the unadjusted chain with step gamma has the stationary law
N(m, Q^-1 (I - gamma Q / 2)^-1). The mean of what clients send under that law is

    h(theta) = sum_i (E[grad_phi log p(D_i | z, phi)], E[grad_beta log p(z | beta)]),

the gradient of the log-likelihood at gamma = 0 (Fisher's identity) and not quite elsewhere: its root is where
Algorithm 1 settles, and the distance of that root from the optimum is what the theorem calls A(gamma).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpop.client.phi_step import expected_normal
from fedpop.errors import EstimateError
from fedpop.federation.cohort import Cohort
from fedpop.kernels.target import Target
from fedpop.methods.hierarchical import Hierarchical
from fedpop.models.local import LinearLikelihood
from fedpop.priors.normal import Normal

ITERATIONS = 50
TOLERANCE = 1e-10


@dataclass(frozen=True)
class MeanField:
    """h of a conjugate model on a cohort (double precision) for ULA with gamma_i = c / L_i."""

    method: Hierarchical
    cohort: Cohort

    @property
    def size(self) -> int:
        """The length of phi, the first part of theta."""
        return self.method.model.phi_layout.size

    def __call__(self, theta: Tensor, c: float) -> Tensor:
        """h(theta), differentiable in theta."""
        model, prior = self.method.model, self.method.hierarchy.prior
        phi, beta = theta[: self.size], theta[self.size :]
        mean, cov = stationary(self._target(phi, beta), c)
        with torch.enable_grad():
            # A copy of phi of its own: J differentiates the likelihood, not the law of z.
            own = phi.clone() if phi.requires_grad else phi.detach().clone().requires_grad_()
            local = model.bind(own, model.features(own, self.cohort), self.cohort)
            assert isinstance(local, LinearLikelihood)
            value = expected_normal(local, mean, cov).sum()
            (j,) = torch.autograd.grad(value, own, create_graph=theta.requires_grad)
        assert isinstance(prior, Normal)
        i = prior.moments_score(beta, mean, cov).sum(0)
        hyper = self.method.hyperprior
        j, i = j + hyper.phi_grad(phi), i + hyper.beta_grad(prior, beta)
        return torch.cat((j, prior.gradient(beta, i)))

    def _target(self, phi: Tensor, beta: Tensor) -> Target:
        return self.method.hierarchy.target_at(phi, beta, self.cohort)

    def jacobian(self, theta: Tensor, c: float) -> Tensor:
        """dh / dtheta."""
        out: Tensor = torch.autograd.functional.jacobian(lambda at: self(at, c), theta)
        return out

    def root(self, start: Tensor, c: float) -> Tensor:
        """The theta near ``start`` at which h vanishes, by Newton's method.

        Steps are of least norm, so that directions which the model cannot tell apart stay where they are.
        """
        theta: Tensor = start.double()
        # What the prior holds fixed has no equation, and may not move to solve the others.
        free = torch.ones_like(theta)
        free[self.size :] = self.method.hierarchy.prior.mask(free[self.size :])
        for _ in range(ITERATIONS):
            h = self(theta, c)
            move = -torch.linalg.pinv(self.jacobian(theta, c) * free, rtol=1e-9) @ h
            # Half of theta's own length at most: far from the root the linear model says little.
            move = move * min(1.0, 0.5 * float(theta.norm()) / max(float(move.norm()), 1e-300))
            theta = theta + move
            if float(move.norm()) < TOLERANCE * float(theta.norm()):
                return theta
        raise EstimateError(f"no root of the mean field was found near the start at c = {c}")


def stationary(target: Target, c: float) -> tuple[Tensor, Tensor]:
    """Mean ``[C, d]`` and covariance ``[C, d, d]`` of unadjusted Langevin chains with gamma = c / L."""
    mean, cov = target.moments()
    precision = target.block_precision
    gamma = c / precision.largest()
    q = precision.matrix[:, 0]
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    spread: Tensor = torch.linalg.solve(eye - 0.5 * gamma[:, None, None] * q, cov)
    return mean, spread
