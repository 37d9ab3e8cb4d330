"""Rows of a comparison: a method by name with settings, as a file has them, or a method as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedpop.errors import SettingsError
from fedpop.methods import known_methods
from fedpop.methods.base import Algorithm
from fedpop.methods.tables import known_method, method_from
from fedpop.models.base import Model

RESERVED = ("name", "label", "search")


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: a registered method with settings, or a method as it is."""

    label: str
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    given: Algorithm | None = None
    where: str = ""

    def build(self, model: Model | None = None) -> Algorithm:
        """The method on this model."""
        if self.given is not None:
            return self.given
        assert model is not None
        return method_from(self.name, self.settings, model, self.where)


def entry_from(table: Mapping[str, Any], where: str) -> Entry:
    """A ``[[method]]`` table.

    >>> entry_from({"name": "FedAvg", "local": {"epochs": 2}}, "compare.toml").settings
    {'local': {'epochs': 2}}
    """
    name = table.get("name") if isinstance(table, Mapping) else None
    if name is None:
        raise SettingsError(f"{where}: a [[method]] without a name; known are {', '.join(known_methods())}")
    known_method(name, where)
    label = table.get("label", name)
    search = table.get("search", {})
    if not isinstance(label, str) or not isinstance(search, Mapping):
        raise SettingsError(f"{where}: method {name}: label is a text and search a table")
    settings = {k: v for k, v in table.items() if k not in RESERVED}
    return Entry(label, name, settings, search, where=f"{where}: method {label}")


def in_line(settings: Mapping[str, Any]) -> str:
    """Settings in a line.

    >>> in_line({"local": {"rate": 0.01, "epochs": 5}, "adaptive": True})
    'local (rate 0.01, epochs 5), adaptive True'
    """
    parts = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            parts.append(f"{name} ({in_line(value)})")
        else:
            parts.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)
