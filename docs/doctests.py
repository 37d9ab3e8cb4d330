"""Doctests in docstrings become code blocks: to Markdown, ``>>>`` is a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?:>>> .*\n?(?:(?!\s*\n).+\n?)*)+", re.MULTILINE)


def fenced(text: str) -> str:
    """Examples inside fences.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return _EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text).rstrip("\n")


class Doctests(griffe.Extension):
    """Applies ``fenced`` to every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """A method's model may be given by position, which dataclasses say field by field."""
        for module in pkg["methods"].modules.values():
            for cls in module.classes.values():
                init = cls.members.get("__init__")
                if isinstance(init, griffe.Function) and "model" in init.parameters:
                    init.parameters["model"].kind = griffe.ParameterKind.positional_or_keyword
