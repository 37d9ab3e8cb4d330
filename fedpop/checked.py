"""What may be given where, read off annotations: one mechanism for classes of settings and public functions.

The type of a field says what it takes, ``Annotated`` in what range (``fedpop.kinds``). Whatever does not fit
is one SettingsError that names the class, the field, the value and what is allowed. Only what two fields must
satisfy together is left to the classes themselves.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, ParamSpec, Self, TypeVar

from fedpop.errors import SettingsError
from fedpop.kinds import Kind, OneOf, Range, Wrong, did_you_mean, kind_of

__all__ = ["OneOf", "Range"]

P = ParamSpec("P")
R = TypeVar("R")

Whole = Annotated[int, Range(least=0)]
Count = Annotated[int, Range(least=1)]
Few = Annotated[int, Range(least=1, most=1_000_000)]
"""Of what takes memory each: chains, draws, layers' units."""
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(above=0, most=1)]
Factor = Annotated[float, Range(least=0, below=1)]
"""Of a geometric average or a decay."""
Level = Annotated[float, Range(above=0, below=1, why="a credible level is a share, such as 0.9")]
Bytes = Annotated[int, Range(least=1, most=2**63 - 1)]
Seed = Annotated[int, Range(least=0, most=2**64 - 1)]
Proportion = Annotated[float, Range(least=0, most=1)]


def _refused(
    name: str, signature: inspect.Signature, error: TypeError, given: Iterable[str]
) -> SettingsError:
    """What was wrong with the names of arguments."""
    known = [
        n
        for n, p in signature.parameters.items()
        if n != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL, p.POSITIONAL_ONLY)
    ]
    for one in given:
        if one not in known:
            words = f"{name} has no setting {one!r}{did_you_mean(one, known)}"
            words += " It has" if words.endswith("?") else "; it has"
            return SettingsError(f"{words} {', '.join(known)}")
    return SettingsError(f"{name}: {error}")


# --- classes ---------------------------------------------------------------------------------


def _once_per_class(make: Callable[[type], R]) -> Callable[[type], R]:
    """A function of a class, cached as long as the class is there (a notebook's cell defines it again)."""
    cache: weakref.WeakKeyDictionary[type, R] = weakref.WeakKeyDictionary()

    def found(cls: type) -> R:
        if cls not in cache:
            cache[cls] = make(cls)
        return cache[cls]

    return found


class Checked:
    """A dataclass whose fields are checked when it is made; a ``__post_init__`` of its own calls this one
    first.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Walk(Checked):
    ...     steps: Count = 1
    >>> Walk(steps=0)
    Traceback (most recent call last):
    fedpop.errors.SettingsError: Walk: steps must be a whole number, 1 or more, not 0
    """

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        names, needed = _names(cls)
        if args or not (needed <= settings.keys() <= names):
            signature = inspect.signature(cls.__init__)
            try:
                signature.bind(None, *args, **settings)
            except TypeError as error:
                raise _refused(cls.__name__, signature, error, settings) from None
        if inspect.isabstract(cls):
            raise SettingsError(f"{cls.__name__} is a kind of settings: make one of the classes of this kind")
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or one for another process, has what was checked already.
        return object.__new__, (type(self),), dict(vars(self))

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)):
            value = getattr(self, name)
            try:
                read = kind.read(value)
            except Wrong as wrong:
                words = wrong.message(f"{type(self).__name__}: {name}", kind.among)
                raise SettingsError(words) from None
            if read is not value:
                object.__setattr__(self, name, read)


@_once_per_class
def _names(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """Of a dataclass's settings, and of those without a default."""
    if not is_dataclass(cls):
        return frozenset(), frozenset()
    made = inspect.signature(cls.__init__).parameters
    needed = (n for n, p in made.items() if p.default is p.empty and n != "self")
    return frozenset(made) - {"self"}, frozenset(needed)


@_once_per_class
def _kinds(cls: type) -> tuple[tuple[str, Kind], ...]:
    hints = hints_of(cls)
    found = ((f.name, hints.get(f.name, Any)) for f in fields(cls) if f.init)
    return tuple((name, kind_of(hint)) for name, hint in found if hint is not Any)


def hints_of(cls: type) -> dict[str, Any]:
    """The types of a class's fields, those that are known."""
    hints: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        hints |= _annotations(owner)
    return hints


def _annotations(owner: Any) -> dict[str, Any]:
    try:
        return inspect.get_annotations(owner, eval_str=True)
    except NameError:  # names of a function's inside, or of a type checker's alone
        return {}


def require(hint: Any, **values: Any) -> None:
    """Raise unless all of these are of this kind, where neither a class nor a function says so.

    >>> require(Count, sites=3)
    >>> require(Annotated[str, OneOf("ML", "REML")], method="RML")
    Traceback (most recent call last):
    fedpop.errors.SettingsError: method must be one of ML, REML...
    """
    kind = kind_of(hint)
    for name, value in values.items():
        try:
            kind.read(value)
        except Wrong as wrong:
            raise SettingsError(wrong.message(name, kind.among)) from None


# --- functions -------------------------------------------------------------------------------


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose arguments are checked by their annotations before it runs.

    >>> @checked
    ... def walk(steps: Count) -> int:
    ...     return steps
    >>> walk(step=1)
    Traceback (most recent call last):
    fedpop.errors.SettingsError: walk has no setting 'step'; did you mean steps? It has steps
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    kinds: dict[str, Kind] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kinds:
            hints = _annotations(function)
            kinds.update({n: kind_of(h) for n, h in hints.items() if h is not Any and n != "return"})
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _refused(name, signature, error, kwargs) from None
        for setting, value in bound.arguments.items():
            if (kind := kinds.get(setting)) is not None:
                try:
                    bound.arguments[setting] = kind.read(value)
                except Wrong as wrong:
                    raise SettingsError(wrong.message(f"{name}: {setting}", kind.among)) from None
        return function(*bound.args, **bound.kwargs)

    return call
