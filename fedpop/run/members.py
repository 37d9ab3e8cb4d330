"""Those whom a run works with, wherever they are: who asks whom is all that differs between one machine and
many.

A run, or whoever else asks, sends members a broadcast or a question and gets back what the server would see:
a total. ``LocalMembers`` has all units on this machine; ``fedpop.flower.remote`` has members at other sites.
What all of it is about is a ``Study``, which members receive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedpop.federation.clients import Federation
from fedpop.federation.participation import Active, Participation, Roster
from fedpop.files import digest_of_bytes, parse_bytes
from fedpop.keys import Key
from fedpop.message import Tensors, Total
from fedpop.message.fixed_point import FixedPoint
from fedpop.methods.base import Algorithm, Round
from fedpop.questions import Question
from fedpop.run.personal_models import PersonalModels
from fedpop.site.plan import Plan
from fedpop.site.sites import Sites, site_of_each
from fedpop.site.store import LocalStore
from fedpop.site.study import Study

R = TypeVar("R")


@dataclass(frozen=True)
class Asking(Generic[R]):
    """A question, with all that those who are asked need to know beside it."""

    question: Question[R]
    known: Tensors
    key: Key
    """Of the sites: elsewhere each one has a secret in the place of its seed."""
    method: Algorithm | None = None
    models: PersonalModels | None = None
    """Which models of its units a site answers from, made by this method; None: from none."""
    broadcast: Tensors = field(default_factory=dict)
    """A round's broadcast, where models are made of it."""
    split: str | None = None
    """Only units that have examples in it are asked."""
    late: tuple[str, ...] = ()
    """Only these members are asked, who came when the others had been; what is made of it is everyone's."""
    among: Tensor | None = None
    """Only units at these positions of the roster are asked; None: all."""

    def models_at(self, sites: Sites, plan: Plan) -> tuple[Plan, Callable[[Tensor], Tensors] | None]:
        """How many units fit together for it, and how their models are made."""
        models, method = self.models, self.method
        if models is None or method is None:
            return plan, None
        made = models.made
        return models.plan(method, plan), lambda ids: made(
            method, sites, ids, self.known, self.broadcast, self.key
        )


def active_units(rule: Participation, among: Federation | LocalMembers, key: Key, round: int) -> Active:
    """Who takes part in a round: it depends on the rule, the seed and the round, never on the method."""
    return rule.draw(among.roster, key.at(round=round, purpose="participation"))


def roster_of(federation: Federation, sites: Mapping[str, Sequence[str]] | None) -> Roster:
    """Who may take part, and at which site each one is."""
    at = None if sites is None else site_of_each(sites, federation)
    return replace(federation.roster, sites=at)


class Members(ABC):
    """The other side of a run."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """What they compute on."""

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """Of the members: units that are sites by themselves, or sites."""

    @property
    def waits(self) -> bool:
        """A round waits for everyone who was asked; else it closes on a quorum."""
        return True

    @property
    def quorum(self) -> float:
        """The share of the members that closes a round."""
        return 1.0

    @property
    @abstractmethod
    def units(self) -> int:
        """How many units there are at present: the paper's b."""

    @property
    @abstractmethod
    def roster(self) -> Roster:
        """All units, among whom a rule draws."""

    def messages(self, ids: Tensor) -> int:
        """How many messages are added up where the units at these positions take part."""
        return len(self.names_of(ids.tolist()))

    def names_of(self, ids: Iterable[int]) -> list[str]:
        """Names of the members at which the units at these positions are, each once."""
        return [self.names[i] for i in ids]

    @property
    @abstractmethod
    def examples(self) -> int:
        """How many training examples they have together."""

    @property
    @abstractmethod
    def federation(self) -> Federation | None:
        """The data, where they are on this machine."""

    @property
    @abstractmethod
    def splits(self) -> Collection[str]:
        """Kinds of examples that there are."""

    @property
    @abstractmethod
    def store(self) -> LocalStore | None:
        """Units' states, where they are on this machine."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Enough to see whether a resumed run has the same members."""

    @abstractmethod
    def update_study(self, study: Study) -> None:
        """Replace the study; units may be others, and begin anew."""

    @abstractmethod
    def fresh(self, method: Algorithm) -> Members:
        """The same ones, for a run of this method beside this one."""

    @abstractmethod
    def update_method(self, method: Algorithm) -> None:
        """Replace the method: trial rounds have found what it left open."""

    def newcomers(self) -> Sequence[str]:
        """Who came after the questions before the rounds, and is to be asked those that last."""
        return ()

    @abstractmethod
    def active(self, rule: Participation, key: Key, round: int) -> Active:
        """Who is to take part in a round."""

    @abstractmethod
    def round(self, method: Algorithm, round: Round, active: Active) -> Total:
        """The active ones' work, added up; nobody's state changes before ``commit``."""

    @abstractmethod
    def ask(self, asking: Asking[R]) -> tuple[R, Total]:
        """What is made of everyone's answers."""

    def asks(self, question: Question[R], known: Tensors) -> R:
        """The same, of a question that needs nothing beside what is known."""
        return self.ask(Asking(question, known, Key(0, purpose=question.name)))[0]

    @abstractmethod
    def commit(self, entered: bool = True) -> None:
        """The last round, or question (``entered`` False), counts: states follow from it."""

    @abstractmethod
    def bytes_down(self, broadcast: Tensors, ids: Tensor) -> int:
        """Bytes that it takes to send this to these units' members."""

    def metrics(self) -> dict[str, Any]:
        """Numbers of the last round beside the method's."""
        return {}

    @abstractmethod
    def state(self) -> Tensors:
        """What a checkpoint has to hold of them."""

    @abstractmethod
    def restore(self, state: Tensors) -> None: ...

    @abstractmethod
    def remember(self) -> Tensors:
        """Have everyone keep their present state as the best so far; gives what ``recall`` will need."""

    @abstractmethod
    def recall(self, remembered: Tensors) -> None: ...


