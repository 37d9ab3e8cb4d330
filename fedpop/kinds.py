"""What an annotation takes, and how it is described: types, ranges and words, each with its reader.

A truth value is no number; NumPy's scalars are as good as Python's; every number is finite; lists stand for
tuples. A reader gives a value in the form that is wanted, or raises ``Wrong``.
"""

from __future__ import annotations

import collections.abc
import difflib
import math
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

LARGEST_COUNT = 2**31 - 1
"""Of whole numbers that count something, unless a range says otherwise."""


def is_array(value: Any) -> bool:
    """Whether this is an array or a tensor."""
    return _of(value, "numpy", "ndarray") or _of(value, "torch", "Tensor")


def _of(value: Any, package: str, kind: str) -> bool:
    """Where a package is not imported nothing is of its kinds: commands that need none stay small."""
    module = sys.modules.get(package)
    return module is not None and isinstance(value, getattr(module, kind))


@dataclass(frozen=True)
class Range:
    """Where a number lies: ``Annotated[float, Range(above=0)]``."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    why: str = ""
    """A word of advice for a number outside."""

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def words(self, noun: str) -> str:
        """In words, with what kind of number it is.

        >>> Range(least=1).words("a whole number"), Range(above=0, most=1).words("a number")
        ('a whole number, 1 or more', 'a number in (0, 1]')
        """
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        if low is None and high is None:
            return noun
        if low is not None and high is not None:
            left, right = "[" if self.above is None else "(", "]" if self.below is None else ")"
            return f"{noun} in {left}{low:,}, {high:,}{right}"
        if low is not None:
            if self.above == 0:
                return f"a positive {noun.removeprefix('a ')}"
            return f"{noun}, {low} or more" if self.above is None else f"{noun} above {low}"
        return f"{noun}, at most {high}" if self.below is None else f"{noun} below {high}"


@dataclass(frozen=True)
class OneOf:
    """The words that a setting may be: ``Annotated[str, OneOf("left", "right")]``."""

    words: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        object.__setattr__(self, "words", words)


class Wrong(Exception):
    """A value that does not fit; ``path`` leads to it inside the setting."""

    def __init__(self, words: str, value: Any, path: str = "", why: str = "") -> None:
        self.words, self.value, self.path, self.why = words, value, path, why

    def message(self, name: str, among: Iterable[str] = ()) -> str:
        value = self.value
        shown = " ".join(_SHORT.repr(value).split())  # a tensor's or a model's words go over many lines
        out = f"{name}{self.path} must be {self.words}, not {shown}"
        if isinstance(value, type):
            return f"{out}: that is a class, write {value.__name__}() for one of its kind"
        if is_array(value) and math.prod(value.shape) == 1:
            return f"{out}; take its .item()"
        if isinstance(value, str):
            out += did_you_mean(value, among)
        return f"{out}; {self.why}" if self.why else out


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True)
class Kind:
    """What an annotation takes: ``read`` gives a value in the form wanted, or raises ``Wrong``."""

    read: Callable[[Any], Any]
    words: str
    among: tuple[str, ...] = ()


def kind_of(hint: Any, marks: tuple[Any, ...] = ()) -> Kind:
    """The reader of one annotation.

    >>> import numpy as np
    >>> kind_of(int).read(np.int64(3)), kind_of(tuple[float, float]).read([1, 2])
    (3, (1.0, 2.0))
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return kind_of(inner[0], (*marks, *hint.__metadata__))
    if origin in (typing.Union, types.UnionType):
        return _union([kind_of(h, marks) for h in inner])
    if origin is Literal:
        return _word(tuple(inner))
    if hint in (int, float):
        limits = next((m for m in marks if isinstance(m, Range)), Range())
        return _whole(limits) if hint is int else _number(limits)
    if hint is str and (words := next((m.words for m in marks if isinstance(m, OneOf)), None)):
        return _word(words)
    if hint is bool:
        return _made_by(lambda v: bool(v) if _of(v, "numpy", "bool_") else v, bool, "True or False")
    if hint is str:
        return _made_by(lambda v: v, str, "a text")
    if hint is type(None):
        return _made_by(lambda v: v, type(None), "None")
    if origin is tuple and inner[1:] != (...,):
        return _tuple([kind_of(h, marks) for h in inner])
    if origin in (tuple, collections.abc.Sequence):
        return _several(kind_of(inner[0], marks))
    if origin in (dict, collections.abc.Mapping):
        return _mapping(kind_of(inner[0]), kind_of(inner[1], marks))
    if origin is collections.abc.Callable:
        return _made_by(lambda v: v, collections.abc.Callable, "a function")
    if hint is not Any and isinstance(origin or hint, type):
        hint = origin or hint
        return _made_by(lambda v: v, hint, f"{_article(hint.__name__)} {hint.__name__}")
    return Kind(lambda v: v, "anything")


