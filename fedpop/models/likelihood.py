"""What a likelihood p(y | eta) of an example is, given the head's output eta.

Each one gives its log-density with its derivative in eta (the chain's inner loop needs nothing else),
a curvature for linear heads, and what a predictive distribution is made of: mean, cdf, draws.
Targets are ``[..., o]`` floats for every family (one-hot rows for classes), so that one padded block
serves them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Checked
from fedpop.errors import DataError, SettingsError

Params = dict[str, Tensor]


class Likelihood(Checked, ABC):
    """One family of observation models; ``params`` are the parts of phi that belong to it.

    >>> import torch
    >>> from fedpop.models.likelihoods import Normal
    >>> Normal(1.0).log_prob(eta=torch.zeros(2, 1), y=torch.tensor([[0.0], [1.0]]), params={})
    tensor([-0.9189, -1.4189])
    """

    name: ClassVar[str]
    by_name: ClassVar[bool] = True
    """Its name alone is enough to ask for it."""
    discrete: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    """Targets are numbers with a distribution function, so that there are intervals of y."""
    quadratic: ClassVar[bool] = False
    """log p is quadratic in eta: with a linear head and Normal priors everything is closed-form."""
    shifts: ClassVar[bool] = False
    """All outputs may shift together without changing p (the logits of classes)."""

    @property
    def given_noise(self) -> float | None:
        """The noise variance, where there is one and it is given."""
        return None

    def with_noise(self, variance: float) -> Likelihood:
        """The same family with this noise variance given."""
        raise SettingsError(f"a {self.name} likelihood has no noise whose variance could be given")

    def params_at(self, variance: float) -> dict[str, float]:
        """The scalars of a learned noise variance, at this one."""
        return {}

    def classes(self, outputs: int) -> bool:
        """Whether targets are judged as classes, or as numbers."""
        return False

    def probabilities(self, mean: Tensor) -> Tensor:
        """Class probabilities ``[..., K]`` from E[y | eta]."""
        raise SettingsError(f"a {self.name} likelihood has no class probabilities")

    def working_response(self, y: Tensor) -> Tensor:
        """y linearised at eta = 0: 4 (y - 1/2) for a yes/no target, say."""
        zero = torch.zeros_like(y)
        return (y - self.mean(zero, {})) / self.curvature(zero, {})

    def variance_at(self, eta: Tensor, params: Params) -> Tensor:
        """Var[y | eta]; the curvature, for families in their canonical form."""
        return self.curvature(eta, params)

    def cdf(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        """P(Y <= y | eta), for ordered targets."""
        raise SettingsError(f"a {self.name} target has no cdf; use probs")

    def bracket(self, eta: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Where all quantiles of a mixture over ``[L, ...]`` lie, for ordered targets."""
        raise SettingsError(f"a {self.name} target has no quantiles; use probs")

    def initial_params(self) -> dict[str, float]:
        """Scalars that are learned as part of phi."""
        return {}

    def check_head(self, outputs: int) -> None:
        """Raise unless a head with so many outputs fits."""

    def check_targets(self, y: Tensor, outputs: int, where: str) -> Tensor:
        """Checked targets in storage form (``[n, o]`` floats, or ``[n]`` class indices)."""
        if y.dim() == 1:
            y = y.unsqueeze(1)
        if y.dim() != 2 or y.shape[1] != outputs:
            raise DataError(
                f"{where}: y has shape {tuple(y.shape)}, but the head gives {outputs} output(s) per "
                f"example; y must be [n] or [n, {outputs}]"
            )
        if not torch.is_floating_point(y):
            y = y.to(torch.get_default_dtype())
        require_rows(torch.isfinite(y).all(dim=1), where, "y is NaN or infinite")
        return y

    def encode(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Storage form to ``[..., o]`` floats."""
        return y.to(dtype)

    @abstractmethod
    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        """log p(y | eta), summed over the last axis."""

    @abstractmethod
    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """The log-density and its derivative in eta."""

    def slope_across(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        """The derivative alone, with outputs on the last axis but one: ``[..., o, N]``. Rows as long as the
        examples are many are quicker than rows of a few outputs, where a family has a way of its own."""
        return self.value_and_grad(eta.mT, y.mT, params)[1].mT

    @abstractmethod
    def bound(self, params: Params) -> Tensor | float | None:
        """c with -d2 log p / d eta2 <= c I everywhere; ``None`` where there is no such bound."""

    @abstractmethod
    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        """Diagonal of -d2 log p / d eta2 at eta."""

    @abstractmethod
    def mean(self, eta: Tensor, params: Params) -> Tensor:
        """E[y | eta] (class probabilities for classes)."""

    @abstractmethod
    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        """One y per row of eta from given noise of the same shape."""


def require_rows(good: Tensor, where: str, what: str) -> None:
    """Raise for the first row that is not good."""
    if not bool(good.all()):
        row = int((~good).nonzero()[0, 0])
        raise DataError(f"{where}, row {row}: {what}")
