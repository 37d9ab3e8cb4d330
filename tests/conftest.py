"""What holds for every test."""

import os
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fedpop import precision


@pytest.fixture(autouse=True)
def float32_whatever_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test but those of the probe itself starts it, or looks into the user's cache folder."""
    monkeypatch.setattr(precision, "probed", lambda: precision.ProbeVerdict(False, "not asked in tests"))


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tests need not outlast the machine: a crash is that of a process, and disks are slow."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def nothing_of_the_users(one_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded images go to a cache of the tests' own, and nothing is fetched from outside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(one_cache))
    monkeypatch.delenv("FEDPOP_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    whole = urllib.request.urlopen

    def inside(request: urllib.request.Request, **more: Any) -> Any:
        if urlsplit(request.full_url).hostname != "127.0.0.1":
            raise OSError("tests fetch nothing from outside")
        return whole(request, **more)

    monkeypatch.setattr(urllib.request, "urlopen", inside)
