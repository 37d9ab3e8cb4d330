"""User data as a task: read once, or returned by a function; examples are set aside, and some clients as new
ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from fedpop.checked import Checked, Factor
from fedpop.entries import called, entry_named
from fedpop.errors import DataError, SettingsError
from fedpop.federation.clients import Client, Federation
from fedpop.federation.held_out import hold_out, set_apart
from fedpop.models.base import Model


class OwnData(ABC):
    """What tasks on user data share; each is a dataclass of settings with these two among them."""

    test: Factor
    """The share of each client's examples that it is judged on, where it has no test set."""
    validation: Factor
    """The share that settings are chosen by."""

    @abstractmethod
    def federation(self, seed: int) -> Federation:
        """All clients, with sets of their own or without."""

    @abstractmethod
    def contents(self) -> dict[str, Any]:
        """Plain values that change when the data do, and not when they move."""

    def model(self, seed: int, clients: Federation) -> Model:
        """What is learned on these clients, with a start that the seed decides."""
        raise SettingsError("these data come without a model: name one, [model] with an entry")

    def split(self, seed: int, new: int = 0) -> tuple[Federation, list[Client]]:
        """Clients with their sets, and ``new`` of them that take no part."""
        return self.apart(self.federation(seed), seed, new)

    def apart(self, clients: Federation, seed: int, new: int) -> tuple[Federation, list[Client]]:
        if set(clients.splits) == {"train"} and self.test + self.validation:
            clients = hold_out(clients, test=self.test, validation=self.validation, seed=seed)
        return set_apart(clients, new, seed)


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
