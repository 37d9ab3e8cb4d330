"""Every field of every class of settings refuses what it cannot be, with one error that names the culprit."""

from __future__ import annotations

import copy
import math
import pickle
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedpop as fp
from fedpop.checked import Checked, Count, Factor, Fraction, OneOf, Positive
from fedpop.comparison.terms import Terms
from fedpop.data.image_task import ImageTask
from fedpop.data.synthetic import SyntheticTask
from fedpop.data.table_task import TableTask
from fedpop.errors import FedpopError, SettingsError
from fedpop.federation.partitions import ByClass
from fedpop.kinds import LARGEST_COUNT, Wrong, kind_of
from fedpop.methods import METHODS
from fedpop.methods.base import Algorithm
from fedpop.settings import Setting, known
from tests.helpers import linear_model

MODEL, LINEAR = linear_model(), torch.nn.Linear(1, 1)
NEEDED: dict[str, dict[str, Any]] = {
    "SGD": {"rate": 0.1},
    "Steps": {"start": 2, "end": 8},
    "Distillation": {"x": torch.ones(4, 3)},
    "Bernoulli": {"p": 0.5},
    "Uniform": {"size": 2},
    "Availability": {"rounds": [[0]], "clients": 1},
    "ByClass": {"classes": 1, "sizes": (3,)},
    "TableTask": {"file": "a.csv", "x": ["a"], "y": "b", "client": "c"},
    "RandK": {"share": 0.5},
}
OTHERS: tuple[type, ...] = (
    fp.participation.Bernoulli,
    fp.participation.Uniform,
    fp.participation.Availability,
    fp.likelihoods.Normal,
    fp.callbacks.EarlyStop,
    fp.callbacks.Watch,
    SyntheticTask,
    TableTask,
    ImageTask,
    ByClass,
    Terms,
)
FREE = {("Availability", "rounds"), ("Distillation", "x"), ("Watch", "points")}
"""What is more than plain settings: its own tests are elsewhere."""


def every() -> list[type]:
    ours = [c for c in known(Setting).values() if c.__module__.startswith("fedpop.") and is_dataclass(c)]
    return sorted({*ours, *OTHERS}, key=lambda c: (c.__module__, c.__name__))


def made(cls: type, **changes: Any) -> Any:
    more = NEEDED.get(cls.__name__, {})
    if "k" in changes and cls.__name__ == "RandK":
        more = {}
    first = (MODEL,) if issubclass(cls, Algorithm) and "model" not in changes else ()
    return cls(*first, **(more | changes))


FIELDS = [
    (cls, f.name)
    for cls in every()
    for f in fields(cls)  # type: ignore[arg-type]
    if f.init and (cls.__name__, f.name) not in FREE
]


def hint_of(cls: type, name: str) -> Any:
    return typing.get_type_hints(cls, include_extras=True)[name]


KINDS = list({str(hint_of(cls, name)): (cls, name) for cls, name in FIELDS}.values())
"""A field of each kind: all of a kind are read by the same reader, and each class is asked below."""


def members(hint: Any) -> set[Any]:
    inner = typing.get_args(hint)
    return {hint} if not inner or typing.get_origin(hint) in (tuple, dict) else set(inner)


class Stranger:
    """Of no kind that any field takes."""

    def __repr__(self) -> str:
        return "<a stranger>"


