"""User data as a task: read once, examples set aside, some clients set aside as new ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from fedpop.checked import Factor
from fedpop.errors import SettingsError
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
