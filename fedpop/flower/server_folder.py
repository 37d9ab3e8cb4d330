"""A federation's folder: where its server stores everything. Commands that only look need no torch."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpop.errors import SettingsError
from fedpop.files import read_json, read_sealed, writable_folder, write_sealed
from fedpop.flower.certificates import split_address
from fedpop.flower.metrics import port_of
from fedpop.flower.site_folder import read_toml
from fedpop.version import __version__

LAYOUT = 1
"""How a federation's folder is laid out. Each version goes on with folders of this layout and of those before
it; what is in the checkpoint has a format of its own."""
FEDERATION, FORMULA_FILE = "federation.toml", "formula.toml"
OUTCOME, AFTERWARDS = "outcome.json", "afterwards.json"
"""What came of a run, and what sites were asked when it was over."""
SCALES = "scales.json"
"""How columns differ between sites, and who stopped because of its data."""
FIT, PRINTED = "fit", "fit.txt"
"""A formula's fit, and how it is printed."""
TABLES = ("name", "data", "model", "method", "run", "privacy", "sites", "server")
ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Who listens everywhere is found here."""


@dataclass(frozen=True)
class ServerFolder:
    """Where a federation's server stores everything."""

    root: Path
    fit: str = ""
    """A further formula on the same sites, which has a folder of its own; empty: what the settings say."""

    @property
    def app(self) -> Path:
        return self.root / "app"

    @property
    def tls(self) -> Path:
        return self.root / "tls"

    @property
    def admitted(self) -> Path:
        """Public keys of sites, NAME.pub."""
        return self.root / "sites"

    @property
    def names(self) -> list[str]:
        """Sites that are admitted."""
        return sorted(key.stem for key in self.admitted.glob("*.pub"))

    @property
    def run(self) -> Path:
        return self.fits / self.fit if self.fit else self.root / "run"

    @property
    def fits(self) -> Path:
        """Runs of further formulas."""
        return self.root / "fits"

    @property
    def flower(self) -> Path:
        """Flower's home, so that no other one is touched."""
        return self.root / "flower"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings file, checked as far as it can be without any data."""
        path = self.app / FEDERATION
        plain = read_toml(path, "is this a federation's folder? fedpop server init makes one")
        known_only(plain, TABLES, str(path))
        for key in TABLES[1:]:
            if not isinstance(plain.get(key, {}), dict):
                raise SettingsError(f"{path}: {key} is a table, [{key}], not {plain[key]!r}")
        self._require_layout()
        return plain

    def _require_layout(self) -> None:
        """Raise unless this version can go on with the folder, whichever made it."""
        found = read_json(self.root / "version.json") if self._versioned else {}
        version = found.get("version") if isinstance(found, dict) else None
        layout = found.get("layout", 1) if isinstance(found, dict) else None
        if not isinstance(version, str) or not isinstance(layout, int):
            raise SettingsError(
                f"{self.root} was made by fedpop (unknown): version.json does not say which; put it back "
                "from a copy"
            )
        if layout > LAYOUT:
            raise SettingsError(
                f"{self.root} was made by fedpop {version} in layout {layout}, {__version__} knows those to "
                f"{LAYOUT}: install fedpop {version} or newer on this server"
            )

    @property
    def _versioned(self) -> bool:
        return (self.root / "version.json").exists()

    @property
    def address(self) -> str:
        """Under which sites reach the server."""
        return str(self.settings.get("server", {}).get("address", "127.0.0.1:8000"))

    @property
    def listen(self) -> str:
        """Where the server listens: the same, unless it stands behind another machine's address."""
        return str(self.settings.get("server", {}).get("listen", self.address))

    @property
    def metrics(self) -> int:
        """The port of this machine on which Prometheus finds numbers; 0 for none."""
        return port_of(
            self.settings.get("server", {}).get("metrics", 0), f"{self.app / 'federation.toml'}, [server]"
        )

    @property
    def nearby(self) -> str:
        """Under which this machine's processes reach it."""
        host, port = split_address(self.listen)
        return f"{ANYWHERE.get(host, host)}:{port}"

    @property
    def insecure(self) -> bool:
        return not (self.tls / "server.crt").exists()

    def experiment(self) -> str:
        """The name under which sites keep their chains; drawn once for each run folder."""
        file = writable_folder(self.run) / "experiment.json"
        if not file.exists():
            name = f"{str(self.settings.get('name', 'federation')).lower()}-{secrets.token_hex(4)}"
            write_sealed(file, {"experiment": name})
        return str(read_sealed(file, "an experiment's name")["experiment"])


def known_only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> dict[str, Any]:
    """A table of settings without any that is not known."""
    for key in table:
        if key not in known:
            raise SettingsError(f"{where}: unknown setting {key!r}; known are {', '.join(known)}")
    return dict(table)
