"""Every public name says what it is, with an example that runs (doctests are part of the test suite)."""

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedpop as fp

MODULES = {n: getattr(fp, n) for n in fp.__all__ if isinstance(getattr(fp, n), ModuleType)}
TOP = {n: getattr(fp, n) for n in fp.__all__ if n not in MODULES}
MACHINERY = {"Hierarchy", "Pass", "State", "Target", "Transition", "Tuning", "run", "Part"}
"""What a kernel or a prior of one's own is written with: docs/extending.md has examples, which run too."""


def inside(module: ModuleType) -> list[str]:
    """The public names of a module: those it lists, or those that are defined in it."""
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
    return getattr(module, "__all__", [n for n in own if not n.startswith("_")])


INSIDE = {f"{m}.{n}": getattr(module, n) for m, module in MODULES.items() for n in inside(module)}
PUBLIC: dict[str, Any] = {n: v for n, v in (TOP | INSIDE).items() if inspect.isclass(v) or callable(v)}


def text_of(name: str) -> str:
    value = PUBLIC[name]
    return (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""


def test_names_are_there_once() -> None:
    assert len(set(fp.__all__)) == len(fp.__all__)
    assert all(hasattr(fp, name) for name in fp.__all__)
    for name, module in MODULES.items():
        names = inside(module)
        assert names, name
        assert len(set(names)) == len(names)
        assert all(hasattr(module, n) for n in names)


def test_some_forty_names_at_the_top() -> None:
    """Methods, models, data, and what is done with them; what they are made of has a module by kind."""
    assert 30 <= len(TOP) <= 42
    assert set(MODULES) == {
        "aggregates",
        "callbacks",
        "chains",
        "compressors",
        "data",
        "kernels",
        "layers",
        "likelihoods",
        "links",
        "networks",
        "participation",
        "priors",
        "privacy",
        "steps",
    }
    assert not {n.split(".")[1] for n in INSIDE} & set(TOP)
    assert all(f"``{name}``" in (fp.__doc__ or "") for name in MODULES)


def test_nothing_else_is_at_the_top() -> None:
    """Names that are not public are modules of the package, or have an underscore."""
    others = [n for n in vars(fp) if not n.startswith("_") and n not in fp.__all__]
    assert all(isinstance(getattr(fp, n), ModuleType) for n in others)


def test_every_method_is_at_the_top() -> None:
    from fedpop.methods.base import Algorithm
    from fedpop.settings import known

    ours = {
        n for n, c in known(Algorithm).items() if c.__module__.startswith("fedpop.") and "name" in vars(c)
    }
    assert ours <= set(TOP)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name: str) -> None:
    text = text_of(name)
    assert text, f"{name} has no docstring of its own"
    if inspect.isabstract(PUBLIC[name]) or name.split(".")[-1] in MACHINERY:
        return
    assert ">>> " in text, f"{name}: add an example to its docstring"


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_is_documented(name: str) -> None:
    assert (MODULES[name].__doc__ or "").strip()


SHARED = {"Normal", "Bernoulli"}
"""A likelihood and a prior, a likelihood and a rule: each is found in the module of its kind."""


def test_one_name_is_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for file in sorted(Path(fp.__file__).parent.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file.name)
    assert {n: files for n, files in found.items() if len(files) > 1 and n not in SHARED} == {}
