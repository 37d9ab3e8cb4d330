"""The marginal likelihood sum_i log INT p(D_i | phi, z) p(z | beta) dz.

Closed form where the posterior is Gaussian, or a mixture of Gaussians. Elsewhere importance sampling, with
a multivariate t fitted to each client's posterior draws as proposal, judged by the Pareto shape of its
weights (PSIS): where that fails the estimate is refused, not reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.checked import Few
from fedpop.errors import EstimateError
from fedpop.evaluation import quadrature
from fedpop.kernels import Hierarchy, Target
from fedpop.kernels.evidence import runs_in_double
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.questions import Question, Units

PROPOSAL_DEGREES = 5.0
"""Of freedom, of the proposal's t law: its tails must not be thinner than a posterior's, or weights have no
variance."""
PROPOSAL_WIDTH = 1.1
"""Of the proposal's covariance, in units of that of the draws: too narrow costs more than too wide."""
WORST_PARETO_SHAPE = 0.7
"""Of a client's weights, above which their mean does not settle with more draws (Vehtari et al., PSIS)."""
WORST_STANDARD_ERROR = 0.5
"""A client's standard error, in nats, above which a handful of its draws have all the weight."""


@dataclass(frozen=True)
class LogLikelihood:
    """An estimate with its Monte-Carlo standard error (0 in closed form)."""

    value: float
    error: float
    method: str

    def __str__(self) -> str:
        if self.error == 0:
            return f"{self.value:.2f} ({self.method})"
        return f"{self.value:.2f} +- {self.error:.2f} ({self.method})"


@dataclass(frozen=True)
class MarginalLikelihood(Question[LogLikelihood]):
    """log p(D | theta), summed over everyone; those hard to estimate are counted, not named."""

    hierarchy: Hierarchy
    proposals: Few = 1000
    """Importance draws for each client, where nothing is closed-form."""
    name: ClassVar[str] = "marginal likelihood"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("phi", "beta")}

    @property
    def method(self) -> str:
        if self.hierarchy.closed_form:
            return "closed form"
        return "importance sampling" if self.hierarchy.prior.normalised else "quadrature"

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        """Value, squared error, and whether the estimate fails, with its Pareto shape."""
        cohort = units.cohort
        with torch.no_grad():
            phi, beta = asked["phi"], asked["beta"]
            if self.hierarchy.closed_form and runs_in_double(self.hierarchy):
                # Sums of squares of a few hundred lose a thousandth of a nat in single precision.
                phi, beta = phi.double(), beta.double()
            target = self.hierarchy.target_at(phi, beta, cohort)
            if target.closed_form:
                value = closed_form(target).double()
            elif not self.hierarchy.prior.normalised:
                value = quadrature.evidence(target, len(cohort))
            else:
                draws = units.personal()["draws"].flatten(1, 2)
                value, error, shape = importance(target, draws, key, cohort.units, self.proposals)
                filled = (cohort.sizes > 0).double()
                failed = (~(shape <= WORST_PARETO_SHAPE)).double().to(value.device) * filled
                return _summed(value * filled, error.square() * filled, failed)
        none = torch.zeros_like(value)
        return _summed(value, none, none)

    def finish(self, known: Tensors, total: Total) -> LogLikelihood:
        value, variance, failed = total.weighted["evidence"].tolist()
        if failed:
            raise EstimateError(
                f"importance sampling fails for {failed:.0f} client(s), with a Pareto shape above "
                f"{WORST_PARETO_SHAPE}: z has {self.hierarchy.model.z_layout.size} dimensions, and no simple "
                "proposal covers its posterior"
            )
        return LogLikelihood(value, variance**0.5, self.method)


def _summed(*parts: Tensor) -> Answer:
    everyone = torch.ones(len(parts[0]), dtype=torch.bool, device=parts[0].device)
    return Answer(everyone, sums={"evidence": torch.stack([p.sum() for p in parts])})


def closed_form(target: Target) -> Tensor:
    """log p(D_i | theta), ``[C]``, where the posterior is Gaussian or a mixture of Gaussians."""
    return target.evidence()


def importance(
    target: Target, draws: Tensor, key: Key, units: Tensor, proposals: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate, standard error and Pareto shape per client from posterior draws ``[C, S, d]``."""
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    d = draws.shape[-1]
    wide = draws.double()
    location = wide.mean(1, keepdim=True)
    centred = wide - location
    cov = centred.mT @ centred / (draws.shape[1] - 1)
    # In units of each coordinate: an intercept's variance may be a million times that of a slope.
    root = torch.linalg.cholesky(PROPOSAL_WIDTH * cov + 1e-8 * cov.diagonal(dim1=-2, dim2=-1).diag_embed())
    normal = key.at(purpose="proposal").normal(units, (proposals, d), torch.float64)
    # chi-square with 5 degrees from five squared normals, so that the proposal has heavy tails
    spread = key.at(purpose="spread").normal(units, (proposals, int(PROPOSAL_DEGREES)), torch.float64)
    chi = spread.square().sum(-1, keepdim=True) / PROPOSAL_DEGREES
    z = location + (normal @ root.mT) / chi.sqrt()
    quadratic = (normal / chi.sqrt()).square().sum(-1)
    log_q = (
        math.lgamma((PROPOSAL_DEGREES + d) / 2)
        - math.lgamma(PROPOSAL_DEGREES / 2)
        - 0.5 * d * math.log(PROPOSAL_DEGREES * math.pi)
        - root.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        - 0.5 * (PROPOSAL_DEGREES + d) * torch.log1p(quadratic / PROPOSAL_DEGREES)
    )
    joint = target.value(z.to(draws.dtype)).double()
    log_w = joint - log_q
    top = log_w.amax(1, keepdim=True)
    w = (log_w - top).exp()
    mean = w.mean(1)
    error = w.std(1) / mean / math.sqrt(proposals)
    # arviz takes log-likelihoods, whose negatives are the log-weights of leave-one-out.
    shapes = [float(array_stats.psislw(row)[1]) for row in (-log_w).cpu().numpy().astype(np.float64)]
    # An estimate that rests on a few of the draws tells neither its error nor the shape of its tail.
    found = torch.tensor(shapes, dtype=error.dtype)
    shape = torch.where(error.cpu() > WORST_STANDARD_ERROR, torch.inf, found)
    return top.squeeze(1) + mean.log(), error, shape
