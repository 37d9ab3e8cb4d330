"""What layers (tests/test_layers.py) leave open: imports stand at the top, and help imports little."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layers import imports, layer, modules

ROOT = Path(__file__).parents[2]
KNOWN = modules()
OUTER = {name: path for name, path in KNOWN.items() if layer(name) in ("data", "report", "comparison")}
OUTER |= {str(path.relative_to(ROOT)): path for path in (ROOT / "research").glob("*/*.py")}


def hidden(source: str) -> list[str]:
    """Modules of fedpop that are imported inside functions, or under a condition."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    return [name for n in nodes if n.col_offset > 0 for name in imports(n, set(KNOWN))]


def test_there_is_something_to_look_at() -> None:
    assert {layer(name) for name in KNOWN if name in OUTER} == {"data", "report", "comparison"}
    assert hidden("def f():\n    from fedpop.report import html\n") == ["fedpop.report.html"]
    assert hidden(KNOWN["fedpop.cli"].read_text())  # each command imports what it needs


@pytest.mark.parametrize("module", OUTER)
def test_imports_stand_at_the_top(module: str) -> None:
    assert hidden(OUTER[module].read_text()) == []


SCRIPT = """
import sys, types
package = types.ModuleType("fedpop")  # without its __init__, which offers all of fedpop
package.__path__ = ["fedpop"]
sys.modules["fedpop"] = package
from {module} import main
main({words})
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("module", "words", "told"),
    [("fedpop.cli", ["version"], "compare"), ("research.__main__", [], "synthetic, theory")],
)
def test_help_imports_no_more_than_it_needs(module: str, words: list[str], told: str) -> None:
    script = SCRIPT.format(module=module, words=words)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert told in done.stdout
