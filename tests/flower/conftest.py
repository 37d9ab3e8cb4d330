"""What holds for federations: their models are in files of one name, and the real processes go first."""

import sys
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The federation of real processes mostly waits: it must not be what the others wait for at the end."""
    items.sort(key=lambda item: item.path.name != "test_processes.py")


@pytest.fixture(autouse=True)
def one_federation_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every folder has a ``model.py`` of its own, as every server has a process of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("model", None)
