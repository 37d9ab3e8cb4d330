"""What is not declared does not leave: vectors, sums and numbers of a method's rounds and of questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.message import Answer, Tensors, Total
from fedpop.message.declared import NUMBERS, VECTORS, Sent
from fedpop.methods.base import Round
from fedpop.questions.base import Question, Units
from tests.helpers import linear_model, ragged

SITES = [None, {"north": ["client-0", "client-1"], "south": ["client-2"]}]
"""Each client by itself, and several at a site."""


@dataclass(frozen=True)
class Talkative(fp.FedAvg):
    """FedAvg, and one more vector, sum or number."""

    name: ClassVar[str] = "Talkative"
    kind: str = "vector"

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        answer = super().local_round(round, cohort, local)
        assert isinstance(answer, Answer)
        ages = torch.ones(len(cohort), 1)
        if self.kind == "vector":
            return replace(answer, vectors={**answer.vectors, "age": ages})
        if self.kind == "disguised":
            return replace(answer, vectors={**answer.vectors, "named.age": ages})
        if self.kind == "sum":
            return replace(answer, sums={"age": ages.sum(0)})
        return replace(answer, cost={**answer.cost, "age": 1.0})


@dataclass(frozen=True)
class Declared(Talkative):
    """The same, declared."""

    name: ClassVar[str] = "Declared"
    sends: ClassVar[Mapping[str, Sent]] = {"age": Sent("the client's age")}


@pytest.mark.parametrize("sites", SITES, ids=["alone", "at sites"])
@pytest.mark.parametrize("kind", ["vector", "disguised", "sum", "number"])
def test_a_round_that_sends_what_is_not_declared_ends(kind: str, sites: Any) -> None:
    method = Talkative(linear_model(), kind=kind)
    with pytest.raises(SettingsError, match="age' would leave a site that is not declared"):
        method.fit(ragged((3, 4, 5)), rounds=1, sites=sites, progress=False)


@pytest.mark.parametrize("kind", ["vector", "number"])
def test_what_a_method_declares_is_sent(kind: str) -> None:
    method = Declared(linear_model(), kind=kind)
    assert method.fit(ragged((3, 4, 5)), rounds=1, progress=False).rounds == 1


@dataclass(frozen=True)
class Curious(Question[Tensor]):
    """Asks for what is not declared."""

    name: ClassVar[str] = "curious"

    def ask(self, known: Tensors) -> Tensors:
        return {}

    def answer(self, asked: Tensors, units: Units, key: fp.keys.Key) -> Answer:
        good = torch.ones(len(units.cohort), dtype=torch.bool)
        return Answer(good, {"age": good.double().unsqueeze(1)})

    def finish(self, known: Tensors, total: Total) -> Tensor:
        return total.plain_sum("age", torch.zeros(1))


def test_a_question_that_asks_for_what_is_not_declared_ends() -> None:
    population = fp.FedAvg(linear_model()).fit(ragged((3, 4, 5)), rounds=1, progress=False)
    with pytest.raises(SettingsError, match="'age' would leave"):
        population.ask(Curious())


def test_no_name_is_declared_twice() -> None:
    """A star stands for all names that begin so: none of the others may."""
    for names in (VECTORS, NUMBERS):
        stars = tuple(n[:-1] for n in names if n.endswith("*"))
        assert not [n for n in names if not n.endswith("*") and n.startswith(stars)]
