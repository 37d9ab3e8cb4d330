"""Every public name says what it is, with an example that runs (doctests are part of the test suite)."""

import inspect
from types import ModuleType
from typing import Any

import pytest

import fedpop as fp


def public() -> dict[str, Any]:
    out = {}
    for name in fp.__all__:
        value = getattr(fp, name)
        if not isinstance(value, ModuleType):
            out[name] = value
            continue
        for inner, part in vars(value).items():
            if not inner.startswith("_") and getattr(part, "__module__", None) == value.__name__:
                out[f"{name}.{inner}"] = part
    return {n: v for n, v in out.items() if inspect.isclass(v) or inspect.isfunction(v)}


PUBLIC = public()


def test_names_are_sorted_and_there() -> None:
    assert len(set(fp.__all__)) == len(fp.__all__)
    assert all(hasattr(fp, name) for name in fp.__all__)
    assert len(PUBLIC) > 40


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name: str) -> None:
    text = vars(PUBLIC[name]).get("__doc__") if inspect.isclass(PUBLIC[name]) else PUBLIC[name].__doc__
    assert text, f"{name} has no docstring of its own"
    assert ">>> " in text, f"{name}: add an example to its docstring"
