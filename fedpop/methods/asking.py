"""A question on its way: its class and its fields in plain values, made again beside a site's own method.

A class is known once it is defined, a user's own as well as fedpop's. Of its fields plain values, settings
and tensors travel; a method, a model and a hierarchy do not: whoever answers has one, and takes that. What
else every site has, because it was announced, registers a ``role``.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any

from torch import Tensor

from fedpop.errors import CheckpointError, SettingsError
from fedpop.kernels.target import Hierarchy
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm
from fedpop.models.base import Model
from fedpop.models.spec import described_module
from fedpop.questions import Question
from fedpop.settings import class_of, describe, name_of, rebuilt

OWN, SENT = "own", "sent"
"""What stands in a field's place: the site's own, or a tensor that goes with the question."""


def describe_question(question: Question[Any], sent: Tensors) -> tuple[dict[str, Any], Tensors]:
    """A question in plain values, and tensors that have to go with it beside those that are ``sent``
    already.

    >>> from fedpop.questions.spectral import SecondMoments
    >>> describe_question(SecondMoments(minimum=5), {})
    ({'kind': 'SecondMoments', 'fields': {'minimum': 5}}, {})
    """
    values, more = dict[str, Any](), Tensors()
    every: list[str] = [f.name for f in fields(question)] if is_dataclass(question) else []
    for name in every:
        value = getattr(question, name)
        if isinstance(value, Tensor):
            place = next((n for n, tensor in sent.items() if tensor is value), f"own.{name}")
            more |= {} if place in sent else {place: value}
            values[name] = {"kind": SENT, "name": place}
        else:
            what = role(value)
            values[name] = describe(value) if what is None else {"kind": OWN, "what": what}
    description = {"kind": name_of(type(question)), "fields": values}
    try:
        json.dumps(description)
    except TypeError as error:
        raise SettingsError(
            f"{question.name} cannot be asked across machines ({error}): fields of a question are plain "
            "values, settings, tensors, the model or the method"
        ) from error
    return description, more


@singledispatch
def role(value: Any) -> str | None:
    """Under which name a site has its own, which does not travel; None: it travels."""
    return None


@role.register
def _(value: Algorithm) -> str:
    return "method"


@role.register
def _(value: Model) -> str:
    return "model"


@role.register
def _(value: Hierarchy) -> str:
    return "hierarchy"


def question_from_description(described: dict[str, Any], sent: Tensors, owner: Any) -> Question[Any]:
    """The question of this description; what does not travel are attributes of this side's ``owner``, such as
    its method (or that itself), of which there is none before an experiment began."""
    cls = class_of(Question, described["kind"])
    if cls is None:
        raise CheckpointError(
            f"unknown question {described['kind']!r} (one of your own is known once the module that defines "
            "it is imported)"
        )

    def own(plain: dict[str, Any]) -> Any:
        found = owner if role(owner) == plain["what"] else getattr(owner, plain["what"], None)
        if found is None:
            raise CheckpointError(f"{described['kind']} needs a method, and there is none yet")
        return found

    builders = {OWN: own, SENT: lambda plain: sent[plain["name"]], "Module": described_module}
    values = {name: rebuilt(value, builders) for name, value in described["fields"].items()}
    return cls(**values)
