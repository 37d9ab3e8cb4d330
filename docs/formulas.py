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


_BARE = re.compile(r"(<mi>(?:log|exp)</mi>)(?!<mo[^>]*>(?:&#x00028;|\())")
"""A function whose argument has no parentheses: there is a little space between them."""


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    tex = html.unescape(found[3]).strip()
    made = convert(tex.replace("{aligned}", "{align*}"), display=display)
    if unknown := re.search(r"<m[io]>(\\\w+|&)</m[io]>", made):
        raise ValueError(f"{unknown[1]} is unknown to latex2mathml, in {tex}")
    made = _BARE.sub(r'\1<mspace width="0.17em"/>', made)
    return f'<div class="formula">{made}</div>' if display == "block" else made


def on_page_content(html: str, **_: Any) -> str:
    return typeset(html)