@pytest.mark.parametrize(("cls", "name"), KINDS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_what_no_field_takes(cls: type, name: str) -> None:
    """Objects of other kinds, classes for instances, not a number, endless numbers, sets and bytes."""
    for value in (Stranger(), Stranger, math.nan, -math.inf, math.inf, {1, 2}, b"bytes", 1j, lambda: 1):
        with pytest.raises(SettingsError) as caught:
            made(cls, **{name: value})
        assert str(caught.value).startswith(f"{cls.__name__}: {name}"), caught.value


@pytest.mark.parametrize(("cls", "name"), KINDS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_truth_values_are_no_numbers_and_numbers_no_truth_values(cls: type, name: str) -> None:
    takes = members(hint_of(cls, name))
    for value in (1, 0) if bool in takes else (True, False):
        with pytest.raises(SettingsError) as caught:
            made(cls, **{name: value})
        assert f"{cls.__name__}: {name} must be" in str(caught.value)


@pytest.mark.parametrize(("cls", "name"), KINDS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_whole_numbers_too_large(cls: type, name: str) -> None:
    for value in (10**400, -(10**400)):
        with pytest.raises(SettingsError, match=f"{cls.__name__}: {name}"):
            made(cls, **{name: value})


@pytest.mark.parametrize("cls", every(), ids=lambda c: c.__name__)
def test_a_name_that_is_not_there(cls: type) -> None:
    with pytest.raises(SettingsError, match=f"^{cls.__name__} has no setting 'nonsense'"):
        made(cls, nonsense=1)


@pytest.mark.parametrize(("cls", "name"), KINDS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_name_that_is_nearly_there(cls: type, name: str) -> None:
    if len(name) > 3 and name != "model":
        with pytest.raises(SettingsError, match=rf"^{cls.__name__} has no setting '{name}x'; did you mean"):
            made(cls, **{f"{name}x": 1})


@pytest.mark.parametrize("cls", every(), ids=lambda c: c.__name__)
def test_what_is_missing_and_what_is_too_much(cls: type) -> None:
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    if needed:
        with pytest.raises(
            SettingsError, match=f"^{cls.__name__}: missing a required argument: '{needed[0]}'"
        ):
            cls()
    with pytest.raises(SettingsError, match=f"^{cls.__name__}: too many positional arguments"):
        cls(*range(60))


def in_range(cls: type, name: str) -> Any:
    """A value that a field of one number takes: its default, or what the tests need."""
    given = NEEDED.get(cls.__name__, {}).get(name)
    default = next(f.default for f in fields(cls) if f.name == name)  # type: ignore[arg-type]
    return given if given is not None else default


NUMBERS = [
    (c, n)
    for c, n in KINDS
    if isinstance(in_range(c, n), int | float) and not isinstance(in_range(c, n), bool)
]


@pytest.mark.parametrize(("cls", "name"), NUMBERS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_numpy_scalars_are_as_good(cls: type, name: str) -> None:
    value = in_range(cls, name)
    kind = np.int64 if isinstance(value, int) else np.float64
    found = getattr(made(cls, **{name: kind(value)}), name)
    assert found == value
    assert type(found) is type(value)
    with pytest.raises(SettingsError, match=rf"{name}.*take its \.item\(\)"):
        made(cls, **{name: torch.tensor(value)})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    where=st.sampled_from(FIELDS),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.floats(), max_size=3),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        st.complex_numbers(),
        st.binary(max_size=3),
    ),
)
def test_anything_anywhere_is_taken_or_refused_with_one_error(where: tuple[type, str], value: Any) -> None:
    """What is taken is finite and of the field's type; what is not is a SettingsError that names it."""
    cls, name = where
    try:
        taken = getattr(made(cls, **{name: value}), name)
    except FedpopError:
        return
    numbers = taken if isinstance(taken, tuple) else (taken,)
    assert all(math.isfinite(n) for n in numbers if isinstance(n, int | float))


# --- functions -------------------------------------------------------------------------------------

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"epochs": 3}, "fit has no setting 'epochs'; did you mean rounds?"),
    "n_rounds": ({"n_rounds": 3}, "did you mean rounds?"),
    "random_state": ({"random_state": 3}, "did you mean seed?"),
    "fraction": ({"fraction": 0.1}, "did you mean participation?"),
    "round": ({"round": 3}, "did you mean rounds?"),
    "nonsense": ({"nonsense": 3}, "fit has no setting 'nonsense'; it has .*clients, rounds"),
    "rounds": ({"rounds": True}, "fit: rounds must be a whole number"),
    "rounds too many": ({"rounds": 10**12}, "at most 2,147,483,647"),
    "seed": ({"seed": 2**64}, "fit: seed must be a whole number in"),
    "seed as a float": ({"seed": 0.5}, "fit: seed"),
    "resume": ({"resume": 1}, "fit: resume must be True or False, not 1"),
    "progress": ({"progress": "yes"}, "fit: progress must be True or False or None"),
    "callbacks": ({"callbacks": fp.callbacks.EarlyStop()}, "fit: callbacks must be a list, each a Callback"),
    "a callback's class": (
        {"callbacks": [fp.callbacks.EarlyStop]},
        r"callbacks\[0\] must be a Callback.*write EarlyStop",
    ),
    "out": ({"out": 7}, "fit: out must be a text or a Path or None, not 7"),
    "memory": ({"memory": 1.5}, "fit: memory"),
    "memory of nothing": ({"memory": 0}, "fit: memory"),
    "memory in words": ({"memory": "lots"}, "memory budget"),
    "restarts": ({"restarts": -1}, "fit: restarts must be a whole number, 0 or more, not -1"),
    "precision": ({"precision": "flaot32"}, "did you mean float32"),
    "sites": ({"sites": ["a"]}, "fit: sites must be a mapping"),
    "checkpoint_every": ({"checkpoint_every": 0}, "fit: checkpoint_every"),
    "participation": ({"participation": fp.participation.Everyone}, "that is a class, write Everyone()"),
    "participation of nothing": ({"participation": math.nan}, "fit: participation"),
    "participation without end": ({"participation": math.inf}, "fit: participation"),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("through", ["method", "function"])
def test_what_fit_does_not_take(tmp_path: Path, case: str, through: str) -> None:
    changes, message = CALLS[case]
    clients = [(torch.zeros(4, 3), torch.zeros(4))]
    arguments = {"rounds": 1, "out": tmp_path / "run"} | changes
    method = fp.FedAvg(MODEL)
    call: Any = method.fit if through == "method" else partial(fp.fit, method)
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        call(clients, **arguments)
    assert not (tmp_path / "run").exists()


