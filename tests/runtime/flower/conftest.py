"""The federation of real processes goes first: it mostly waits, and must not be what the others wait for."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_processes.py")
