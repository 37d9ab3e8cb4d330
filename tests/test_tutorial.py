"""The tutorial's code runs from top to bottom and prints what the page shows."""

import contextlib
import io
import re
from pathlib import Path

from tests.test_readme import shape

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_the_tutorial_prints_what_it_shows():
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) > 8
    names: dict[str, object] = {}
    for number, (code, shown) in enumerate(blocks):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"tutorial, block {number}", "exec"), names)
        assert shape(out.getvalue()) == shape(shown), out.getvalue()
