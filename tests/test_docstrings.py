"""What an editor shows: real signatures, one plain line, and ``Args:`` with every setting."""

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import fedpop as fp
from fedpop.methods.base import Algorithm
from fedpop.mixed.fit import MixedFit
from fedpop.models.predictive import Predictive
from fedpop.population import Newcomer, Posterior
from tests.test_public_names import MACHINERY, PUBLIC, text_of


def settings_of(value: Any) -> list[str]:
    """What is given to a class, or to a function."""
    if is_dataclass(value):
        return [f.name for f in fields(value) if f.init and not f.name.startswith("_")]
    try:
        given = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in given if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def told_in(text: str) -> set[str]:
    """Names under ``Args:``."""
    _, found, after = inspect.cleandoc(text).partition("\nArgs:\n")
    block = re.split(r"\n(?=\S)", after)[0] if found else ""
    return set(re.findall(r"^ {4}(\w+): \S", block, re.MULTILINE))


def missing_in(name: str) -> list[str]:
    told = told_in(text_of(name))
    return [s for s in settings_of(PUBLIC[name]) if s not in told]


def asked(name: str) -> bool:
    value = PUBLIC[name]
    return bool(settings_of(value)) and not inspect.isabstract(value) and name.split(".")[-1] not in MACHINERY


@pytest.mark.parametrize("name", PUBLIC)
def test_the_first_line_is_a_sentence_of_one_line(name: str) -> None:
    first, *rest = inspect.cleandoc(text_of(name)).splitlines()
    assert first[-1] in ".:", f"{name}: {first!r}"
    if rest:
        assert rest[0] == "", f"{name}: the first line of its docstring is to stand by itself"


@pytest.mark.parametrize("name", [n for n in PUBLIC if asked(n)])
def test_every_setting_is_told_under_args(name: str) -> None:
    missing = missing_in(name)
    assert missing == [], f"{name}: add to Args: {', '.join(missing)}"


HELD = {c.__name__: c for c in (fp.Population, Predictive, Posterior, Newcomer, MixedFit)}
METHODS = [
    (name, method)
    for name, held in HELD.items()
    for method, value in vars(held).items()
    if not method.startswith("_") and inspect.isfunction(value) and settings_of(value)
]


@pytest.mark.parametrize(("name", "method"), [*METHODS, ("FedSOUL", "paper")])
def test_methods_of_what_users_hold_tell_their_arguments(name: str, method: str) -> None:
    value = getattr(HELD.get(name, fp.FedSOUL), method)
    told = told_in(value.__doc__ or "")
    missing = [s for s in settings_of(value) if s not in told]
    assert missing == [], f"{name}.{method}: add to Args: {', '.join(missing)}"


def test_fit_has_its_real_signature() -> None:
    """The same settings with the same defaults on a method as on the function."""
    here, there = (inspect.signature(f).parameters for f in (fp.FedSOUL.fit, fp.fit))
    assert fp.FedSOUL.fit is Algorithm.fit
    mine = {n: p.default for n, p in here.items() if n not in ("self", "unknown")}
    assert mine == {n: p.default for n, p in there.items() if n not in ("method", "unknown")}
    assert all(p.kind is p.KEYWORD_ONLY for n, p in here.items() if n not in ("self", "clients", "unknown"))
