"""A site's folder: who it is, where its data are, its secret, and what it stores."""

from __future__ import annotations

import hmac
import secrets
import string
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpop.checked import Count, NotNegative, Whole, require
from fedpop.errors import SettingsError
from fedpop.federation.table_format import MINIMUM, TableFormat
from fedpop.files import parse_bytes, write_bytes
from fedpop.flower.certificates import check_name

SETTINGS = "site.toml"
SECRET = "secret"
COMMON_KEY, KEY_LETTERS = "common.key", 64
"""What sites of a federation may have in common, and the server has not: 256 bits in hexadecimal."""
FINGERPRINT_LETTERS = 16
"""Of a key's fingerprint, which people compare."""
KNOWN = (
    *("name", "data", "server", "threads", "memory", "insecure", "port", "spectral_rows", "modules"),
    *("questions", "formulas", "columns", "minimum", "single_rows", "metrics"),
    *("separator", "decimal", "encoding", "unit", "minimum_sites", "colluding"),
)


@dataclass(frozen=True)
class SiteSettings:
    """``site.toml``: what a site is called, where its data are, and which server it belongs to."""

    folder: Path
    name: str
    data: str
    """A CSV or Parquet file, a folder of images, or ``module:function``."""
    server: str = ""
    """host:port of the SuperLink."""
    threads: int = 1
    memory: str = "1GiB"
    insecure: bool = False
    port: int = 0
    """Of this machine, for the node's processes; 0 takes a free one."""
    spectral_rows: int = 10
    """With fewer rows the site refuses the spectral start, whose message would reveal single rows."""
    modules: Sequence[str] = ()
    """Modules that are imported before anything is answered, those beside this file first: they may define
    methods, priors, kernels, compressors or questions, which are known by their names."""
    questions: Sequence[str] | None = None
    """Names of those that are answered, before, between and after the rounds; all by default."""
    formulas: Sequence[str] | None = None
    """Formulas that are answered; all by default."""
    columns: Sequence[str] | None = None
    """Columns that formulas may name; all by default."""
    minimum: int = MINIMUM
    """A formula whose design sets fewer rows than these apart from the rest is not answered."""
    single_rows: bool = False
    """A grouping factor with mostly single rows is allowed."""
    metrics: int = 0
    """A port of this machine on which Prometheus finds numbers; 0 for none."""
    separator: str = ","
    """Between the values of a line, where the data are a CSV file."""
    decimal: str = "."
    """In its numbers."""
    encoding: str = "utf-8-sig"
    """Of its text."""
    unit: Mapping[str, str] = field(default_factory=dict)
    """In which units its columns are, where the federation wants to know."""
    minimum_sites: int = 3
    """Of secure sums: one over fewer sites is not opened."""
    colluding: float = 1 / 3
    """The share of the sites that may collude with the server."""

    def __post_init__(self) -> None:
        where = self.folder / SETTINGS
        for word in ("name", "data", "server", "memory", "separator", "decimal", "encoding"):
            if not isinstance(getattr(self, word), str):
                raise SettingsError(f"{where}: {word} is a text, not {getattr(self, word)!r}")
        check_name(self.name)
        require(Count, threads=self.threads, spectral_rows=self.spectral_rows)
        require(Whole, port=self.port, metrics=self.metrics)
        require(Sequence[str], modules=self.modules)
        lists = {"questions": self.questions, "formulas": self.formulas, "columns": self.columns}
        require(Sequence[str] | None, **lists)
        require(Count, minimum=self.minimum)
        require(bool, single_rows=self.single_rows)
        parse_bytes(self.memory)
        if self.port >= 2**16:
            raise SettingsError(f"{where}: port is below 65536, not {self.port}")
        require(Mapping[str, str], unit=self.unit)
        require(Count, minimum_sites=self.minimum_sites)
        require(NotNegative, colluding=self.colluding)
        _ = self.table
        if not self.data:
            raise SettingsError(f"{where}: data is missing: where the site's data are")

    @property
    def table(self) -> TableFormat:
        """How the site's table is written."""
        return TableFormat(self.separator, self.decimal, self.encoding, self.unit)

    @property
    def where(self) -> str:
        """The data's place, beside the settings file unless it is somewhere else altogether."""
        return self.data if ":" in self.data else str(self.folder / self.data)


def read_site(folder: Path) -> SiteSettings:
    """The settings of a site's folder."""
    path = folder / SETTINGS
    plain = read_toml(path, "is this a site's folder? fedpop site enrol makes one")
    unknown = [key for key in plain if key not in KNOWN]
    if unknown:
        raise SettingsError(f"{path}: unknown setting {unknown[0]!r}; known are {', '.join(KNOWN)}")
    try:
        return SiteSettings(folder, **plain)
    except TypeError as error:
        raise SettingsError(f"{path}: name and data must be there ({error})") from error


def read_toml(path: Path, hint: str = "") -> dict[str, Any]:
    """A settings file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        more = f"; {hint}" if hint else ""
        raise SettingsError(f"cannot read {path}: {error.strerror or error}{more}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not readable TOML: {error}") from error


def make_secret(folder: Path) -> int:
    """The site's secret, made once: 64 bits that key its random numbers and never leave it."""
    path = folder / SECRET
    if not path.exists():
        write_bytes(path, f"{secrets.randbits(64)}\n".encode(), 0o600)
    return read_secret(folder)


def read_secret(folder: Path) -> int:
    path = folder / SECRET
    try:
        return int(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the site's secret {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SettingsError(f"{path} does not hold a site's secret; enrol the site again") from error


def read_common_key(folder: Path) -> bytes:
    """The key that this site has in common with others; nothing where it has none."""
    path = folder / COMMON_KEY
    return key_in(path) if path.exists() else b""


def key_in(path: Path) -> bytes:
    """The key of a file."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the common key {path}: {error}") from error
    if len(text) != KEY_LETTERS or any(letter not in string.hexdigits for letter in text):
        raise SettingsError(f"{path} holds no common key: {KEY_LETTERS} hexadecimal digits")
    return bytes.fromhex(text)


def common_key(folder: Path, make: bool, take: Path | None, say: Callable[[str], None]) -> None:
    """Make a common key, or take one that another site made, or say which one there is; never the key."""
    read_site(folder)
    path = folder / COMMON_KEY
    if make and take is not None:
        raise SettingsError("a key is made, or taken from a file: leave --make or --take out")
    if make or take is not None:
        if path.exists():
            raise SettingsError(f"{path} is there already; remove it, where the sites agree on another key")
        key = secrets.token_bytes(KEY_LETTERS // 2) if take is None else key_in(take)
        write_bytes(path, f"{key.hex()}\n".encode(), 0o600)
    if not path.exists():
        say("this site has no common key: --make draws one, --take FILE takes the one that another site drew")
        return
    mark = hmac.digest(read_common_key(folder), b"fingerprint", "sha256").hex()[:FINGERPRINT_LETTERS]
    say(f"{path} has the common key whose fingerprint is {mark}")
    if make:
        say("  give a copy of this file to the other sites, in a way in which the server has no part; each")
        say("  one runs fedpop site key SITE --take FILE, and all have the same fingerprint")
