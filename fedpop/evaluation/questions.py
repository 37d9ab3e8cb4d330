"""What may be asked of everyone once there is a theta, by name: a site makes the same question from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedpop.algorithms.base import Algorithm
from fedpop.evaluation.convergence import ToTheOptimum
from fedpop.evaluation.diagnostics import ChainsAndGradient
from fedpop.evaluation.information import Information
from fedpop.evaluation.marginal import MarginalLikelihood
from fedpop.evaluation.validation import ValidationScore
from fedpop.questions import Question


def asked_after(method: Algorithm) -> Sequence[Question[Any]]:
    """Every question that is asked between rounds, or after them, as those who answer it need it.

    >>> import torch, fedpop as fp
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> [question.name for question in asked_after(fp.FedAvg(model))]
    ['validation score']
    """
    hierarchy = method.hierarchy
    if hierarchy is None:
        return (ValidationScore(method),)
    return (
        ValidationScore(method),
        MarginalLikelihood(hierarchy),
        Information(hierarchy),
        ToTheOptimum(hierarchy, method.phi_ball),
        ChainsAndGradient(hierarchy, None, (), whole=True),
    )
