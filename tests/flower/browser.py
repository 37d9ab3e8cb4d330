"""What this machine's pages answer; and headless Chromium: what a page shows once its script has run."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")


def browsed(address: str, folder: Path, *arguments: str, size: tuple[int, int] = (1100, 1200)) -> str:
    """The document as it stands after two seconds of the page's time, or what was asked for instead."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    flags += [
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-proxy-server",
    ]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={size[0]},{size[1]}"]
    done = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=2500", *(arguments or ["--dump-dom"]), address],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def get(address: str, path: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    where = address.removeprefix("http://")
    link = http.client.HTTPConnection(where, timeout=10)
    link.request("GET", path, headers={"Host": host or where})
    answer = link.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())
