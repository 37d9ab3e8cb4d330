"""A model that a settings file names as ``module:name``: itself, or a function that makes it."""

from __future__ import annotations

import inspect
from pathlib import Path

from fedpop.entries import called, entry_named
from fedpop.errors import SettingsError
from fedpop.federation.inputs import Example
from fedpop.models.base import Model


def model_named(entry: str, example: Example, folder: str | Path | None = None, seed: int = 0) -> Model:
    """The model; a function with an argument is given the number of inputs, or the shape of an example that
    is not a row. Modules in ``folder`` come first. The seed decides first weights that torch draws."""
    found = entry_named(entry, folder)
    if inspect.isfunction(found):
        shape = example.shapes[0]
        found = called(entry, found, shape[0] if len(shape) == 1 else shape, seed)
    if not isinstance(found, Model):
        raise SettingsError(
            f"{entry!r} is not a model, nor a function that makes one, but {type(found).__name__}: give a "
            "fedpop.Composition, Split or CustomModel"
        )
    return found
