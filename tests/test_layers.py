"""Packages form layers, from the ground up: each imports only from those above it in the list (``LAYERS``,
and ``docs/design.md``), in functions too; no rings of modules."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedpop
from fedpop.federation.participation import Participation
from fedpop.message.compressors import Compressor
from fedpop.methods.base import Algorithm
from fedpop.questions import Question

ROOT = Path(fedpop.__file__).parent
HERE = Path(__file__).parent
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "version",
        "extras",
        "entries",
        "keys",
        "files",
        "precision",
        "precision_probe",
        "blocks",
        "decisions",
        "devices",
        "threads",
        "kinds",
        "checked",
        "settings",
    ),
    ("privacy",),
    ("federation",),
    ("message",),
    ("models",),
    ("priors",),
    ("kernels",),
    ("server",),
    ("client",),
    ("questions",),
    ("methods",),
    ("site",),
    ("evaluation",),
    ("population",),
    ("run",),
    ("data",),
    ("report",),
    ("mixed",),
    ("flower",),
    ("comparison",),
    # What users import: public names by kind, then all of them, then the command line.
    ("steps", "chains", "aggregates", "compressors", "participation", "layers", "callbacks"),
    ("saved",),
    ("names", "__init__"),
    ("cli", "cli_data"),
)
RANK = {name: i for i, names in enumerate(LAYERS) for name in names}
LATER = {("fedpop.methods.base", "fedpop.population")}
"""The one type from further down the list: what ``Algorithm.fit`` returns."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)] = path
    return found


def imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Modules of fedpop that are imported anywhere below this node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "fedpop")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedpop":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


@cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imports(ast.parse(path.read_text()), set(known))) for name, path in known.items()}


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_module_is_in_a_layer() -> None:
    assert {layer(m) for m in modules()} == set(RANK)


def test_a_package_imports_only_from_those_above_it_in_the_list() -> None:
    wrong = [
        f"{module} imports {other}, which is further down the list"
        for module, others in graph().items()
        if not layer(module).startswith("cli")
        for other in others
        if RANK[layer(other)] > RANK[layer(module)] and (module, other) not in LATER
    ]
    assert not wrong


def test_no_ring_of_modules() -> None:
    """Names that only a type checker sees may point back inside a package."""
    known = modules()
    edges = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        edges[name] = set(imports(tree, set(known))) - {name}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in done or name not in edges:
            return
        for other in sorted(edges[name]):
            visit(other, (*path, name))
        done.add(name)

    for name in edges:
        visit(name, ())


def hidden(tree: ast.AST, known: set[str]) -> list[str]:
    """Modules of fedpop that are imported inside functions."""
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [other for function in inside for other in imports(function, known)]


def test_nothing_of_our_own_is_imported_in_functions() -> None:
    """What a module needs of fedpop stands at its top; packages that may be missing are another matter, and
    so is the command line, whose ``--help`` is not to wait for all of them."""
    known = {name: path for name, path in modules().items() if not layer(name).startswith("cli")}
    found = {name: hidden(ast.parse(path.read_text()), set(known)) for name, path in known.items()}
    assert not {name: others for name, others in found.items() if others}
    function = "def f():\n    from fedpop.run import run\n"
    assert hidden(ast.parse(function), {"fedpop.run.run"}) == ["fedpop.run.run"]


def test_a_package_does_not_know_those_further_down_the_list() -> None:
    """That methods run on the simulator is said where both are known, in ``fedpop.names``."""
    said = {name for name, path in modules().items() if ".runs_on = " in path.read_text()}
    assert said == {"fedpop.names"}
    assert (
        Algorithm.runs_on is fedpop.names.run_on_simulator
    )  # ``fit``, which is imported once a method is fitted


def test_the_package_knows_nothing_of_the_papers_experiments() -> None:
    """They may import all of it; whoever installs the wheel does not have them."""

    def named(source: str) -> set[str]:
        nodes = list(ast.walk(ast.parse(source)))
        plain = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        plain |= {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
        plain |= {  # of import_module(...)
            ast.unparse(a).lstrip("f'\"")
            for n in nodes
            if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("import_module")
            for a in n.args[:1]
        }
        return {name for name in plain if name.split(".")[0] == "research"}

    assert not {name for name, path in modules().items() if named(path.read_text())}
    assert named("from research.drift import job") == {"research.drift"}
    assert named("import_module(f'research.{name}')")
    assert any(named(path.read_text()) for path in (ROOT.parent / "research").rglob("*.py"))
    others = {path for path in HERE.rglob("*.py") if "research" not in path.relative_to(HERE).parts}
    assert not {path for path in others if named(path.read_text())}


def test_the_wheel_is_the_package_alone() -> None:
    """And what is made of it otherwise holds no tests of what it has not."""
    built = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"] == {"packages": ["fedpop"]}
    assert "/research" not in built["sdist"]["include"]
    assert "/tests/research" in built["sdist"]["exclude"]


FLOWERS = ("client", "door", "link", "node", "records", "server", "stock", "transport")


def test_flower_is_imported_in_one_place() -> None:
    """It breaks something every month: only one package is to know of it."""

    def named(path: Path) -> set[str]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        plain = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
        return plain | {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}

    users = {name for name, path in modules().items() if "flwr" in named(path)}
    assert users == {f"fedpop.flower.{m}" for m in FLOWERS}


def test_the_check_can_fail() -> None:
    known = {"fedpop.run", "fedpop.run.run"}
    hidden = "def f():\n    from fedpop.run import run\n"
    assert list(imports(ast.parse(hidden), known)) == ["fedpop.run.run"]


# --- who may look at what ------------------------------------------------------------------------


def _below(cls: type) -> set[str]:
    return {cls.__name__}.union(*(_below(sub) for sub in cls.__subclasses__()))


ASKED = _below(Algorithm) | _below(Question) | _below(Participation) | _below(Compressor)
"""Whose subclasses are asked, never told apart, by what runs them."""


def kinds_told_apart(path: Path) -> Iterator[tuple[int, str]]:
    """Where a file asks for the class of a method, a question or a rule, or for a likelihood's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            for name in ast.walk(node.args[1]):
                if isinstance(name, ast.Name) and name.id in ASKED:
                    yield node.lineno, name.id
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("likelihood.name"):
            yield node.lineno, "likelihood.name"


@pytest.mark.parametrize("room", ["run", "flower", "population"])
def test_what_runs_a_method_does_not_look_at_its_class(room: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in sorted((ROOT / room).rglob("*.py"))
        for line, what in kinds_told_apart(file)
    ]
    assert not found
