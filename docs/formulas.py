"""Formulas become MathML when pages are built: browsers typeset it by themselves, and nothing is fetched to
read a page. ``pymdownx.arithmatex`` finds the TeX between dollars and leaves code alone."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FOUND = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def typeset(page: str) -> str:
    """A page with its formulas typeset.

    >>> typeset(r'<span class="arithmatex">\\(z_i\\)</span>')
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">...<mi>z</mi><mi>i</mi>...</math>'
    """
    return _FOUND.sub(_mathml, page)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    return convert(html.unescape(found[3]).strip(), display=display)


def on_page_content(html: str, **_: Any) -> str:
    return typeset(html)
