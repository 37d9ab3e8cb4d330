"""The README's example runs as printed, and prints what the README says (apart from seconds)."""

import contextlib
import io
import re
from pathlib import Path

from fedpop.methods import METHODS

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_shows():
    text = README.read_text()
    code, shown = re.search(
        r"<!-- example -->\n```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL
    ).groups()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    # Seconds differ, and the last digits may, from one processor to another.
    assert shape(out.getvalue()) == shape(shown)


def shape(text):
    text = re.sub(r"[0-9.]+ s\b", "S", text)
    return re.sub(r"-?\d+\.\d+", lambda m: f"{round(float(m[0]), 1):.0f}", text).split()


def test_every_method_is_named():
    text = " ".join(README.read_text().replace("-", "").lower().split())
    other = {
        "localonly": "local training",
        "fedavgft": "finetuning too",
        "maximummarginallikelihood": "maximum marginal likelihood",
    }
    assert [n for n in METHODS if other.get(n.lower(), n.lower()) not in text] == []
