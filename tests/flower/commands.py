"""A server and its sites as the commands make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedpop as fp
from fedpop.cli import main
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.processes import free_port
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import transport_on

SETTINGS = """name = "clinics"
[data]
x = ["age", "sex"]
y = "dose"
categories = ["sex"]
minimum = 2
[method]
name = "FedSOUL"
[run]
rounds = {rounds}
[sites]
sites = 2
[server]
address = "{address}"
"""


def fedpop(*arguments: object) -> None:
    main([str(a) for a in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command says that ends with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        fedpop(*arguments)
    assert caught.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("fedpop: ")
    assert "Traceback" not in output
    return output


def rows(offset: float) -> str:
    table = [(30 + i, "fm"[i % 2], 0.1 * i + offset + (i % 2)) for i in range(12)]
    return "age,sex,dose\n" + "".join(f"{a},{s},{d:.3f}\n" for a, s, d in table)


class Made:
    """A federation of two sites, enrolled by command."""

    def __init__(self, root: Path, rounds: int = 3) -> None:
        self.root, self.server, self.address = root, root / "server", f"127.0.0.1:{free_port()}"
        fedpop("server", "init", self.server, "--name", "clinics", "--address", self.address)
        text = SETTINGS.format(rounds=rounds, address=self.address)
        (self.server / "app" / "federation.toml").write_text(text)
        for k, name in enumerate(("north", "south")):
            (root / f"{name}.csv").write_text(rows(k))
            self.enrol(name)
            fedpop("server", "admit", self.server, name, root / name / "node.pub")

    def enrol(self, name: str, **more: Any) -> None:
        given = {"name": name, "server": self.address, "data": self.root / f"{name}.csv"}
        given |= {"ca": self.server / "tls" / "ca.crt"} | more
        words = [part for key, value in given.items() for part in (f"--{key}", value)]
        fedpop("site", "enrol", self.root / name, *words)

    def run_deployment(self) -> fp.Population:
        """The run itself, over the Grid in this process."""
        folder = ServerFolder(self.server)
        grid = LocalGrid(app, {name: self.root / name for name in ("north", "south")})
        return run_deployment(deployment(folder), transport_on(grid), folder.run)
