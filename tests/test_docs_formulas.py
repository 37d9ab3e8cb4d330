"""Every formula of the pages is one that the build can typeset."""

import re
from pathlib import Path

import pytest

from tests.test_gallery import loaded

pytest.importorskip("latex2mathml", reason="the extra docs is not installed")
DOCS = Path(__file__).parents[1] / "docs"
FORMULAS = loaded("formulas")


def html(tex: str, display: bool = False) -> str:
    left, right, tag = (r"\[", r"\]", "div") if display else (r"\(", r"\)", "span")
    return f'<{tag} class="arithmatex">{left}{tex}{right}</{tag}>'


def test_formulas_become_mathml_and_nothing_else_changes():
    made = FORMULAS.typeset(f"<p>so {html('z_i')} and \\(x\\)</p>")
    assert made.startswith('<p>so <math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">')
    assert made.endswith("</math> and \\(x\\)</p>")
    assert "<msub><mi>z</mi><mi>i</mi></msub>" in made


def test_lines_are_aligned_and_functions_have_room():
    made = FORMULAS.typeset(html(r"\begin{aligned} a &= \log p \\ b &= 2 \end{aligned}", display=True))
    assert made.count("<mtr>") == 2
    assert "<mi>log</mi><mspace" in made


def test_what_cannot_be_typeset_is_an_error_with_the_formula():
    with pytest.raises(ValueError, match="nosuch"):
        FORMULAS.typeset(html(r"\nosuch x"))


def test_all_formulas_of_the_pages():
    count = 0
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"`[^`]*`", "", text)
        found = re.findall(r"\$\$(.*?)\$\$|\$([^$\s][^$]*)\$", text, re.DOTALL)
        for block, inline in found:
            FORMULAS.typeset(html(block or inline, bool(block)))
        count += len(found)
    assert count > 100
