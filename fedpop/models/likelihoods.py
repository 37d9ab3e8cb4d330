"""The families: Normal, Categorical, Bernoulli, Poisson, and how one is found by its name."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import OneOf, Positive
from fedpop.errors import DataError, ModelError, SettingsError
from fedpop.models.likelihood import Likelihood as Likelihood  # a user-defined family derives from it
from fedpop.models.likelihood import Params, require_rows
from fedpop.settings import all_of, by_name


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
            require_rows(torch.isfinite(y), where, "the label is NaN or infinite")
            require_rows(y == y.round(), where, "the label is not a whole number")
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
        require_rows(((y == 0) | (y == 1)).all(dim=1), where, "a bernoulli target is 0 or 1")
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
        require_rows(whole, where, "a poisson target is a whole number, 0 or more")
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

    >>> sorted(families())[:2]
    ['bernoulli', 'categorical']
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
