"""A site's folder: who it is, where its data are, its secret, and what it stores."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpop.checked import Count, Whole, require
from fedpop.errors import SettingsError
from fedpop.federation.table_format import MINIMUM, TableFormat
from fedpop.files import parse_bytes, write_bytes
from fedpop.flower.certificates import check_name

SETTINGS = "site.toml"
SECRET = "secret"
KNOWN = (
    *("name", "data", "server", "threads", "memory", "insecure", "port", "spectral_rows", "modules"),
    *("questions", "formulas", "columns", "minimum", "single_rows", "metrics"),
    *("separator", "decimal", "encoding", "unit"),
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
