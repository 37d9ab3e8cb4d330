"""Which models of its units a site answers a question from, and how they are made there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm, PopulationPrior, role_of
from fedpop.settings import Setting
from fedpop.site.plan import Plan, final_plan
from fedpop.site.sites import Sites


class PersonalModels(Setting, ABC):
    """How the models that a question is answered from are made; across machines it is sent by its name."""

    as_in_rounds: ClassVar[bool] = False
    """They are made of a round's broadcast."""

    def plan(self, method: Algorithm, plan: Plan) -> Plan:
        """How many units fit together for it."""
        return plan

    @abstractmethod
    def made(
        self, method: Algorithm, sites: Sites, ids: Tensor, known: Tensors, broadcast: Tensors, key: Key
    ) -> Tensors:
        """Those of the units at these positions."""


@dataclass(frozen=True)
class AsTheyStand(PersonalModels):
    """Where units' chains stand, as they would enter a round."""

    as_in_rounds: ClassVar[bool] = True

    def made(
        self, method: Algorithm, sites: Sites, ids: Tensor, known: Tensors, broadcast: Tensors, key: Key
    ) -> Tensors:
        return sites.states(method, ids, broadcast, key)


@dataclass(frozen=True)
class FinalPass(PersonalModels):
    """A pass with theta fixed: that of the method, or a ``brief`` one; from where units' chains stand, or
    ``afresh``, which forgets that.

    >>> FinalPass(brief=True)
    FinalPass(brief=True, afresh=False)
    """

    brief: bool = False
    afresh: bool = False

    def _by(self, method: Algorithm) -> Algorithm:
        prior = role_of(method, PopulationPrior) if self.brief else None
        return method if prior is None else prior.for_verdict()

    def plan(self, method: Algorithm, plan: Plan) -> Plan:
        return final_plan(plan, method.model, self._by(method).footprint.final_draws)

    def made(
        self, method: Algorithm, sites: Sites, ids: Tensor, known: Tensors, broadcast: Tensors, key: Key
    ) -> Tensors:
        seen = not self.afresh and bool(sites.store.seen(ids).all())
        local = sites.store.get(ids, sites.device) if seen else None
        return self._by(method).personalise(known, sites.federation.cohort(ids, sites.device), local, key)
