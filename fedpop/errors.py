"""Errors for people: what was wrong, where, and what to do about it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class FedpopError(Exception):
    """Base class of every error that fedpop raises on purpose."""


class DataError(FedpopError, ValueError):
    """Client data cannot be used: names the client and the row."""


class SchemaError(DataError):
    """Data at a site do not have the form that the federation agreed on. Its words hold names of columns and
    levels that everyone knows, and numbers of lines, never values: the server may see them."""


class ScaleError(DataError):
    """A column at a site is out of all proportion to what most sites have. Its words are for the site alone:
    they say what its values are like."""


class ModelError(FedpopError, ValueError):
    """A model, head or likelihood does not fit together."""


class SettingsError(FedpopError, ValueError):
    """A setting is impossible, or two settings contradict each other."""


class CheckpointError(FedpopError):
    """A checkpoint or a saved population cannot be used."""


class OtherSettingsError(CheckpointError):
    """A checkpoint is whole, but of a run with other settings."""


class PayloadError(FedpopError, ValueError):
    """A vector cannot be encoded, or an encoded one cannot be read."""


class SecureSumError(FedpopError):
    """A site refuses its part in a secure sum, or the sum cannot be opened; says why."""


class PrivacyError(FedpopError, ValueError):
    """Something cannot be had under differential privacy, or the budget does not cover it."""


class TrainingError(FedpopError):
    """Training broke down: no message was usable, or theta is not finite; names the round and the client."""


class EstimateError(FedpopError):
    """A quantity cannot be estimated reliably from what is available."""


class ExtraError(FedpopError, ImportError):
    """Something needs an optional package: says which, and how it is installed."""


class FedpopWarning(UserWarning):
    """A result that should be read with care."""


class ConvergenceWarning(FedpopWarning):
    """A run is known to have ended too soon, or where it could not go on."""


def warn_user(words: str, kind: type[FedpopWarning] = FedpopWarning) -> None:
    """Warn, at the line outside of fedpop that led here."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and _ours(str(frame.f_globals.get("__name__"))):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(words, kind, stacklevel=depth)


def _ours(module: str) -> bool:
    # What functools caches is called by it, and is ours all the same.
    return module in ("fedpop", "functools") or module.startswith("fedpop.")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings of ours in one line, as commands tell errors: the place in the code is not the user's."""
    before = warnings.formatwarning

    def one_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, FedpopWarning):
            return f"fedpop: warning: {message}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = before
