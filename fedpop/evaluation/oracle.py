"""The exact, non-federated optimum of a conjugate model: what a federated run must reach.

With a normal likelihood, a linear head and a Normal prior the marginal likelihood is closed-form; L-BFGS in
double precision on all data at once maximises it, from several starts since it has local optima.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpop.evaluation.marginal import closed_form
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import map_inputs
from fedpop.methods.hierarchical import Hierarchical


@dataclass(frozen=True)
class Optimum:
    """theta* and its log-likelihood, in double precision."""

    phi: Tensor
    beta: Tensor
    log_likelihood: float


def everyone(method: Hierarchical, federation: Federation) -> Cohort:
    """All clients as one cohort, in double precision."""
    device = method.model.initial_phi().device
    ids = torch.arange(len(federation))
    cohort = federation.cohort(ids, device)
    wide = map_inputs(lambda v: v.double() if v.is_floating_point() else v, cohort.x)
    return replace(cohort, x=wide, y=cohort.y.double())


def log_likelihood(method: Hierarchical, cohort: Cohort, phi: Tensor, beta: Tensor) -> Tensor:
    """The exact marginal log-likelihood of a cohort."""
    return closed_form(method.hierarchy.target_at(phi, beta, cohort)).sum()


def exact_optimum(
    method: Hierarchical,
    federation: Federation,
    starts: Sequence[tuple[Tensor, Tensor]],
    iterations: int = 300,
) -> Optimum:
    """The best of the local optima reached from these (phi, beta)."""
    cohort = everyone(method, federation)
    best: Optimum | None = None
    size = method.model.phi_layout.size
    for phi, beta in starts:
        theta = torch.cat((phi, beta)).double().clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [theta],
            max_iter=iterations,
            tolerance_grad=1e-8,
            tolerance_change=1e-12,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def closure(theta: Tensor = theta, optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
            optimiser.zero_grad()
            loss = -log_likelihood(method, cohort, theta[:size], theta[size:])
            loss.backward()
            assert theta.grad is not None
            theta.grad[size:] = method.hierarchy.prior.mask(theta.grad[size:])  # what is fixed stays
            return loss

        optimiser.step(closure)
        with torch.no_grad():
            value = float(log_likelihood(method, cohort, theta[:size], theta[size:]))
            end = theta.detach()
        if best is None or value > best.log_likelihood:
            best = Optimum(end[:size], end[size:], value)
    assert best is not None
    return best
