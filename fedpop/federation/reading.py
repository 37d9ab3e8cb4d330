"""A site's data as a site has them: a table, a folder of images, or a function that returns them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fedpop.errors import DataError
from fedpop.federation.clients import Client, Federation


def read_data(where: str, schema: Mapping[str, Any], site: str) -> Federation:
    """The data of a site, whose units are its groups (or the site itself, where it has none)."""
    return from_function(where, site)


def from_function(entry: str, site: str) -> Federation:
    """What ``module:function`` returns: (x, y) or a ``Client`` for one unit, a mapping of them for groups.

    A function with an argument is given the site's name.
    """
    module, _, name = entry.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"site {site!r}: cannot find the data's function {entry!r} ({error})") from error
    found = function(site) if inspect.signature(function).parameters else function()
    if isinstance(found, Mapping):
        return Federation.of({f"{site}/{group}": own for group, own in found.items()})
    if not isinstance(found, Client | tuple | list):
        raise DataError(
            f"site {site!r}: {entry} returned {type(found).__name__}; it must return (x, y), a fedpop.Client "
            "or a mapping from groups to them"
        )
    return Federation.of({site: found})
