"""The page on mixed models runs from top to bottom and prints what it shows."""

import contextlib
import io
from pathlib import Path

import pandas as pd

from tests.mixed.conftest import need
from tests.test_tutorial import BLOCK

PAGE = Path(__file__).parents[2] / "docs" / "mixed.md"


def test_the_page_prints_what_it_shows(monkeypatch):
    monkeypatch.setenv("FEDPOP_DATA", str(need("sleepstudy.csv").parents[1]))
    need("radon.csv")
    need("nested/pastes.csv")
    names: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 5
    for number, (code, shown) in enumerate(blocks):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pd.option_context("display.width", 100):
            exec(compile(code, f"mixed, block {number}", "exec"), names)
        printed = [line.rstrip() for line in out.getvalue().splitlines() if "Newton step" not in line]
        expected = [line for line in shown.splitlines() if "Newton step" not in line]
        assert printed == expected, out.getvalue()
