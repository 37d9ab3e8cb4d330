"""A federation's folder and its settings file, ``app/federation.toml``.

name                          what the experiment is called
[data]                        what sites' data look like: ``questions.forms`` has the words
[model]  entry                ``module:name`` of a model, or of a function that makes one
         formula, family, ... in its place: a mixed model, as ``fedpop.mixed_model`` has these words
[method] name, settings       as in the files of ``fedpop compare``
[run]    rounds, seed, participation, precision, early_stop, afterwards, mlflow, tensorboard
[privacy] epsilon, delta, noise, clip, quantile, against
[sites]  sites, begin, quorum, grace, timeout, unheard, weights
[server] address, listen, metrics
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedpop.errors import FedpopError, PrivacyError, SettingsError
from fedpop.federation.inputs import Example
from fedpop.federation.participation import resolve
from fedpop.files import read_json, read_sealed, writable_folder, write_sealed
from fedpop.flower.certificates import check_name, split_address
from fedpop.flower.deployment import Deployment
from fedpop.flower.final_questions import USUAL, check_asked
from fedpop.flower.formulas import WORDS, FormulaDeployment
from fedpop.flower.metrics import port_of
from fedpop.flower.remote import RoundTerms
from fedpop.flower.site_folder import read_toml
from fedpop.flower.trackers import TRACKERS, trackers_of
from fedpop.methods.base import Algorithm, usual_participation
from fedpop.methods.tables import known_method, method_from
from fedpop.models.entry import model_named
from fedpop.privacy.gaussian import Gaussian, gaussian_from
from fedpop.questions.forms import check_form, schema_of
from fedpop.run.callbacks import Callback, EarlyStop
from fedpop.run.settings import Settings
from fedpop.version import __version__

LAYOUT = 1
"""How a federation's folder is laid out. Each version goes on with folders of this layout and of those before
it; what is in the checkpoint has a format of its own."""
FEDERATION, FORMULA_FILE = "federation.toml", "formula.toml"
TABLES = ("name", "data", "model", "method", "run", "privacy", "sites", "server")
ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Who listens everywhere is found here."""
SERVER = ("address", "listen", "metrics")
RUN = ("rounds", "seed", "participation", "precision", "early_stop", "afterwards", *TRACKERS)


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
        _only(plain, TABLES, str(path))
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

    def deployment(self) -> Deployment | FormulaDeployment:
        """What the settings file says is to be run."""
        _ = self.metrics
        path, plain = self.app / FEDERATION, self.settings
        if self.fit:
            path = self.run / FORMULA_FILE
            about = read_toml(path, "fedpop server fit makes it")
            kept = {n: plain[n] for n in ("name", "sites", "server") if n in plain}
            plain = kept | {"model": about, "run": {"seed": plain.get("run", {}).get("seed", 0)}}
        return deployment_of(path, plain, self.experiment(), self.run)


def deployment_of(
    path: Path, plain: Mapping[str, Any], experiment: str, folder: Path | None = None
) -> Deployment | FormulaDeployment:
    """What a settings file, whose values these are, says is to be run; trackers write to ``folder``."""
    _only(plain, TABLES, str(path))
    check_name(str(plain.get("name", "federation")))
    data, model, method = (plain.get(name, {}) for name in ("data", "model", "method"))
    if "formula" in model:
        return _formula(path, plain, experiment)
    check_form(data)
    entry = str(_only(model, ("entry",), f"{path}, [model]").get("entry", "model:model"))
    _check_entry(path, entry)
    _only(plain.get("server", {}), SERVER, f"{path}, [server]")
    name = method.get("name", "FedSOUL")
    known_method(name, f"{path}, [method]")
    given = {k: v for k, v in method.items() if k != "name"}
    run = _only(plain.get("run", {}), RUN, f"{path}, [run]")
    trackers = [] if folder is None else trackers_of(run, folder, f"{path}, [run]")
    make = _maker(path, entry, str(name), given, run.get("precision"))
    stop = run.pop("early_stop", None)
    early = Callback()
    if stop is not None:
        if not isinstance(stop, dict):
            raise SettingsError(f"{path}, [run]: early_stop is a table such as {{every = 10, patience = 5}}")
        early = EarlyStop(**_only(stop, ("every", "patience"), f"{path}, early_stop"))
    private = gaussian_from(plain.get("privacy", {}), str(path))
    if private is not None:
        check_private(private, data, run, stop is not None, path)
    words = tuple(f.name for f in fields(RoundTerms))
    terms = RoundTerms(**_only(plain.get("sites", {}), words, f"{path}, [sites]"))
    part = run.get("participation")
    usual = usual_participation(known_method(name, str(path)))
    settings = Settings(
        rounds=run.get("rounds"),
        seed=run.get("seed", 0),
        participation=usual if part is None else resolve(part),
        checkpoint_every=1,  # sites keep the two sides of their last round, and can go back no further
        precision=run.get("precision", "auto"),
        privacy=private,
    )
    after = check_asked(run.get("afterwards", USUAL if private is None else ()))
    name = str(plain.get("name", "federation"))
    return Deployment(experiment, make, settings, terms, data, entry, [early, *trackers], after, name)


