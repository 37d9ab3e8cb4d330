"""The tutorials' code runs from top to bottom and prints what the pages show."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.test_readme import shape

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["tutorial", "tutorial-classes"])
def test_a_tutorial_prints_what_it_shows(page):
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text())
    assert len(blocks) > 7
    names: dict[str, object] = {}
    for number, (code, shown) in enumerate(blocks):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"{page}, block {number}", "exec"), names)
        assert shape(out.getvalue()) == shape(shown), out.getvalue()
