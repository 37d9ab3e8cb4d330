"""Prose is wrapped, so that a change of a sentence is a change of a line or two."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTH = 100
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "experiments.md"
)
BLOCK = re.compile(r"^( *)(```|\$\$).*?^\1\2$", re.DOTALL | re.MULTILINE)
UNBROKEN = re.compile(r"`[^`]+`|\$[^$]+\$")


def too_long(text: str) -> list[str]:
    """Lines that are too long and could be broken: no tables, headings, pictures, code, formulas, links."""
    lines = BLOCK.sub("", text).splitlines()
    prose = [line for line in lines if len(line) > WIDTH and not re.match(r" *([|#<]|!\[)", line)]
    # A formula, or a link, that is long by itself has a line of its own.
    words = {line: UNBROKEN.sub("x", re.sub(r"^ *(- |\d+\. )?", "", line)).split() for line in prose}
    return [line for line in prose if len(words[line]) > 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_only_prose_is_asked_for() -> None:
    long = "word " * 21
    assert too_long(long) == [long]
    assert too_long(f"- {long}") == [f"- {long}"]
    others = (f"| {long}|", f"## {long}", f"![{long}](x.svg)", f"```\n{long}\n```", f"$$\n{long}\n$$")
    assert not any(too_long(text) for text in (*others, f"  ${long}$", "https://" + "x" * 120))
