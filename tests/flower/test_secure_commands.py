"""Federations whose sums are secure, as commands make them: who is told what, and who has to confirm it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.secure_site import offered, trusted
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from fedpop.privacy.secure import fingerprint
from tests.flower.commands import SETTINGS, fedpop, refused, rows
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import transport_on

pytest.importorskip("Crypto")
NAMES = ("east", "north", "south", "west")


class Secured:
    """A server's folder and those of so many sites, none of which has confirmed anything."""

    def __init__(self, root: Path, names: tuple[str, ...] = NAMES, private: str = "secure = true") -> None:
        self.root, self.server, self.names = root, root / "server", names
        sys.modules.pop("model", None)  # each folder has its own
        fedpop("server", "init", self.server, "--address", "127.0.0.1:9", "--sites", len(names))
        text = SETTINGS.format(rounds=3, address="127.0.0.1:9").replace("sites = 2", f"sites = {len(names)}")
        self.settings = self.server / "app" / "federation.toml"
        self.settings.write_text(f"{text}[privacy]\n{private}\n")
        for k, name in enumerate(names):
            self.enrol(name, k)

    def enrol(self, name: str, k: int) -> None:
        (self.root / f"{name}.csv").write_text(rows(k))
        words = ["--name", name, "--server", "127.0.0.1:9", "--data", self.root / f"{name}.csv"]
        fedpop("site", "enrol", self.root / name, *words, "--ca", self.server / "tls" / "ca.crt")
        fedpop("server", "admit", self.server, name, self.root / name / "node.pub")

    def run(self, rounds: float = 1e9) -> fp.Population:
        """Over the Grid in this process, for so many seconds of its time."""
        grid = LocalGrid(app, {name: self.root / name for name in self.names})
        sleep = grid.sleep

        def slept(seconds: float) -> None:
            sleep(seconds)
            if grid.now > rounds:
                raise TimeoutError

        grid.sleep = slept  # type: ignore[method-assign]
        folder = ServerFolder(self.server)
        return run_deployment(deployment(folder), transport_on(grid), folder.run)

    def confirm(self) -> str:
        for name in self.names:
            mark = fingerprint(offered(self.root / name) or {})
            fedpop("site", "trust", self.root / name, "--fingerprint", mark)
        return mark


def test_a_site_takes_part_once_somebody_has_confirmed_the_list_and_again_when_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Secured(tmp_path)
    assert "site join" in refused(capsys, "site", "trust", tmp_path / "east")
    with pytest.raises(TimeoutError):  # everyone is waited for
        made.run(rounds=100.0)
    assert "another one" in refused(capsys, "site", "trust", tmp_path / "east", "--fingerprint", "1dca 1055")
    assert trusted(tmp_path / "east") is None
    mark = made.confirm()
    capsys.readouterr()
    fedpop("server", "check", made.server)
    assert mark in capsys.readouterr().out
    assert made.run().rounds == 3
    made.names = (*NAMES, "zurich")
    made.enrol("zurich", 4)
    made.settings.write_text(made.settings.read_text().replace("rounds = 3", "rounds = 4"))
    with pytest.raises(TimeoutError):
        made.run(rounds=100.0)
    capsys.readouterr()
    fedpop("site", "trust", tmp_path / "east")
    told = capsys.readouterr().out
    assert "zurich (changed)" in told
    assert "not confirmed" in told


def test_what_init_and_check_say_by_the_number_of_sites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count, said in {2: "# secure = true", 3: "# secure = true", 4: "\nsecure = true"}.items():
        fedpop("server", "init", tmp_path / str(count), "--sites", count)
        words = capsys.readouterr().out
        assert said in (tmp_path / str(count) / "app" / "federation.toml").read_text()
        assert ("stops the run until it is back" in words) == (count == 3)
        assert ("site trust" in words) == (count == 4)
    three = Secured(tmp_path / "three", NAMES[:3])
    fedpop("server", "check", three.server)
    assert "a lost one stops the run until it is back" in capsys.readouterr().out
    four = Secured(tmp_path / "four")
    sys.modules.pop("model", None)
    fedpop("server", "check", four.server)
    assert "3 of 4 sites must be heard" in capsys.readouterr().out


def test_with_two_sites_and_with_a_quorum_that_opens_nothing_it_is_refused(tmp_path: Path) -> None:
    two = Secured(tmp_path / "two", NAMES[:2])
    with pytest.raises(SettingsError, match="need 3 sites or more, and 2 are admitted"):
        deployment(ServerFolder(two.server))
    four = Secured(tmp_path / "four")
    text = four.settings.read_text()
    four.settings.write_text(text.replace("[server]", "quorum = 0.5\n[server]"))
    with pytest.raises(SettingsError, match=r"of 4 sites 3 must be heard, so quorum is 0\.75 or more"):
        deployment(ServerFolder(four.server))
    four.settings.write_text(text.replace("[server]", "quorum = 0.75\n[server]"))
    deployment(ServerFolder(four.server))
