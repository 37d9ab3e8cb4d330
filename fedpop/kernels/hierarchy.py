"""p(D_i | phi, z_i) p(z_i | beta): the model and the population prior together, as chains and questions see
them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.kernels.target import Target
from fedpop.models.base import Model
from fedpop.models.modules import RowKeys
from fedpop.priors import Hyperprior, Prior


@dataclass(frozen=True)
class Hierarchy:
    """What theta = (phi, beta) is learned in: a model, a prior of z, and a hyperprior of theta."""

    model: Model
    prior: Prior
    hyperprior: Hyperprior

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
        """The same with features computed here, without dropout."""
        return self.target(phi, beta, self.model.features(phi, cohort), cohort, noise=noise)
