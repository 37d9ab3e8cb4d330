"""The page on mixed models runs from top to bottom and prints what it shows."""

import contextlib
import io
from pathlib import Path

import pandas as pd
import pytest

from tests.mixed.conftest import need
from tests.test_tutorial import BLOCK

PAGE = Path(__file__).parents[2] / "docs" / "mixed.md"


def test_the_page_prints_what_it_shows(monkeypatch):
    monkeypatch.setenv("FEDPOP_DATA", str(need("sleepstudy.csv").parents[1]))
    need("radon.csv")
    names: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 5
    for number, (code, shown) in enumerate(blocks):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pd.option_context("display.width", 100):
            exec(compile(code, f"mixed, block {number}", "exec"), names)
        told = [line.rstrip() for line in out.getvalue().splitlines() if "Newton step" not in line]
        expected = [line for line in shown.splitlines() if "Newton step" not in line]
        assert told == expected, out.getvalue()


def test_small_counties_gain_by_pooling(tmp_path):
    """The figure's numbers: narrower than without pooling, nearer to 90 % than either extreme."""
    from examples.radon.pooling import main

    found = main(need("radon.csv").parent, tmp_path)
    assert (tmp_path / "pooling.svg").stat().st_size > 5000
    off = {how: abs(row["coverage"] - 0.9) for how, row in found.items()}
    assert off["partial pooling"] < min(off["no pooling"], off["complete pooling"])
    width = "width in small counties"
    assert found["partial pooling"][width] < 0.7 * found["no pooling"][width]
    assert found["partial pooling"]["error"] == min(row["error"] for row in found.values())


@pytest.mark.parametrize("name", ["theophylline/fit.py", "radon/pooling.py"])
def test_examples_are_there(name):
    assert (PAGE.parents[1] / "examples" / name).exists()
