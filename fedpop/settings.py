"""Settings as frozen dataclasses: checked where they are given, written as plain values, read back from them.

Whatever a run can be configured with derives from ``Setting``: methods, kernels, priors, compressors,
steps. A class is known by its name once it is defined, a user's as well as fedpop's: there is no list
to add it to. A bare name that fedpop has is fedpop's; files hold a user's as ``module:Name``.
"""

from __future__ import annotations

import hashlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import singledispatch
from importlib import import_module
from typing import Any, TypeVar

from torch import Tensor

from fedpop.checked import Checked, hints_of
from fedpop.errors import CheckpointError, SettingsError
from fedpop.kinds import did_you_mean

S = TypeVar("S")


class Setting(Checked):
    """What a file can name by ``kind`` and hold as a table of its fields; subclasses are frozen
    dataclasses."""


def ours(cls: type) -> bool:
    """Whether a class is fedpop's, and not a user's own."""
    return cls.__module__.split(".")[0] == "fedpop"


def name_of(cls: type) -> str:
    """What files call a class: its name, a user's own with the module that defines it.

    >>> class Blue(Setting): ...
    >>> name_of(Setting), Blue.__module__ + ":Blue" == name_of(Blue) or ours(Blue)
    ('Setting', True)
    """
    return cls.__name__ if ours(cls) else f"{cls.__module__}:{cls.__qualname__}"


def complete() -> None:
    """A class is known once it is defined: fedpop's are, once all of it is imported."""
    import_module("fedpop.names")


def all_of(base: type[S]) -> list[type[S]]:
    """All that can be made of this kind, in the order in which they were defined, more or less."""
    complete()
    found = [] if inspect.isabstract(base) else [base]
    for sub in base.__subclasses__():
        found += all_of(sub)
    return found


def by_name(classes: Iterable[type[S]], name: Callable[[type[S]], str]) -> dict[str, type[S]]:
    """Classes by what they are called: fedpop's before a user's own, else the one defined last."""
    found: dict[str, type[S]] = {}
    for cls in classes:
        before = found.get(name(cls))
        if before is None or ours(cls) or not ours(before):
            found[name(cls)] = cls
    return found


def known(base: type[S]) -> dict[str, type[S]]:
    """Every class of this kind that can be made, by its name; of two of one name fedpop's, or else the one
    defined last.

    >>> class Colour(Setting): ...
    >>> class Red(Colour): ...
    >>> list(known(Colour))
    ['Colour', 'Red']
    """
    return by_name(all_of(base), lambda cls: cls.__name__)


def class_of(base: type[S], kind: str) -> type[S] | None:
    """The class of this kind that files call so; a user's own that has moved is found by its name alone."""
    if ":" not in kind:
        return known(base).get(kind)
    theirs = [cls for cls in all_of(base) if not ours(cls)]
    last = kind.rpartition(":")[2].rpartition(".")[2]
    exact = [cls for cls in theirs if name_of(cls) == kind]
    return next(reversed(exact or [cls for cls in theirs if cls.__name__ == last]), None)


def named(base: type[S], name: str, what: str) -> type[S]:
    """The class of this kind with this name, however it is spelled; one of a user's own that has a name of
    fedpop's is asked for as ``module:Name``.

    >>> class Shape(Setting): ...
    >>> class RoundOne(Shape): ...
    >>> named(Shape, "round-one", "shape").__name__
    'RoundOne'
    """
    spelled = by_name(known(base).values(), lambda cls: _spelled(cls.__name__))
    found = class_of(base, name) if ":" in name else spelled.get(_spelled(name))
    if found is None:
        names = sorted(n.lower() for n in known(base))
        raise SettingsError(
            f"unknown {what} {name!r}; known are {', '.join(names)}{did_you_mean(name, names)}"
        )
    return found


def _spelled(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# --- plain values, and back ------------------------------------------------------------------


@singledispatch
def describe(value: Any) -> Any:
    """Settings as plain values, for files and for comparing runs."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: describe(getattr(value, f.name)) for f in fields(value)}
        return {"kind": name_of(type(value))} | inner
    if isinstance(value, tuple | list):
        return [describe(v) for v in value]
    if isinstance(value, Mapping):
        return {"kind": "mapping", "items": [[describe(k), describe(v)] for k, v in value.items()]}
    return value


@describe.register
def _(value: Tensor) -> str:  # data among the settings: enough to tell whether they are the same
    digest = hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} sha256 {digest}"


Builders = Mapping[str, Callable[[dict[str, Any]], Any]]


def rebuilt(plain: Any, builders: Builders, hint: Any = None) -> Any:
    """The value that was described; ``builders`` make what is more than a dataclass of settings. ``hint`` is
    the type of the field it stands in: two classes of one name may serve for different ones."""
    if isinstance(plain, list):
        return tuple(rebuilt(v, builders) for v in plain)
    if not isinstance(plain, dict) or "kind" not in plain:
        return plain
    kind = plain["kind"]
    if kind == "mapping":
        return {rebuilt(k, builders): rebuilt(v, builders) for k, v in plain["items"]}
    if kind in builders:
        return builders[kind](plain)
    found: list[type | None] = [class_of(base, kind) for base in (*settings_in(hint), Setting)]
    cls = next((c for c in found if c is not None), None)
    if cls is None:
        raise CheckpointError(
            f"unknown setting {kind!r}: it was saved with a class that is not defined here; import the "
            "module that defines it first"
        )
    return cls(**rebuilt_fields(plain, cls, builders))


def rebuilt_fields(plain: Mapping[str, Any], cls: type, builders: Builders) -> dict[str, Any]:
    """The arguments of a settings class out of a description; what it does not know is left out."""
    hints = hints_of(cls)
    names = {f.name for f in fields(cls) if f.init}
    return {k: rebuilt(v, builders, hints.get(k)) for k, v in plain.items() if k in names}


def members_of(hint: Any) -> Sequence[Any]:
    """The types of a union, or the type itself."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def settings_in(hint: Any) -> list[type]:
    """Whose settings a field of this type may hold.

    >>> settings_in(int | Setting | None)
    [<class 'fedpop.settings.Setting'>]
    """
    members = members_of(hint)
    return [h for h in members if isinstance(h, type) and (issubclass(h, Setting) or is_dataclass(h))]
