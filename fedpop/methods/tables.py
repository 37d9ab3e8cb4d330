"""Methods from plain values, as a settings file has them: names, numbers, nested tables.

A nested table is the settings of the class that the method has there, ``local = {epochs = 2}``; where several
would do, ``kind`` names it, ``phi_step = {kind = "Adam", rate = 0.03}``. Where a setting may differ between
clients, a table without a kind has a value for each of them, ``local_steps = {anna = 5, ben = 20}``.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from fedpop.errors import FedpopError, SettingsError
from fedpop.methods import known_methods, method_class
from fedpop.methods.base import Algorithm
from fedpop.models.base import Model
from fedpop.settings import Setting, class_of, known, members_of, settings_in


def known_method(name: Any, where: str) -> type[Algorithm]:
    """The class of a method by its name; ``where`` begins what errors say."""
    found = method_class(name) if isinstance(name, str) else None
    if found is None:
        raise SettingsError(f"{where}: unknown method {name!r}; known are {', '.join(known_methods())}")
    return found


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
    cls = known_method(name, where)
    built = _arguments(cls, settings, where, "", {"model"})
    method: Algorithm = _made(lambda: cls(model, **built), where)
    return method


def _arguments(
    cls: type, settings: Mapping[str, Any], where: str, path: str, hidden: set[str]
) -> dict[str, Any]:
    own = {f.name: f for f in fields(cls) if f.init and f.name not in hidden}
    hints = typing.get_type_hints(cls)
    for key in settings:
        if key not in own:
            raise SettingsError(
                f"{where}: unknown setting {path + key!r} of {cls.__name__}; known are "
                f"{', '.join(sorted(own))}"
            )
    for key, f in own.items():
        if key not in settings and f.default is MISSING and f.default_factory is MISSING:
            raise SettingsError(f"{where}: {path + key} is missing, which {cls.__name__} needs")
    return {
        key: _value(value, hints[key], where, path + key, _usual(own[key])) for key, value in settings.items()
    }


def _usual(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _value(value: Any, hint: Any, where: str, path: str, usual: Any = None) -> Any:
    """A plain value as a field of this type wants it; ``usual`` is what the field has by default."""
    members = members_of(hint)
    if isinstance(value, Mapping):
        return _from_table(value, hint, where, path, usual)
    if isinstance(value, list):
        for one in members:
            if typing.get_origin(one) in (tuple, list, Sequence):
                return _from_list(value, one, where, path)
    if any(kind in members and _fits(value, kind) for kind in (*PLAIN, type(None))):
        exactly = isinstance(value, int) and not isinstance(value, bool) and int not in members
        return float(value) if exactly and float in members else value
    if any(_open(one) for one in members):
        return value
    raise _wrong(value, hint, where, path)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _open(one: Any) -> bool:
    """Of this type nothing is known here (``Any``, ``Literal``): the class itself may judge."""
    return not isinstance(one, type) and typing.get_origin(one) not in (Mapping, dict, tuple, list, Sequence)


def _by_client(hint: Any) -> Any:
    """The type of one client's value, where there may be one for each."""
    return next(
        (typing.get_args(h)[1] for h in members_of(hint) if typing.get_origin(h) in (Mapping, dict)), None
    )


def _wrong(value: Any, hint: Any, where: str, path: str) -> SettingsError:
    kinds = [word for kind, word in PLAIN.items() if kind in members_of(hint)]
    kinds += ["a list of values"] if any(typing.get_origin(h) is tuple for h in members_of(hint)) else []
    kinds += [f"a table of settings, {path} = {{...}}"] if settings_in(hint) else []
    kinds += ["a table with a value for each client"] if _by_client(hint) is not None else []
    if not kinds:
        return SettingsError(f"{where}: {path} cannot be given in plain values")
    return SettingsError(f"{where}: {path} is {' or '.join(kinds)}, not {value!r}")


def _from_list(value: list[Any], hint: Any, where: str, path: str) -> tuple[Any, ...]:
    each = typing.get_args(hint)
    if typing.get_origin(hint) is not tuple or each[1:] == (...,):
        each = each[:1] * len(value)
    if len(each) != len(value):
        raise SettingsError(f"{where}: {path} is a list of {len(each)} values, not {value!r}")
    return tuple(_value(v, h, where, path) for v, h in zip(value, each, strict=True))


def _from_table(value: Mapping[str, Any], hint: Any, where: str, path: str, usual: Any) -> Any:
    each = _by_client(hint)
    if each is not None and "kind" not in value:
        for cls in settings_in(hint):
            if value and is_dataclass(cls) and set(value) <= {f.name for f in fields(cls)}:
                raise SettingsError(
                    f"{where}: {path}: a table without a kind has a value for each client; for settings of "
                    f'{cls.__name__} say so, {path} = {{kind = "{cls.__name__}", ...}}'
                )
        return {name: _value(v, each, where, f"{path}.{name}") for name, v in value.items()}
    cls = _class_of(value, hint, where, path, usual)
    inner = {k: v for k, v in value.items() if k != "kind"}
    settings = _arguments(cls, inner, where, f"{path}.", set())
    return _made(lambda: cls(**settings), f"{where}: {path}")


def _class_of(value: Mapping[str, Any], hint: Any, where: str, path: str, usual: Any) -> type:
    """Whose settings a nested table has: the one it names, or the one that the method has there."""
    classes: list[type] = settings_in(hint)
    if not classes and any(_open(one) for one in members_of(hint)):
        classes = [Setting]
    if not classes:
        raise _wrong(value, hint, where, path)
    every: dict[str, type] = {}
    for base in classes:
        every |= known(base)
    fitting = sorted(name for name, cls in every.items() if is_dataclass(cls))
    if "kind" in value:
        kind = value["kind"]
        named: list[type | None] = [class_of(base, kind) for base in classes] if isinstance(kind, str) else []
        found = next((cls for cls in named if cls is not None and is_dataclass(cls)), None)
        if found is not None:
            return found
        if isinstance(kind, str) and class_of(Setting, kind) is not None:
            raise SettingsError(f"{where}: {path} takes {_names(classes)}, not {kind}")
        raise SettingsError(f"{where}: {path}: unknown kind {kind!r}; known are {', '.join(fitting)}")
    if is_dataclass(usual) and not isinstance(usual, type):
        return type(usual)
    if len(classes) == 1 and is_dataclass(classes[0]) and not inspect.isabstract(classes[0]):
        return classes[0]
    raise SettingsError(
        f'{where}: {path}: say which kind, {path} = {{kind = "...", ...}}; known are {", ".join(fitting)}'
    )


def _names(classes: Sequence[type]) -> str:
    return " or ".join(cls.__name__ for cls in classes)


def _made(make: typing.Callable[[], Any], where: str) -> Any:
    try:
        return make()
    except FedpopError as error:
        text = str(error)
        raise SettingsError(text if text.startswith(where) else f"{where}: {text}") from error
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from error
