"""What a federation's settings file, ``app/federation.toml``, says is to be run.

name                          what the experiment is called
[data]                        what sites' data look like: ``questions.forms`` has the words
[model]  entry                ``module:name`` of a model, or of a function that makes one
         formula, family, ... in its place: a mixed model, as ``fedpop.mixed_model`` has these words
[method] name, settings       as in the files of ``fedpop compare``
[run]    rounds, seed, participation, precision, early_stop, afterwards, mlflow, tensorboard
[privacy] epsilon, delta, noise, clip, quantile, against
         secure, minimum_sites, colluding
[sites]  sites, begin, quorum, grace, timeout, unheard, weights
[server] address, listen, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedpop.errors import FedpopError, PrivacyError, SecureSumError, SettingsError
from fedpop.federation.inputs import Example
from fedpop.federation.participation import resolve
from fedpop.flower.admission import list_of_sites
from fedpop.flower.certificates import check_name
from fedpop.flower.deployment import Deployment
from fedpop.flower.final_questions import USUAL, check_asked
from fedpop.flower.formulas import WORDS, FormulaDeployment
from fedpop.flower.remote import RoundTerms
from fedpop.flower.secure_sums import SecureTerms
from fedpop.flower.server_folder import FEDERATION, FORMULA_FILE, TABLES, ServerFolder, known_only
from fedpop.flower.site_folder import read_toml
from fedpop.flower.trackers import TRACKERS, trackers_of
from fedpop.message.fixed_point import FixedPoint
from fedpop.methods.base import Algorithm, usual_participation
from fedpop.methods.tables import known_method, method_from
from fedpop.mixed.study import FormulaStudy
from fedpop.models.spec import model_named
from fedpop.privacy.gaussian import gaussian_from
from fedpop.privacy.secure import Policy
from fedpop.questions.forms import check_form, schema_of
from fedpop.run.callbacks import Callback, EarlyStop
from fedpop.run.settings import Settings
from fedpop.run.simulate import fixed_point

SERVER = ("address", "listen", "metrics")
POLICY = ("minimum_sites", "colluding")
SECURE = ("secure", *POLICY)
RUN = ("rounds", "seed", "participation", "precision", "early_stop", "afterwards", *TRACKERS)


def deployment(folder: ServerFolder) -> Deployment | FormulaDeployment:
    """What is to be run in a federation's folder."""
    _ = folder.metrics
    path, plain = folder.app / FEDERATION, folder.settings
    if folder.fit:
        path = folder.run / FORMULA_FILE
        about = read_toml(path, "fedpop server fit makes it")
        kept = {n: plain[n] for n in ("name", "privacy", "sites", "server") if n in plain}
        data = _about_columns(plain.get("data", {}), str(about.get("formula")))
        seed = {"seed": plain.get("run", {}).get("seed", 0)}
        plain = kept | {"data": data, "model": about, "run": seed}
    found = deployment_of(path, plain, folder.experiment(), folder.run)
    if isinstance(found, FormulaDeployment) and found.terms.begin is None:
        found = replace(found, whom=sorted(key.stem for key in folder.admitted.glob("*.pub")))
    secure = secure_terms(folder)
    return found if secure is None else replace(found, secure=secure)


def secure_terms(folder: ServerFolder) -> SecureTerms | None:
    """Between whom sums are secure, where ``[privacy]`` says that they are."""
    where, about = f"{folder.app / FEDERATION}, [privacy]", folder.settings.get("privacy", {})
    given = about.get("secure", False)
    if not isinstance(given, bool | int) or given is False:
        if given is not False:
            raise SettingsError(f"{where}: secure is true or a number of bits, not {given!r}")
        return None
    if folder.insecure:
        raise SettingsError(f"{where}: secure sums need sites' keys: make the federation without --insecure")
    try:
        policy = Policy(**{n: about[n] for n in POLICY if n in about})
        return SecureTerms(list_of_sites(folder.admitted), fixed_point(given) or FixedPoint(), policy)
    except (SecureSumError, SettingsError) as error:
        raise SettingsError(f"{where}: {error}") from error


def deployment_of(
    path: Path, plain: Mapping[str, Any], experiment: str, folder: Path | None = None
) -> Deployment | FormulaDeployment:
    """What a settings file, whose values these are, says is to be run; trackers write to ``folder``."""
    known_only(plain, TABLES, str(path))
    check_name(str(plain.get("name", "federation")))
    data, model, method = (plain.get(name, {}) for name in ("data", "model", "method"))
    if "formula" in model:
        return _formula(path, plain, experiment)
    check_form(data)
    entry = str(known_only(model, ("entry",), f"{path}, [model]").get("entry", "model:model"))
    _check_entry(path, entry)
    known_only(plain.get("server", {}), SERVER, f"{path}, [server]")
    name = method.get("name", "FedSOUL")
    known_method(name, f"{path}, [method]")
    given = {k: v for k, v in method.items() if k != "name"}
    run = known_only(plain.get("run", {}), RUN, f"{path}, [run]")
    trackers = [] if folder is None else trackers_of(run, folder, f"{path}, [run]")
    make = _maker(path, entry, str(name), given, run.get("precision"))
    stop = run.pop("early_stop", None)
    early = Callback()
    if stop is not None:
        if not isinstance(stop, dict):
            raise SettingsError(f"{path}, [run]: early_stop is a table such as {{every = 10, patience = 5}}")
        early = EarlyStop(**known_only(stop, ("every", "patience"), f"{path}, early_stop"))
    private = gaussian_from(plain.get("privacy", {}), str(path), SECURE)
    if private is not None:
        check_private(data, run, stop is not None, path)
    words = tuple(f.name for f in fields(RoundTerms))
    terms = RoundTerms(**known_only(plain.get("sites", {}), words, f"{path}, [sites]"))
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


def check_private(data: Mapping[str, Any], run: Mapping[str, Any], early: bool, path: Path) -> None:
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
    model = known_only(plain["model"], WORDS, f"{path}, [model]")
    if gaussian_from(plain.get("privacy", {}), str(path), SECURE):
        raise PrivacyError(
            f"{path}: a formula across sites is fitted by the exact engine, whose sums have no bound under "
            "which they stay what they are: leave [privacy] out; fp.mixed_model(..., privacy=...) has a "
            "sampled engine where all rows are on one machine"
        )
    if plain.get("method"):
        raise SettingsError(f"{path}: where [model] has a formula there is no [method]")
    known_only(plain.get("server", {}), SERVER, f"{path}, [server]")
    run = known_only(plain.get("run", {}), ("seed",), f"{path}, [run]")
    words = tuple(f.name for f in fields(RoundTerms))
    terms = RoundTerms(**known_only(plain.get("sites", {}), words, f"{path}, [sites]"))
    name = str(plain.get("name", "federation"))
    return FormulaDeployment.of(experiment, model, run.get("seed", 0), terms, name, plain.get("data", {}))


def _about_columns(data: Mapping[str, Any], formula: str) -> dict[str, Any]:
    """Of ``[data]`` what is about columns of a further formula."""
    columns = FormulaStudy.from_text(formula).columns
    named = {n: {c: v for c, v in data[n].items() if c in columns} for n in ("range", "unit") if n in data}
    return named | {n: data[n] for n in ("scale_tolerance",) if n in data}


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