class LocalMembers(Members):
    """All units on this machine. What ``data`` are is the study's business; ``sites`` maps a site's name to
    those of its units, where sites hold several and the data do not say so."""

    def __init__(
        self,
        study: Study,
        data: Any,
        memory: str | int = "1GiB",
        sites: Mapping[str, Sequence[str]] | None = None,
        secure: FixedPoint | None = None,
    ) -> None:
        self.data, self._memory, self._given, self._secure = data, memory, sites, secure
        self._begin(study)

    def _begin(self, study: Study) -> None:
        data = study.unit_data(self.data)
        self.study = study
        self.at = self._given if data.sites is None else data.sites
        """Units of each site."""
        self.sites = Sites(
            data.federation, self.device, sites=self.at, tables=data.tables, secure=self._secure
        )
        self._examples: int | None = None
        self._roster = replace(data.federation.roster, sites=self.sites.sites)
        self.plan: Plan = study.plan(data.federation, parse_bytes(self._memory))

    @property
    def device(self) -> torch.device:
        return self.study.device

    @property
    def names(self) -> Sequence[str]:
        return self.federation.names

    @property
    def units(self) -> int:
        return len(self.federation)

    @property
    def roster(self) -> Roster:
        return self._roster

    @property
    def examples(self) -> int:
        if self._examples is None:  # of a million clients it takes as long as a small round
            self._examples = int(self.federation.train.sizes.sum())
        return self._examples

    @property
    def federation(self) -> Federation:
        return self.sites.federation

    @property
    def splits(self) -> Collection[str]:
        return self.federation.splits

    @property
    def store(self) -> LocalStore:
        return self.sites.store

    def describe(self) -> dict[str, Any]:
        names = digest_of_bytes("\0".join(self.names).encode())[:32]
        return {"clients": len(self.federation), "data": self.federation.fingerprint(), "names": names}

    def update_study(self, study: Study) -> None:
        if study.same_rows(self.study):
            self.study = study
        else:
            self._begin(study)

    def fresh(self, method: Algorithm) -> LocalMembers:
        return LocalMembers(self.study.by(method), self.data, self._memory, self._given, self._secure)

    def update_method(self, method: Algorithm) -> None:
        self.update_study(self.study.by(method))

    def active(self, rule: Participation, key: Key, round: int) -> Active:
        return active_units(rule, self, key, round)

    def round(self, method: Algorithm, round: Round, active: Active) -> Total:
        return self.sites.round(method, round, active, self.plan)

    def ask(self, asking: Asking[R]) -> tuple[R, Total]:
        among = asking.among
        if asking.split is not None:
            among = (self.federation.splits[asking.split].sizes > 0).nonzero().squeeze(1)
        plan, personal = asking.models_at(self.sites, self.plan)
        guard = None if asking.method is None else asking.method.guard
        return self.sites.ask(asking.question, asking.known, asking.key, plan, personal, among, guard)

    def commit(self, entered: bool = True) -> None:
        self.sites.commit(entered)

    def messages(self, ids: Tensor) -> int:
        return self.sites.count(ids)

    def bytes_down(self, broadcast: Tensors, ids: Tensor) -> int:
        return self.sites.bytes_down(broadcast, ids)

    def state(self) -> Tensors:
        return self.sites.store.state()

    def restore(self, state: Tensors) -> None:
        self.sites.store = LocalStore.restore(state)

    def remember(self) -> Tensors:
        return self.sites.snapshot().state()

    def recall(self, remembered: Tensors) -> None:
        self.restore(remembered)
