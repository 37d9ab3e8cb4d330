"""Methods from plain values, as a settings file has them: names, numbers, nested tables.

A nested table is the settings of the class that the method has there, ``local = {epochs = 2}``; where several
would do, ``kind`` names it, ``phi_step = {kind = "Adam", rate = 0.03}``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

from fedpop.algorithms import known_methods
from fedpop.algorithms.base import Algorithm
from fedpop.errors import FedpopError, SettingsError
from fedpop.models.base import Model
from fedpop.settings import Setting, known

RESERVED = ("name", "label", "search")


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: a registered method with settings, or a method as it is."""

    label: str
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    given: Algorithm | None = None
    where: str = ""

    def build(self, model: Model | None = None) -> Algorithm:
        """The method on this model."""
        if self.given is not None:
            return self.given
        assert model is not None
        return method_from(self.name, self.settings, model, self.where)


def entry_from(table: Mapping[str, Any], where: str) -> Entry:
    """A ``[[method]]`` table.

    >>> entry_from({"name": "FedAvg", "local": {"epochs": 2}}, "compare.toml").settings
    {'local': {'epochs': 2}}
    """
    name = table.get("name")
    if name is None:
        raise SettingsError(f"{where}: a [[method]] without a name; known are {', '.join(known_methods())}")
    _known(name, where)
    label = table.get("label", name)
    search = table.get("search", {})
    if not isinstance(label, str) or not isinstance(search, Mapping):
        raise SettingsError(f"{where}: method {name}: label is a text and search a table")
    settings = {k: v for k, v in table.items() if k not in RESERVED}
    return Entry(label, name, settings, search, where=f"{where}: method {label}")


def _known(name: Any, where: str) -> type[Algorithm]:
    if name not in known_methods():
        raise SettingsError(f"{where}: unknown method {name!r}; known are {', '.join(known_methods())}")
    return known_methods()[name]


def method_from(name: str, settings: Mapping[str, Any], model: Model, where: str) -> Algorithm:
    """A registered method with these settings; ``where`` begins what errors say.

    >>> import torch, fedpop as fp
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method_from("FedAvg", {"local": {"epochs": 2}}, model, "here").local.epochs
    2
    >>> method_from("FedAvg", {"epochs": 2}, model, "here")
    Traceback (most recent call last):
    fedpop.errors.SettingsError: here: unknown setting 'epochs' of FedAvg; known are ...
    """
    cls = _known(name, where)
    built = _arguments(cls, settings, where, "", {"model"})
    method: Algorithm = _made(lambda: cls(model, **built), where)
    return method


def _arguments(
    cls: type, settings: Mapping[str, Any], where: str, path: str, hidden: set[str]
) -> dict[str, Any]:
    known = {f.name: f for f in fields(cls) if f.init and f.name not in hidden}
    hints = typing.get_type_hints(cls)
    out = {}
    for key, value in settings.items():
        if key not in known:
            raise SettingsError(
                f"{where}: unknown setting {path + key!r} of {cls.__name__}; known are "
                f"{', '.join(sorted(known))}"
            )
        out[key] = _value(value, known[key], hints[key], where, path + key)
    return out


def _value(value: Any, field: Field[Any], hint: Any, where: str, path: str) -> Any:
    if isinstance(value, Mapping):
        cls = _class_of(value, field, hint, where, path)
        wanted = [h for h in _members(hint) if isinstance(h, type) and h is not type(None)]
        told_all = len(wanted) == len(_members(hint)) - (type(None) in _members(hint))
        if told_all and not issubclass(cls, tuple(wanted)):
            names = " or ".join(h.__name__ for h in wanted)
            raise SettingsError(f"{where}: {path} takes {names}, not {cls.__name__}")
        inner = {k: v for k, v in value.items() if k != "kind"}
        settings = _arguments(cls, inner, where, f"{path}.", set())
        return _made(lambda: cls(**settings), f"{where}: {path}")
    if isinstance(value, list):
        return tuple(_value(v, field, hint, where, path) for v in value)
    kinds = [h for h in _members(hint) if h in (int, float, bool, str, type(None))]
    if kinds and not any(_fits(value, kind) for kind in kinds) and not _open(hint):
        names = " or ".join({int: "a whole number", float: "a number", bool: "true or false"}.get(k, "a text")
                            for k in kinds if k is not type(None))  # fmt: skip
        raise SettingsError(f"{where}: {path} is {names}, not {value!r}")
    if not set(kinds) - {type(None)} and typing.Any not in _members(hint):
        raise SettingsError(f"{where}: {path} is a table of settings, {path} = {{...}}, not {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    return value


def _members(hint: Any) -> Sequence[Any]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _open(hint: Any) -> bool:
    """More than plain values may stand here: names of priors or kernels, sequences."""
    plain = (int, float, bool, str, type(None))
    return any(h not in plain and not (isinstance(h, type) and is_dataclass(h)) for h in _members(hint))


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _class_of(value: Mapping[str, Any], field: Field[Any], hint: Any, where: str, path: str) -> type:
    """Whose settings a nested table has: the one it names, or the one that the method has there."""
    if "kind" in value:
        classes = known(Setting)
        if value["kind"] not in classes:
            raise SettingsError(
                f"{where}: {path}: unknown kind {value['kind']!r}; known are {', '.join(sorted(classes))}"
            )
        return classes[value["kind"]]
    usual = field.default_factory() if field.default_factory is not MISSING else field.default
    if is_dataclass(usual) and not isinstance(usual, type):
        return type(usual)
    sure = [h for h in _members(hint) if isinstance(h, type) and issubclass(h, Setting)]
    if len(sure) != 1:
        raise SettingsError(f'{where}: {path}: say which kind, {path} = {{kind = "...", ...}}')
    return sure[0]


def _made(make: typing.Callable[[], Any], where: str) -> Any:
    try:
        return make()
    except FedpopError as error:
        told = str(error)
        raise SettingsError(told if told.startswith(where) else f"{where}: {told}") from error
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from error
