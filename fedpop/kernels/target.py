"""p(D_i | phi, z_i) p(z_i | beta): model and population prior together (``Hierarchy``), the log-posterior of
z that a kernel samples (``Target``), and its preconditioner for linear heads (``Precision``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.condensed import Condensed
from fedpop.models.local import LinearLikelihood, LocalLikelihood
from fedpop.models.modules import RowKeys
from fedpop.priors import Hyperprior
from fedpop.priors.base import Guess, Prior, normals_of

POWER_ITERATIONS = 20
"""Products with a Hessian that find its largest eigenvalue where a head is not linear."""
NEWTON_STEPS, HALVINGS, NEWTON_ROUNDING = 30, 20, 1e-6
"""Steps to a mode, halvings of one of them, at most; and what rounding of single precision leaves of both."""


class Precision(ABC):
    """Q = L L' of every client: the preconditioner and, for HMC, the mass matrix."""

    @abstractmethod
    def root(self, v: Tensor) -> Tensor:
        """L^-1 v for v ``[C, K, d]``."""

    @abstractmethod
    def root_transposed(self, v: Tensor) -> Tensor:
        """L^-T v: standard normal noise becomes noise with covariance Q^-1."""

    def solve(self, v: Tensor) -> Tensor:
        """Q^-1 v."""
        return self.root_transposed(self.root(v))


@dataclass(frozen=True)
class DiagonalPrecision(Precision):
    """Q = diag(sd^-2), the same for all clients: the prior's scale as the natural unit."""

    sd: Tensor

    def root(self, v: Tensor) -> Tensor:
        return v * self.sd

    def root_transposed(self, v: Tensor) -> Tensor:
        return v * self.sd


@dataclass(frozen=True)
class RescaledPrecision(Precision):
    """Q with Q^-1 = S P^-1 S: another precision's correlations, S = diag(scale) times its widths."""

    inner: Precision
    scale: Tensor
    """``[C, 1, d]``."""

    def root(self, v: Tensor) -> Tensor:
        return self.inner.root(v * self.scale)

    def root_transposed(self, v: Tensor) -> Tensor:
        return self.scale * self.inner.root_transposed(v)


@dataclass(frozen=True)
class DensePrecision(Precision):
    """Q with Q^-1 = A A', one factor ``[C, d, d]`` for each client."""

    factor: Tensor

    def root(self, v: Tensor) -> Tensor:
        return torch.bmm(v, self.factor)

    def root_transposed(self, v: Tensor) -> Tensor:
        return torch.bmm(v, self.factor.mT)


@dataclass(frozen=True)
class BlockPrecision(Precision):
    """Blocks ``[C or 1, B or 1, q, q]``: z ``[C, K, d]`` is read as ``[C, K, B, q]``."""

    matrix: Tensor
    inverse_root: Tensor
    """L^-1: with it every operation is a batched product."""

    @classmethod
    def of(cls, matrix: Tensor) -> BlockPrecision:
        """Factorised in double precision, since Q may be ill-conditioned."""
        wide = matrix.to(torch.float64)
        identity = torch.eye(matrix.shape[-1], dtype=torch.float64, device=matrix.device)
        root, info = torch.linalg.cholesky_ex(wide)
        if bool(info.any()):
            # Of those that failed alone: nobody's draws may depend on who else is in the cohort.
            jitter = 1e-9 * wide.diagonal(dim1=-2, dim2=-1).mean(-1)
            jitter = torch.where(info != 0, jitter, torch.zeros_like(jitter))[..., None, None]
            root = torch.linalg.cholesky_ex(wide + jitter * identity)[0]
        inverse = torch.linalg.solve_triangular(root, identity.expand_as(root), upper=False)
        return cls(matrix, inverse.to(matrix.dtype))

    def root(self, v: Tensor) -> Tensor:
        return self._apply(self.inverse_root, v)

    def root_transposed(self, v: Tensor) -> Tensor:
        return self._apply(self.inverse_root.mT, v)

    def largest(self) -> Tensor:
        """The largest eigenvalue of Q, ``[C]``."""
        out: Tensor = torch.linalg.eigvalsh(self.matrix)[..., -1].amax(1)
        return out

    def covariance(self) -> Tensor:
        """Q^-1, block by block."""
        if self.inverse_root.shape[1] == 1:
            root = self.inverse_root[:, 0]
            return torch.bmm(root.mT, root).unsqueeze(1)
        return self.inverse_root.mT @ self.inverse_root

    def _apply(self, matrix: Tensor, v: Tensor) -> Tensor:
        clients, blocks, q, _ = matrix.shape
        if blocks == 1 and clients == v.shape[0] and q == v.shape[2]:
            return torch.bmm(v, matrix[:, 0].mT)
        if blocks == 1:  # one factor for all outputs: a single product per client
            return torch.bmm(v.reshape(clients, -1, q), matrix[:, 0].mT).reshape(v.shape)
        rows = v.reshape(clients, -1, blocks, q).transpose(1, 2)
        return torch.matmul(rows, matrix.mT).transpose(1, 2).reshape(v.shape)


