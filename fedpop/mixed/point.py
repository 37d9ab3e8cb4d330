"""A value of all parameters of a mixed model, in internal coordinates, and what an engine can say about
it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.mixed.factor import Factor
from fedpop.mixed.groups import Coordinates, Groups
from fedpop.mixed.search import SearchResult


@dataclass(frozen=True)
class ThetaPoint:
    """Fixed effects ``[p]``, the factor of the random effects' covariance in units of sigma ``[q, q]``,
    and sigma (1 where a family has none)."""

    b: Tensor
    factor: Tensor
    sigma: float = 1.0

    def sigma_matrix(self, units: Coordinates) -> Tensor:
        """The random effects' covariance on the user's scale."""
        root = units.random_map @ self.factor * self.sigma
        return root @ root.mT


class Engine(ABC):
    """What is asked of everyone about points: searches, likelihoods, posteriors."""

    groups: Groups
    units: Coordinates
    method: ClassVar[str]

    @property
    @abstractmethod
    def factor(self) -> Factor: ...

    @abstractmethod
    def search(self) -> tuple[SearchResult, ThetaPoint]:
        """The maximum."""

    @abstractmethod
    def log_likelihood(self, point: ThetaPoint) -> float:
        """At any point."""

    @abstractmethod
    def covariance(self, point: ThetaPoint) -> Tensor:
        """Of fixed effects, ``[p, p]``."""

    @abstractmethod
    def vector(self, point: ThetaPoint) -> Tensor:
        """All parameters in one vector: b, the factor's entries and, where there is one, log sigma."""

    @abstractmethod
    def point(self, x: Tensor) -> ThetaPoint:
        """The way back."""

    @abstractmethod
    def score(self, x: Tensor, among: Tensor) -> Tensor:
        """The log-likelihood's gradient in that vector, of the groups at these positions."""

    @abstractmethod
    def score_and_information(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Everyone's gradient, and minus its Hessian."""

    @abstractmethod
    def spread(self, point: ThetaPoint) -> Tensor:
        """The covariance of the estimates of the factor's entries and, where there is one, of log sigma."""

    @abstractmethod
    def effects(self, point: ThetaPoint) -> None:
        """Sites find and keep ``mean`` and ``cov`` of their groups' effects."""

    @abstractmethod
    def theta_draws(self, point: ThetaPoint, noise: Tensor, wide: Tensor, count: int) -> list[ThetaPoint]:
        """So many points of the law of theta given the data, whose estimate is ``point``, from standard
        normal numbers ``[K, k + p]`` and ``[K]``."""

    @property
    def level(self) -> float:
        """The linear predictor of the mean response, where estimates are counted from it; else 0."""
        return 0.0

    @property
    def words(self) -> str:
        """How the log-likelihood is computed."""
        return self.method


def kept(groups: Groups, name: str) -> Tensor:
    """What every group keeps under a name, on this machine; in the order of the groups' names."""
    ids = torch.arange(len(groups.federation))
    return groups.sites.store.get(ids, torch.device("cpu"))[name]