def check_private(
    private: Gaussian, data: Mapping[str, Any], run: Mapping[str, Any], early: bool, path: Path
) -> None:
    """Raise where something in the settings looks at data beside the noised sums."""
    looks = []
    if early:
        looks.append("early_stop in [run] asks for validation scores: leave it out")
    if run.get("afterwards"):
        looks.append(f"afterwards in [run] asks for {', '.join(run['afterwards'])}: leave it out")
    if run.get("rounds") is None:
        looks.append("without rounds in [run] it is asked whether theta has converged: give their number")
    schema = schema_of(data)
    if schema.numeric:
        looks.append(
            "columns of numbers are scaled by their means and deviations: standardise = false in [data]"
        )
    if schema.categorical:
        looks.append(f"levels of {', '.join(schema.categorical)} are found in the data: list them in [data]")
    if looks:
        raise PrivacyError(f"{path}: [privacy] covers none of this: {'; '.join(looks)}")


def _formula(path: Path, plain: Mapping[str, Any], experiment: str) -> FormulaDeployment:
    """A federation that is about a formula: sites' tables are as they are."""
    model = _only(plain["model"], WORDS, f"{path}, [model]")
    if plain.get("privacy"):
        raise PrivacyError(
            f"{path}: a formula across sites is fitted by the exact engine, whose sums have no bound under "
            "which they stay what they are: leave [privacy] out; fp.mixed_model(..., privacy=...) has a "
            "sampled engine where all rows are on one machine"
        )
    for table in ("data", "method"):
        if plain.get(table):
            raise SettingsError(f"{path}: where [model] has a formula there is no [{table}]")
    _only(plain.get("server", {}), SERVER, f"{path}, [server]")
    run = _only(plain.get("run", {}), ("seed",), f"{path}, [run]")
    words = tuple(f.name for f in fields(RoundTerms))
    terms = RoundTerms(**_only(plain.get("sites", {}), words, f"{path}, [sites]"))
    name = str(plain.get("name", "federation"))
    return FormulaDeployment.of(experiment, model, run.get("seed", 0), terms, name)


def _maker(
    path: Path, entry: str, name: str, settings: Mapping[str, Any], precision: str | None
) -> Callable[[Example], Algorithm]:
    """Makes the method once it is known what examples look like; its backbone runs in this precision, or in
    the model's."""

    def make(example: Example) -> Algorithm:
        try:
            model = model_named(entry, example, path.parent)
        except SettingsError as error:
            raise SettingsError(f"{path}: cannot make the model: {error}") from error
        if precision is not None:
            model = model.asking_for(precision)
        return method_from(name, settings, model, f"{path}: method {name}")

    return make


def _check_entry(path: Path, entry: str) -> None:
    """Raise where it can be seen, before any site is asked, that no model will come of it."""
    module, _, name = entry.partition(":")
    if not module or not name:
        raise SettingsError(f"{path}: entry is module:name, such as model:model, not {entry!r}")
    file = path.parent / f"{module}.py"
    try:
        if file.exists():
            compile(file.read_bytes(), str(file), "exec")
        elif find_spec(module.partition(".")[0]) is None:
            raise SettingsError(f"{path}: there is no module {module!r}: {file} is not there")
    except (SyntaxError, ValueError) as error:
        if isinstance(error, FedpopError):
            raise
        raise SettingsError(f"{file} is not Python: {error}") from error


def _only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> dict[str, Any]:
    for key in table:
        if key not in known:
            raise SettingsError(f"{where}: unknown setting {key!r}; known are {', '.join(known)}")
    return dict(table)