@dataclass(frozen=True)
class Target:
    """log p(D_i | z) + log p(z | beta) for every client of a cohort; z is ``[C, K, d]``."""

    likelihood: LocalLikelihood
    prior: Prior
    beta: Tensor

    def value(self, z: Tensor) -> Tensor:
        return self.likelihood.value(z) + self.prior.log_prob(self.beta, z)

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = self.likelihood.value_and_grad(z)
        prior_value, prior_grad = self.prior.value_and_grad(self.beta, z)
        return value + prior_value, grad + prior_grad

    def grad(self, z: Tensor) -> Tensor:
        """The gradient alone: what steps between two points of a chain need."""
        return self.likelihood.grad(z) + self.prior.value_and_grad(self.beta, z)[1]

    def likelihood_grad(self, z: Tensor, grad: Tensor) -> Tensor:
        """grad_z log p(D | z) from the log-posterior's gradient at the same z."""
        return grad - self.prior.value_and_grad(self.beta, z)[1]

    @property
    def linear(self) -> bool:
        return isinstance(self.likelihood, LinearLikelihood)

    @property
    def components(self) -> list[Target]:
        """The log-posterior under each Normal that the prior is made of; none where it is not."""
        return [self] if self.prior.component is self.prior else self._components

    @cached_property
    def _components(self) -> list[Target]:
        normals = normals_of(self.prior)
        parts = [] if normals is None else normals.parts(self.beta)
        return [Target(self.likelihood, p.normal, p.beta) for p in parts]

    @property
    def closed_form(self) -> bool:
        """Normal likelihood, linear head, prior made of Normals: so is the posterior."""
        local = self.likelihood
        normal = isinstance(local, LinearLikelihood) and local.likelihood.quadratic
        return normal and self.prior.component is not None

    @property
    def conjugate(self) -> bool:
        """Normal likelihood, linear head, Normal prior: the posterior is Gaussian."""
        return self.closed_form and self.prior.component is self.prior

    def precision(self, sd: Tensor | None = None) -> Precision:
        """Q = curvature of the likelihood (a bound where there is one) + the prior's precision.

        Where the head is not linear it is the prior's precision, rescaled to widths ``[C, d]`` of z that
        were learned.
        """
        local = self.likelihood
        if isinstance(local, LinearLikelihood):
            return self.block_precision
        if sd is None:
            return self._prior_precision()
        return RescaledPrecision(self._prior_precision(), (sd / self.prior.unit(self.beta)).unsqueeze(1))

    def prior_correlation(self) -> Tensor | None:
        """``[d, d]``; None where there is none."""
        if self.prior.covariance != "full":
            return None
        covariance = torch.linalg.inv(self.prior.precision(self.beta).double())
        width = covariance.diagonal().rsqrt()
        out: Tensor = width[:, None] * covariance * width
        return out

    def _prior_precision(self) -> Precision:
        if self.prior.covariance == "full":
            return BlockPrecision.of(self.prior.precision(self.beta)[None, None])
        return DiagonalPrecision(self.prior.unit(self.beta))

    @cached_property
    def block_precision(self) -> BlockPrecision:
        """Q of a linear head; factorised once for a fixed theta."""
        local = self.likelihood
        assert isinstance(local, LinearLikelihood)
        bound = local.likelihood.bound(local.params)
        if bound is None:  # no bound anywhere (Poisson): the curvature where the posterior is
            return BlockPrecision.of(self.add_prior(local.curvature_at(self.newton_mode)))
        return BlockPrecision.of(self.add_prior(local.gram(bound).unsqueeze(1)))

    @property
    def curvature_evaluations(self) -> int:
        """What ``largest_curvature`` costs, in gradients; a Hessian product costs about as much as one."""
        return 0 if self.linear else 1 + POWER_ITERATIONS

    def largest_curvature(self, z: Tensor, iterations: int = POWER_ITERATIONS) -> Tensor:
        """L_i ``[C]``: of Q for a linear head, else by power iteration on Hessian products at z.

        The largest eigenvalue in absolute value, the worst over a client's chains, approached from below.
        """
        if isinstance(self.likelihood, LinearLikelihood):
            return self.block_precision.largest()
        # The Hessian is symmetric, so a pull-back of the gradient is a product with it.
        product = torch.func.vjp(lambda at: self.value_and_grad(at)[1], z)[1]
        # A vector without structure: (1, ..., 1) shifts all logits alike, which changes nothing.
        key = Key(0, purpose="power iteration")
        v, size = _normalised(key.normal(key.server(z.device), z.shape[-1:], z.dtype).expand(z.shape))
        for _ in range(iterations):
            v, size = _normalised(product(v)[0])
        prior = self.prior.unit(self.beta).square().reciprocal().max()
        out: Tensor = size.squeeze(-1).amax(-1).maximum(prior)
        return out

    def add_prior(self, gram: Tensor) -> Tensor:
        """Blocks ``[C, 1 or o, q, q]`` plus the prior's precision, in as few blocks as can be."""
        local = self.likelihood
        assert isinstance(local, LinearLikelihood)
        q, outputs = gram.shape[-1], local.outputs
        if self.prior.covariance == "full" and outputs > 1:
            blocks = gram.expand(-1, outputs, -1, -1)
            dense = torch.stack([torch.block_diag(*b) for b in blocks])
            return (dense + self.prior.precision(self.beta)).unsqueeze(1)
        if self.prior.covariance == "full":
            return gram + self.prior.precision(self.beta)
        diagonal = self.prior.unit(self.beta).pow(-2)
        if self.prior.covariance == "isotropic" and gram.shape[1] == 1:
            return gram + torch.diag(diagonal[:q])
        return gram + torch.diag_embed(diagonal.reshape(outputs, q))

    @cached_property
    def newton_mode(self) -> Tensor:
        return self.mode()

    def guess(self, z: Tensor, slope: Tensor) -> Guess:
        """What Q says at draws and their slopes of the log-posterior, ``[C, S, d]`` (linear heads).

        Where the likelihood is blind to a shift of all outputs alike, so is Q under an isotropic prior: the
        prior's mean would wander there otherwise.
        """
        local, factor = self.likelihood, self.block_precision
        assert isinstance(local, LinearLikelihood)
        variance = factor.inverse_root.square().sum(-2).expand(-1, self._blocks, -1).flatten(1)
        if local.likelihood.shifts and self.prior.covariance == "isotropic":
            unit = self.prior.unit(self.beta)[0].square()
            apart = slope.unflatten(-1, (local.outputs, -1))
            common = apart.mean(-2, keepdim=True)
            step = factor.solve((apart - common).flatten(-2)) + unit * common.expand_as(apart).flatten(-2)
            variance = variance + (unit - variance) / local.outputs
        else:
            step = self.posterior_mean.unsqueeze(1) - z if self.conjugate else factor.solve(slope)
        if not self.conjugate:
            # Far from the mode of a curvature without a bound a step may be of any length; where draws belong
            # it is about sqrt(d) in units of Q, and longer than this once in ten million.
            d = slope.shape[-1]
            length = (slope * step).sum(-1, keepdim=True).clamp(min=0).sqrt()
            step = step * ((math.sqrt(d) + 5) / length.clamp(min=math.sqrt(d) + 5))
        return Guess(step, variance, self.covariance() if self.prior.covariance == "full" else None)

    @property
    def _blocks(self) -> int:
        """Blocks of Q that z consists of."""
        return self.prior.dimension(self.beta) // self.block_precision.matrix.shape[-1]

    def mode(self, iterations: int = NEWTON_STEPS) -> Tensor:
        """The posterior mode ``[C, d]`` by damped Newton steps, from the prior mean (linear heads)."""
        local = self.likelihood
        assert isinstance(local, LinearLikelihood)
        clients = local.features.shape[0]
        z = self.prior.mu(self.beta).expand(clients, -1).clone()
        value, grad = self._at(z)
        for _ in range(iterations):
            factor = BlockPrecision.of(self.add_prior(local.curvature_at(z)))
            step = factor.solve(grad.unsqueeze(1)).squeeze(1)
            scale = torch.ones_like(value)
            for _ in range(HALVINGS):
                moved = z + scale.unsqueeze(1) * step
                new_value, new_grad = self._at(moved)
                worse = ~(new_value >= value - NEWTON_ROUNDING * value.abs())
                if not bool(worse.any()):
                    break
                scale = torch.where(worse, scale / 2, scale)
            better = new_value >= value
            z = torch.where(better.unsqueeze(1), moved, z)
            value = torch.where(better, new_value, value)
            grad = torch.where(better.unsqueeze(1), new_grad, grad)
            if float(step.abs().max()) < NEWTON_ROUNDING:
                break
        return z

    def _at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = self.value_and_grad(z.unsqueeze(1))
        return value.squeeze(1), grad.squeeze(1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean ``[C, d]`` and covariance ``[C, d, d]`` of a posterior in closed form."""
        local = self.likelihood
        assert isinstance(local, LinearLikelihood) and self.closed_form
        if not self.conjugate:
            log_weight, means, covs = self.mixture()
            weight = log_weight.exp()
            mean = torch.einsum("ck,ckd->cd", weight, means)
            apart = means - mean.unsqueeze(1)
            return mean, torch.einsum(
                "ck,ckij->cij", weight, covs + apart.unsqueeze(-1) * apart.unsqueeze(-2)
            )
        return self.posterior_mean, self.covariance()

    @cached_property
    def posterior_mean(self) -> Tensor:
        """The mean ``[C, d]`` of a Gaussian posterior: one Newton step from the prior's, where the prior
        itself has no slope."""
        local = self.likelihood
        assert isinstance(local, LinearLikelihood) and self.conjugate
        mu = self.prior.mu(self.beta).expand(local.features.shape[0], 1, -1)
        return (mu + self.block_precision.solve(local.grad(mu))).squeeze(1)

    def mixture(self) -> tuple[Tensor, Tensor, Tensor]:
        """The posterior as a mixture of Gaussians: log-weights ``[C, K]``, means, covariances."""
        means, covs = zip(*[part.moments() for part in self.components], strict=True)
        if self.conjugate:
            return means[0].new_zeros((len(means[0]), 1)), means[0].unsqueeze(1), covs[0].unsqueeze(1)
        return self.component_evidence().log_softmax(1), torch.stack(means, 1), torch.stack(covs, 1)

    def component_evidence(self) -> Tensor:
        """log w_k + log p(D_i | component k), ``[C, K]``."""
        normals = normals_of(self.prior)
        assert normals is not None
        pairs = zip(normals.parts(self.beta), self.components, strict=True)
        return torch.stack([p.log_weight + target.evidence() for p, target in pairs], 1)

    def evidence(self) -> Tensor:
        """log p(D_i | theta) in closed form, ``[C]``: the joint density at the posterior's mode, over
        N(0; Q^-1); or the sum of that over the prior's components."""
        if not self.conjugate:
            return self.component_evidence().logsumexp(1)
        mean, _ = self.moments()
        joint = self.value_and_grad(mean.unsqueeze(1))[0].squeeze(1)
        factor = self.block_precision
        blocks = mean.shape[-1] // factor.matrix.shape[-1]
        log_root = factor.inverse_root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_det = log_root.sum(1) * (blocks if factor.matrix.shape[1] == 1 else 1)
        return joint + 0.5 * mean.shape[-1] * math.log(2 * math.pi) + log_det

    def departure(self) -> Tensor:
        """r' V^-1 r, ``[C]``, of the residuals r = y - F mu and their covariance V, where posteriors are
        Gaussian: how far data lie from what theta expects. Half of it, less half the number of targets, is
        the score in a factor on all variances."""
        local = self.likelihood
        assert isinstance(local, LinearLikelihood)
        none = local.y.new_zeros((1, local.outputs))
        here = self.value(self.posterior_mean.unsqueeze(1)).squeeze(1)
        peak = self.prior.log_prob(self.beta, self.prior.mu(self.beta).reshape(1, 1, -1)).squeeze()
        peak = peak + local.sizes * local.likelihood.log_prob(none, none, local.params)
        return 2 * (peak - here).clamp(min=0)

    def likelihood_curvature(self) -> Tensor | None:
        """The trace of the bound on -hess log p(D_i | z), per output, ``[C, 1]``; None without a bound."""
        local = self.likelihood
        if not isinstance(local, LinearLikelihood):
            return None
        bound = local.likelihood.bound(local.params)
        return None if bound is None else bound * local.features.square().sum((1, 2)).unsqueeze(1)

    def covariance(self) -> Tensor:
        """Q^-1 as a dense ``[C, d, d]`` matrix (linear heads)."""
        local = self.likelihood
        assert isinstance(local, LinearLikelihood)
        blocks = self.block_precision.covariance()
        if blocks.shape[-1] == self.prior.dimension(self.beta):
            return blocks.squeeze(1)
        blocks = blocks.expand(-1, local.outputs, -1, -1)
        return torch.stack([torch.block_diag(*b) for b in blocks])


def _normalised(v: Tensor) -> tuple[Tensor, Tensor]:
    """v at length one along the last axis, and its length; squares neither over- nor underflow."""
    largest = v.abs().amax(-1, keepdim=True)
    unit = v / largest.clamp(min=torch.finfo(v.dtype).tiny)
    length = unit.norm(dim=-1, keepdim=True)
    return unit / length.clamp(min=1.0), largest * length


@dataclass(frozen=True)
class Hierarchy:
    """What theta = (phi, beta) is learned in: a model, a prior of z, and a hyperprior of theta."""

    model: Model
    prior: Prior
    hyperprior: Hyperprior

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """phi and beta of a theta."""
        size = self.model.phi_layout.size
        return theta[:size], theta[size:]

    @property
    def closed_form(self) -> bool:
        """Posteriors and the marginal likelihood are: a linear head, a quadratic log-likelihood, Normals."""
        return self.model.linear and self.model.likelihood.quadratic and self.prior.component is not None

    def target(
        self,
        phi: Tensor,
        beta: Tensor,
        features: Inputs,
        cohort: Cohort,
        rows: RowKeys | None = None,
        noise: float | None = None,
    ) -> Target:
        """The log-posterior of z of every unit in the cohort; with normal ``noise`` of this variance,
        whatever else is said of it."""
        return Target(self.model.at_noise(noise).bind(phi, features, cohort, rows), self.prior, beta)

    def target_at(self, phi: Tensor, beta: Tensor, cohort: Cohort, noise: float | None = None) -> Target:
        """The same in phi's type, with features computed here, without dropout, or from the rows' sufficient
        statistics."""
        model = self.model.at_noise(noise)
        if (data := Condensed.once(model, cohort)) is not None:
            return Target(data.bind(model, phi), self.prior, beta)
        if phi.dtype == torch.float64:
            cohort = cohort.wide
        return self.target(phi, beta, model.features(phi, cohort), cohort, noise=noise)
