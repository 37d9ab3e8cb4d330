"""Optional packages, imported when they are needed; where one is missing the error says how to get it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fedpop.errors import ExtraError


def require_report() -> None:
    """Raise before hours of work whose report could not be written; nothing is imported."""
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ExtraError(f"reports need {package}: pip install 'fedpop[report]'")


def library(module: str, extra: str, what: str) -> Any:
    """A module of an optional package, which comes with this extra of fedpop.

    >>> library("json", "report", "reports").dumps([1])
    '[1]'
    >>> library("no_such_library", "report", "reports")
    Traceback (most recent call last):
    fedpop.errors.ExtraError: reports need no_such_library: pip install 'fedpop[report]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ExtraError(f"{what} need {package}: pip install 'fedpop[{extra}]'") from error
