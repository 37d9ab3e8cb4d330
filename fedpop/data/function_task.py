"""Clients that a user's function returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedpop.checked import Checked, Factor
from fedpop.data.own import OwnData
from fedpop.entries import called, entry_named
from fedpop.errors import DataError
from fedpop.federation.clients import Federation


@dataclass(frozen=True)
class FunctionTask(Checked, OwnData):
    """What ``module:function`` returns, as clients; the model comes from ``[model]`` in the same file.

    Args:
        entry: The function; one with an argument is given the seed.
        path: The folder in which its module is searched for first (default: that of the settings file).
        test: The share of each client's examples that it is judged on, where clients come without test sets
            (default: 0.2).
        validation: The share that settings are chosen by, likewise (default: 0.2).

    >>> FunctionTask("mydata:clients").test
    0.2
    """

    entry: str
    path: str = "."
    test: Factor = 0.2
    validation: Factor = 0.2

    def federation(self, seed: int) -> Federation:
        return Federation.of(called(self.entry, entry_named(self.entry, self.path), seed, seed))

    def contents(self) -> dict[str, Any]:
        first, again = (self.federation(0).fingerprint() for _ in range(2))
        if first != again:
            raise DataError(
                f"{self.entry} returns other data each time it is called, and methods would be compared on "
                "different ones: draw them by the seed that it may take as its argument"
            )
        return {"data": first}
