"""Data, report, experiments, command line: each imports only from those before it, at the top of files."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("data", "report", "experiments", "cli")
"""From the ground up, above everything else."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted((ROOT / "fedpop").rglob("*.py"))}


def layer(module: str) -> int:
    part = module.split(".")[1] if "." in module else ""
    return LAYERS.index(part) if part in LAYERS else -1


OUTER = [name for name in FILES if layer(name) >= 0]


def imports(module: str) -> Iterator[tuple[str, ast.stmt]]:
    """Modules of fedpop that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in FILES else node.module), node


def test_there_is_something_to_look_at() -> None:
    assert {layer(name) for name in OUTER} == set(range(len(LAYERS)))
    assert "fedpop.report.html" in {target for target, _ in imports("fedpop.report.records")}
    assert "fedpop.experiments.theory.page" in {target for target, _ in imports("fedpop.experiments.theory")}


@pytest.mark.parametrize("module", [name for name in FILES if name != "fedpop"])
def test_nothing_imports_from_above(module: str) -> None:
    above = [target for target, _ in imports(module) if layer(target) > layer(module)]
    assert above == []


@pytest.mark.parametrize("module", [name for name in OUTER if name != "fedpop.cli"])
def test_imports_stand_at_the_top(module: str) -> None:
    hidden = [target for target, node in imports(module) if node.col_offset > 0]
    assert hidden == []


def test_there_are_no_cycles() -> None:
    graph = {name: {target for target, _ in imports(name)} & set(OUTER) - {name} for name in OUTER}
    while graph:
        free = [name for name, targets in graph.items() if not targets & set(graph)]
        assert free, f"these import each other: {sorted(graph)}"
        for name in free:
            del graph[name]


def test_no_file_is_long() -> None:
    long = {name: n for name in OUTER if (n := len(FILES[name].read_text().splitlines())) > 400}
    assert long == {}


SCRIPT = """
import sys, types
package = types.ModuleType("fedpop")  # without its __init__, which offers all of fedpop
package.__path__ = ["fedpop"]
sys.modules["fedpop"] = package
from fedpop.cli import main
main(["experiment"])
try:
    main(["experiment", "--help"])
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules
"""


def test_help_imports_no_more_than_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "synthetic, theory" in done.stdout
