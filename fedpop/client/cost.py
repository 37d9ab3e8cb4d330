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
        parts = [value, cohort.sizes, done.acceptance, done.diverged]
        if rows is not None:
            parts[1:] = [part[rows] for part in parts[1:]]
        *told, diverged = (part.double() for part in parts)
        sums = torch.where(good, torch.stack((*told, torch.ones_like(diverged))), 0.0).sum(1).tolist()
        names = ("log_likelihood", "examples", "acceptance", "clients")
        out = dict(zip(names, sums, strict=True)) | {"divergences": float(diverged.sum())}
        if not counted:  # with the first block
            counted = True
            out |= {
                "gradient_evaluations": float(len(cohort) * chains * done.gradient_evaluations),
                "head_steps": float(chains * steps),
                "backbone_passes": float(passes),
            }
        return out

    return cost
