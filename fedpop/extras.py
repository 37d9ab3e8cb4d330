"""Optional packages, imported when they are needed; where one is missing the error says how to get it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fedpop.errors import ExtraError


def require_report() -> None:
    """Raise before hours of work whose report could not be written."""
    _require(("matplotlib", "jinja2"), "report", "reports")


def require_flower() -> None:
    """Raise where a command of a server or a site cannot run."""
    _require(("flwr", "cryptography"), "flower", "servers and sites")


def _require(packages: Sequence[str], extra: str, what: str) -> None:
    """Nothing is imported."""
    for package in packages:
        if find_spec(package) is None:
            raise _missing(package, extra, what)


def _missing(package: str, extra: str, what: str) -> ExtraError:
    return ExtraError(f"{what} need {package}: pip install 'fedpop[{extra}]'")


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
        raise _missing(module.split(".")[0], extra, what) from error
