"""What a likelihood p(y | eta) of an example is, given the head's output eta, and the families.

Each one gives its log-density with its derivative in eta (the chain's inner loop needs nothing else),
a curvature for linear heads, and what a predictive distribution is made of: mean, cdf, draws.
Targets are ``[..., o]`` floats for every family (one-hot rows for classes), so that one padded block
serves them all.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import Checked, OneOf, Positive
from fedpop.errors import DataError, ModelError, SettingsError
from fedpop.settings import all_of, by_name

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
        _require_rows(torch.isfinite(y).all(dim=1), where, "y is NaN or infinite")
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


def _require_rows(good: Tensor, where: str, what: str) -> None:
    """Raise for the first row that is not good."""
    if not bool(good.all()):
        row = int((~good).nonzero()[0, 0])
        raise DataError(f"{where}, row {row}: {what}")


@dataclass(frozen=True)
class Normal(Likelihood):
    """y ~ N(eta, variance).

    Args:
        variance: Of the noise, in y's unit squared; "learned" (the default) has log(variance) in phi.

    >>> Normal(0.25).sd({}), Normal().initial_params()
    (0.5, {'log_variance': 0.0})
    """

    variance: Positive | Annotated[str, OneOf("learned")] = "learned"
    name: ClassVar[str] = "normal"
    ordered: ClassVar[bool] = True
    quadratic: ClassVar[bool] = True

    def initial_params(self) -> dict[str, float]:
        return self.params_at(1.0)

    @property
    def given_noise(self) -> float | None:
        return None if isinstance(self.variance, str) else self.variance

    def with_noise(self, variance: float) -> Likelihood:
        out = copy.copy(self)  # in every round while the noise is annealed: not checked again
        object.__setattr__(out, "variance", variance)
        return out

    def params_at(self, variance: float) -> dict[str, float]:
        return {} if self.given_noise else {"log_variance": math.log(variance)}

    def _precision(self, params: Params) -> Tensor | float:
        if self.variance == "learned":
            return torch.exp(-params["log_variance"])
        return 1.0 / float(self.variance)

    def _log_precision(self, params: Params) -> Tensor | float:
        return -params["log_variance"] if self.variance == "learned" else -math.log(float(self.variance))

    def sd(self, params: Params) -> Tensor | float:
        """The noise's standard deviation."""
        return self._precision(params) ** -0.5

    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        quadratic = self._precision(params) * (y - eta) ** 2
        return -0.5 * (quadratic - self._log_precision(params) + math.log(2 * math.pi)).sum(-1)

    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        residual = y - eta
        grad = self._precision(params) * residual
        constant = math.log(2 * math.pi) - self._log_precision(params)
        return -0.5 * (grad * residual + constant).sum(-1), grad

    def bound(self, params: Params) -> Tensor | float:
        return self._precision(params)

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        return torch.ones_like(eta) * self._precision(params)

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return eta

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        return eta + normal * self.sd(params)

    def working_response(self, y: Tensor) -> Tensor:
        return y

    def variance_at(self, eta: Tensor, params: Params) -> Tensor:
        return torch.as_tensor(self.sd(params) ** 2, dtype=eta.dtype, device=eta.device).expand_as(eta)

    def bracket(self, eta: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        reach = 9 * float(torch.as_tensor(self.sd(params), device=eta.device).max())
        return eta.amin(0) - reach, eta.amax(0) + reach

    def cdf(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        out: Tensor = torch.special.ndtr((y - eta) / self.sd(params))
        return out


@dataclass(frozen=True)
class Categorical(Likelihood):
    """y in {0, ..., K-1} with logits eta.

    >>> Categorical().mean(torch.tensor([[0.0, 0.0]]), {})
    tensor([[0.5000, 0.5000]])
    """

    name: ClassVar[str] = "categorical"
    discrete: ClassVar[bool] = True
    shifts: ClassVar[bool] = True

    def classes(self, outputs: int) -> bool:
        return True

    def probabilities(self, mean: Tensor) -> Tensor:
        return mean

    def check_head(self, outputs: int) -> None:
        if outputs < 2:
            raise ModelError(
                f"a categorical likelihood needs a head with one output per class, at least 2; this "
                f"head has {outputs} (for yes/no targets with one output use 'bernoulli')"
            )

    def check_targets(self, y: Tensor, outputs: int, where: str) -> Tensor:
        if y.dim() == 2 and y.shape[1] == 1:
            y = y.squeeze(1)
        if y.dim() != 1:
            raise DataError(f"{where}: class labels must be [n] integers, not {tuple(y.shape)}")
        if torch.is_floating_point(y):
            _require_rows(torch.isfinite(y), where, "the label is NaN or infinite")
            _require_rows(y == y.round(), where, "the label is not a whole number")
        labels = y.to(torch.int64)
        inside = (labels >= 0) & (labels < outputs)
        if not bool(inside.all()):
            row = int((~inside).nonzero()[0, 0])
            raise DataError(
                f"{where}, row {row}: label {int(labels[row])} is out of range; the head has "
                f"{outputs} outputs, so labels run from 0 to {outputs - 1}"
            )
        return labels

    def encode(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        # By comparison: one_hot reads its values, which vmap does not allow.
        return (y.unsqueeze(-1) == torch.arange(outputs, device=y.device)).to(dtype)

    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        return (y * torch.log_softmax(eta, -1)).sum(-1)

    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        # What log_softmax does, which is four times slower on a CPU for rows as short as these.
        shifted = eta - eta.amax(-1, keepdim=True)
        weight = shifted.exp()
        total = weight.sum(-1, keepdim=True)
        return (y * (shifted - total.log())).sum(-1), y - weight / total

    def slope_across(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        return y - torch.softmax(eta, -2)

    def bound(self, params: Params) -> float:
        return 0.5  # Boehning (1992): the Hessian is below (I - 11'/K) / 2

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        p = torch.softmax(eta, -1)
        return p * (1 - p)

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return torch.softmax(eta, -1)

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        cumulative = torch.softmax(eta, -1).cumsum(-1)
        below = (cumulative < uniform[..., :1]).sum(-1)
        return below.clamp(max=eta.shape[-1] - 1)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """y in {0, 1} with logit eta.

    >>> Bernoulli().mean(torch.zeros(1, 1), {})
    tensor([[0.5000]])
    """

    name: ClassVar[str] = "bernoulli"
    discrete: ClassVar[bool] = True

    def classes(self, outputs: int) -> bool:
        if outputs > 1:
            raise SettingsError("several yes/no targets per example cannot be compared; use one output")
        return True

    def probabilities(self, mean: Tensor) -> Tensor:
        return torch.cat((1 - mean, mean), dim=-1)

    def check_targets(self, y: Tensor, outputs: int, where: str) -> Tensor:
        y = super().check_targets(y, outputs, where)
        _require_rows(((y == 0) | (y == 1)).all(dim=1), where, "a bernoulli target is 0 or 1")
        return y

    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        return (y * eta - torch.nn.functional.softplus(eta)).sum(-1)

    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        return self.log_prob(eta, y, params), y - torch.sigmoid(eta)

    def bound(self, params: Params) -> float:
        return 0.25

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        p = torch.sigmoid(eta)
        return p * (1 - p)

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return torch.sigmoid(eta)

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        return (uniform <= torch.sigmoid(eta)).to(eta.dtype)


@dataclass(frozen=True)
class Poisson(Likelihood):
    """y in {0, 1, 2, ...} with log-rate eta.

    >>> Poisson().mean(torch.zeros(1, 1), {})
    tensor([[1.]])
    """

    name: ClassVar[str] = "poisson"
    discrete: ClassVar[bool] = True
    ordered: ClassVar[bool] = True

    def check_targets(self, y: Tensor, outputs: int, where: str) -> Tensor:
        y = super().check_targets(y, outputs, where)
        whole = ((y >= 0) & (y == y.round())).all(dim=1)
        _require_rows(whole, where, "a poisson target is a whole number, 0 or more")
        return y

    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        return (y * eta - torch.exp(eta) - torch.lgamma(y + 1)).sum(-1)

    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        rate = torch.exp(eta)
        return (y * eta - rate - torch.lgamma(y + 1)).sum(-1), y - rate

    def bound(self, params: Params) -> None:
        return None

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(eta)

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return torch.exp(eta)

    def cdf(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        counts = torch.floor(y)
        inside = torch.special.gammaincc(counts.clamp(min=0) + 1, torch.exp(eta))
        return torch.where(counts < 0, torch.zeros_like(inside), inside)

    def bracket(self, eta: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        rate = torch.exp(eta.amax(0))
        return torch.full_like(rate, -1.0), torch.ceil(rate + 12 * rate.sqrt() + 30)

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        # Inversion by bisection on the cdf, so that one uniform gives one count.
        low, high = self.bracket(eta.unsqueeze(0), params)
        while bool((high - low > 1).any()):
            middle = torch.floor((low + high) / 2)
            below = self.cdf(eta, middle, params) < uniform
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high


def families() -> dict[str, type[Likelihood]]:
    """Every family by its name, those of users' own among them, where the name is not one of fedpop's.

    >>> {"bernoulli", "poisson"} <= set(families())
    True
    """
    return by_name(all_of(Likelihood), lambda cls: cls.name)


def resolve(likelihood: Likelihood | str) -> Likelihood:
    """A likelihood from itself or from its name.

    Args:
        likelihood: A likelihood, or "normal", "categorical", "bernoulli" or "poisson", or the name of a
            user-defined one.

    >>> resolve("poisson")
    Poisson()
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    usual = {name: cls for name, cls in families().items() if cls.by_name}
    if likelihood not in usual:
        raise SettingsError(f"unknown likelihood {likelihood!r}; known are {', '.join(map(repr, usual))}")
    return usual[likelihood]()
