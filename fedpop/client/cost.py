"""What a cohort's work cost, in numbers that add up, and who of it is fit to be heard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedpop.federation.cohort import Cohort
from fedpop.kernels import Pass

WORK = ("backbone_passes", "head_steps", "gradient_evaluations")
"""What a run counts of clients' work over its rounds."""


def finite(*tensors: Tensor) -> Tensor:
    """Which units have nothing but finite numbers in all of these ``[C, ...]``."""
    good = torch.ones(tensors[0].shape[0], dtype=torch.bool, device=tensors[0].device)
    for t in tensors:
        good = good & torch.isfinite(t).flatten(1).all(1)
    return good


def training_cost(
    cohort: Cohort, loss: Tensor, good: Tensor, backbone: float, head: float
) -> dict[str, float]:
    """Mean training losses ``[C]``, and example-passes through backbone and head; none through a backbone
    that stands still, whose features were computed once. A forward and backward of one example is one pass.
    """
    n = cohort.sizes.to(loss.dtype)
    return {
        "log_likelihood": -float((loss * n)[good].sum()),
        "examples": float(n[good].sum()),
        "backbone_passes": 0.0 if cohort.embedded else float(backbone),
        "head_steps": float(head),
    }


def chain_cost(
    cohort: Cohort, done: Pass, chains: int, batch: int | None, passes: float
) -> Callable[[Tensor, Tensor, Tensor | None], dict[str, float]]:
    """The cost of a cohort's chains as a function of log-likelihoods ``[R]`` and who is fit to be heard, for
    the units at ``rows`` (None: all of them); what was spent together is told with the first of them."""
    examples = cohort.examples
    looked_at = examples if batch is None else int(cohort.sizes.clamp(max=batch).sum())
    steps = examples * (done.gradient_evaluations - done.batched) + looked_at * done.batched
    counted = False

    def cost(value: Tensor, good: Tensor, rows: Tensor | None) -> dict[str, float]:
        nonlocal counted
        sizes, acceptance, diverged = cohort.sizes, done.acceptance, done.diverged
        if rows is not None:
            sizes, acceptance, diverged = sizes[rows], acceptance[rows], diverged[rows]
        told, clients = torch.stack((value, acceptance, diverged)), len(value)
        if not bool(good.all()):
            told[:2] = torch.where(good, told[:2], 0.0)
            sizes, clients = sizes[good], int(good.sum())
        likelihood, accepted, divergences = told.sum(1, dtype=torch.float64).tolist()
        out = {
            "log_likelihood": likelihood,
            "examples": float(examples if len(sizes) == len(cohort) else sizes.sum()),
            "acceptance": accepted,
            "clients": float(clients),
            "divergences": divergences,
        }
        if not counted:  # with the first block
            counted = True
            out |= {
                "gradient_evaluations": float(len(cohort) * chains * done.gradient_evaluations),
                "head_steps": float(chains * steps),
                "backbone_passes": float(passes),
            }
        return out

    return cost