def test_a_method_that_is_a_class_or_missing() -> None:
    with pytest.raises(SettingsError, match=r"fit: method must be an Algorithm, .*write FedAvg\(\)"):
        fp.fit(fp.FedAvg, [])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="fit: missing a required argument: 'clients'"):
        fp.FedAvg(MODEL).fit()  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match="FedAvg: model must be a Model"):
        fp.FedAvg(torch.nn.Linear(3, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_epochs_of_a_method_are_elsewhere(name: str) -> None:
    with pytest.raises(SettingsError, match="has no setting 'epochs'"):
        METHODS[name](MODEL, epochs=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp.hold_out([], test="half"), "hold_out: test must be a number in"),
        (lambda: fp.hold_out([], tests=0.5), "did you mean test"),
        (lambda: fp.compare(fp.FedAvg(MODEL), []), "compare: methods must be"),
        (lambda: fp.compare([], [], rounds=2.5), "compare: rounds"),
        (lambda: fp.load(7), "load: path must be a text or a Path"),
        (lambda: fp.evaluate(MODEL), "evaluate: population must be a Population"),
        (
            lambda: fp.Composition(torch.nn.Linear, torch.nn.Linear(1, 1), "normal"),
            "Composition: backbone.*class",
        ),
        (lambda: fp.Composition(None, torch.nn.Linear(1, 1), 3), "Composition: likelihood must be"),
        (lambda: fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal), r"write Normal\(\)"),
        (lambda: fp.Composition(None, torch.nn.Linear(1, 1), "gaussian"), "unknown likelihood 'gaussian'"),
        (lambda: fp.Split(torch.nn.Linear(1, 1), 3, "normal"), "Split: personal must be"),
        (lambda: fp.layers.CropFlip(padding=-1), "CropFlip: padding must be a whole number, 0 or more"),
        (lambda: fp.layers.CropFlip(flip=1), "CropFlip: flip must be True or False"),
        (lambda: fp.layers.replace_batchnorm(torch.nn.Linear(1, 1), groups=0), "replace_batchnorm: groups"),
        (lambda: fp.kernels.Kernel(), "Kernel"),
    ],
)
def test_what_other_functions_do_not_take(make: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()


@pytest.mark.parametrize("cls", every(), ids=lambda c: c.__name__)
def test_copies_and_those_for_other_processes(cls: type) -> None:
    """Are what they were, though their required settings are not given again."""
    value = made(cls)
    for again in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(again) is cls
        assert [f.name for f in fields(again)] == [f.name for f in fields(value)]
        plain = [f.name for f in fields(value) if isinstance(getattr(value, f.name), int | float | str)]
        assert [getattr(again, n) for n in plain] == [getattr(value, n) for n in plain]


# --- the mechanism ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "inside", "outside"),
    [
        (
            int,
            (-LARGEST_COUNT - 1, 0, LARGEST_COUNT),
            (-LARGEST_COUNT - 2, LARGEST_COUNT + 1, 1.0, "1", True, None),
        ),
        (float, (-1e308, 0, 1e308, 10**300), (math.inf, math.nan, 10**400, "1", True, None, 1j)),
        (Count, (1, np.uint8(3)), (0, -1)),
        (Fraction, (1e-300, 1), (0, 1 + 1e-15)),
        (Factor, (0, 1 - 1e-16), (1, -1e-300)),
        (Positive | None, (1e-300, None), (0, -1.0, "none")),
        (bool, (True, np.bool_(False)), (0, 1, None, "True")),
        (tuple[float, Positive], ((0, 1), [0, 1], np.array([-1.0, 2.0])), ((0,), (0, 1, 2), (1, 0), "01")),
        (Sequence[int], ([], (1, 2), range(3), torch.tensor([1, 2])), ([1.5], "12", {1, 2}, 3)),
        (Mapping[str, int], ({}, {"a": 1}), ({"a": 1.5}, {1: 1}, [("a", 1)])),
        (Annotated[str, OneOf("left", "right")], ("left",), ("lef", 1, None)),
    ],
    ids=str,
)
def test_limits_are_where_they_say(hint: Any, inside: Sequence[Any], outside: Sequence[Any]) -> None:
    for value in inside:
        kind_of(hint).read(value)
    for value in outside:
        with pytest.raises(Wrong):
            kind_of(hint).read(value)


def test_a_users_own_class_is_checked_as_well() -> None:
    @dataclass(frozen=True)
    class Half(fp.kernels.ULA):
        often: int = 2

    assert Half(often=np.int32(3)).often == 3
    with pytest.raises(SettingsError, match="Half: often must be a whole number, not 'a'"):
        Half(often="a")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="Half: step_size must be a number in"):
        Half(step_size=3.0)
    assert issubclass(Half, Checked)
