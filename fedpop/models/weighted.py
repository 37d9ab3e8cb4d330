"""Rows that count more or less than once: so many of so many trials, and weights of any other kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import DataError
from fedpop.models.likelihoods import Likelihood, Params


@dataclass(frozen=True)
class Weighted(Likelihood):
    """A likelihood of one output whose rows have weights: y is ``[n, 2]``, the target and its weight.

    (Where a cohort's block has the weights beside it, y is its first column alone.) A binomial count is
    a Bernoulli share with the trials as its weight, up to the ways to choose.

    >>> from fedpop.models.likelihoods import Bernoulli
    >>> share = torch.tensor([[0.25, 8.0]])
    >>> round(float(Weighted(Bernoulli()).log_prob(torch.zeros(1, 1), share, {})), 4)
    -5.5452
    """

    inner: Likelihood
    name: ClassVar[str] = "weighted"
    by_name: ClassVar[bool] = False

    @property
    def discrete(self) -> bool:  # type: ignore[override]
        return self.inner.discrete

    def check_targets(self, y: Tensor, outputs: int, where: str) -> Tensor:
        if y.dim() != 2 or y.shape[1] != 2 or outputs != 1:
            raise DataError(f"{where}: y must be [n, 2], targets and weights, not {tuple(y.shape)}")
        if not bool(torch.isfinite(y).all()) or bool((y[:, 1] < 0).any()):
            raise DataError(f"{where}: a target or a weight is not finite, or a weight is negative")
        return y

    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        return self.inner.log_prob(eta, y[..., :1], params) * _weight(y)

    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        value, grad = self.inner.value_and_grad(eta, y[..., :1], params)
        return value * _weight(y), grad * y[..., 1:] if y.shape[-1] == 2 else grad

    def bound(self, params: Params) -> None:
        return None  # it depends on the weights

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        return self.inner.curvature(eta, params)

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return self.inner.mean(eta, params)

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        return self.inner.draw(eta, params, uniform, normal)


def _weight(y: Tensor) -> Tensor | float:
    return y[..., 1] if y.shape[-1] == 2 else 1.0