def _made_by(form: Callable[[Any], Any], cls: Any, words: str) -> Kind:
    def read(value: Any) -> Any:
        made = form(value)
        # A class that can be called is not what is meant by a function, nor by an instance.
        if isinstance(value, type) or not isinstance(made, cls):
            raise Wrong(words, value)
        return made

    return Kind(read, words)


def _article(noun: str) -> str:
    return "an" if noun[:1] in "AEIOU" else "a"


def _whole(limits: Range) -> Kind:
    words = limits.words("a whole number")
    most = LARGEST_COUNT if limits.most is None else limits.most

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not limits.holds(int(value)):
            raise Wrong(words, value)
        if not -most - 1 <= int(value) <= most:
            raise Wrong(words, value, why=f"it is at most {most:,}")
        return int(value)

    return Kind(read, words)


def _number(limits: Range) -> Kind:
    words = limits.words("a finite number" if limits.most is None and limits.below is None else "a number")

    def read(value: Any) -> float:
        if type(value) is float and math.isfinite(value) and limits.holds(value):
            return value  # as it is, which is quick
        if isinstance(value, bool) or not isinstance(value, Real):
            raise Wrong(words, value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not limits.holds(number):
            raise Wrong(words, value, why=limits.why)
        return number

    return Kind(read, words)


def _word(allowed: tuple[Any, ...]) -> Kind:
    words = f"one of {', '.join(map(str, allowed))}"

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in allowed:
            raise Wrong(words, value)
        return value

    return Kind(read, words, allowed)


def _union(kinds: list[Kind]) -> Kind:
    each = [k.words for k in kinds]
    words = (", or " if any("," in w for w in each) else " or ").join(each)

    def read(value: Any) -> Any:
        why = ""
        for kind in kinds:
            try:
                return kind.read(value)
            except Wrong as wrong:
                if wrong.path:  # of this kind, but for something inside it
                    raise
                why = why or wrong.why
        raise Wrong(words, value, why=why)

    return Kind(read, words, tuple(w for k in kinds for w in k.among))


def _listed(value: Any, words: str) -> list[Any]:
    if is_array(value) and value.ndim > 0:
        return list(value.tolist())
    if isinstance(value, str | bytes) or not isinstance(value, collections.abc.Sequence):
        raise Wrong(words, value)
    return list(value)


def _each(kinds: Iterable[Kind], values: list[Any]) -> tuple[Any, ...]:
    out = []
    for i, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        try:
            out.append(kind.read(value))
        except Wrong as wrong:
            raise Wrong(wrong.words, wrong.value, f"[{i}]{wrong.path}", wrong.why) from None
    return tuple(out)


def _tuple(kinds: list[Kind]) -> Kind:
    words = f"{len(kinds)} values, ({', '.join(k.words for k in kinds)})"

    def read(value: Any) -> tuple[Any, ...]:
        values = _listed(value, words)
        if len(values) != len(kinds):
            raise Wrong(words, value)
        return _each(kinds, values)

    return Kind(read, words)


def _several(kind: Kind) -> Kind:
    words = "a list" if kind.words == "anything" else f"a list, each {kind.words}"

    def read(value: Any) -> tuple[Any, ...]:
        values = _listed(value, words)
        return _each([kind] * len(values), values)

    return Kind(read, words)


def _mapping(key: Kind, kind: Kind) -> Kind:
    words = f"a mapping from names to {kind.words}"

    def read(value: Any) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise Wrong(words, value)
        out = {}
        for name, one in value.items():
            try:
                out[key.read(name)] = kind.read(one)
            except Wrong as wrong:
                raise Wrong(wrong.words, wrong.value, f"[{name!r}]{wrong.path}", wrong.why) from None
        return value if out == value else out

    return Kind(read, words)


# --- names -----------------------------------------------------------------------------------

ELSEWHERE = {
    "epochs": ("rounds", "local"),
    "n_rounds": ("rounds",),
    "num_rounds": ("rounds",),
    "iterations": ("rounds", "local_steps"),
    "steps": ("local_steps", "rounds"),
    "num_steps": ("local_steps",),
    "lr": ("rate", "step", "step_size", "local"),
    "learning_rate": ("rate", "step", "step_size", "local"),
    "batch_size": ("batch", "local"),
    "weight_decay": ("decay",),
    "random_state": ("seed",),
    "fraction": ("participation",),
    "clients_per_round": ("participation",),
    "output": ("out",),
    "path": ("out",),
    "n_samples": ("draws", "samples"),
}
"""How other libraries call things, and how they are called here."""


def did_you_mean(word: str, among: Iterable[str]) -> str:
    """A question about a word that is not known, or nothing.

    >>> did_you_mean("epochs", ["rounds", "seed"]), did_you_mean("nonsense", ["rounds"])
    ('; did you mean rounds?', '')
    """
    among = list(among)
    known = [n for n in ELSEWHERE.get(word, ()) if n in among][:1]
    plain = {n.lower(): n for n in among}
    known = known or [plain[n] for n in difflib.get_close_matches(str(word).lower(), plain, 1)]
    return f"; did you mean {known[0]}?" if known else ""
