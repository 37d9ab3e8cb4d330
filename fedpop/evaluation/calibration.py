"""How good and how honest class probabilities are: accuracy, log-score, Brier score, calibration error."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpop.errors import DataError


def accuracy(probs: Tensor, labels: Tensor) -> float:
    return float((probs.argmax(-1) == labels).double().mean())


def log_score(probs: Tensor, labels: Tensor) -> float:
    """Mean of -log p(label): lower is better. Probabilities of zero count as the smallest float."""
    chosen = probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return float(-chosen.clamp(min=torch.finfo(probs.dtype).tiny).log().double().mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance to the one-hot truth: 0 is perfect, 2 is sure and wrong."""
    truth = torch.nn.functional.one_hot(labels, probs.shape[-1]).to(probs.dtype)
    return float((probs - truth).square().sum(-1).double().mean())


def calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """ECE: mean distance between confidence and accuracy over equal bins of confidence."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    if probs.shape[0] == 0:
        raise DataError("no predictions to judge the calibration of")
    return float(multiclass_calibration_error(probs, labels, probs.shape[-1], bins))


def scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """All of them at once.

    >>> import torch
    >>> scores(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 1]))["accuracy"]
    1.0
    """
    return {
        "accuracy": accuracy(probs, labels),
        "log_score": log_score(probs, labels),
        "brier": brier(probs, labels),
        "ece": calibration_error(probs, labels),
    }
