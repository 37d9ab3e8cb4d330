"""What can be known before anybody is asked: at the server its settings, at a site whether its data fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedpop.entries import entry_named
from fedpop.errors import DataError, FedpopError, SettingsError
from fedpop.federation.cells import bad_cells, columns_of, numeric_columns
from fedpop.federation.inputs import Example
from fedpop.federation.reading import read_columns, read_table, require_some, table_notes, width
from fedpop.files import read_sealed, read_tensors
from fedpop.flower.deployment import Deployment
from fedpop.flower.formulas import FormulaDeployment, compared
from fedpop.flower.rehearsal import Rehearsed, Watched, Written, rehearsed
from fedpop.flower.remote import RoundTerms
from fedpop.flower.secure_sums import SecureTerms
from fedpop.flower.server_folder import FEDERATION, ServerFolder
from fedpop.flower.server_settings import SECURE, deployment, deployment_of
from fedpop.flower.site import DESCRIPTION, MODEL, Site, answered_designs, open_site, study_from
from fedpop.flower.site_folder import read_toml
from fedpop.flower.site_records import SiteRecord, roster_of_sites
from fedpop.flower.table_form import columns_there, form_changes
from fedpop.message.declared import NUMBERS, VECTORS
from fedpop.mixed.groups import Groups
from fedpop.mixed.groups import agreed as agreed_on
from fedpop.mixed.model import fitted_over
from fedpop.models.base import Model
from fedpop.privacy.secure import Policy, fingerprint
from fedpop.questions.forms import agreed, scales_of
from fedpop.run.journal import Journal, JournaledMembers
from fedpop.run.members import LocalMembers
from fedpop.site.study import SiteData, Survey, Training

Say = Callable[[str], None]
Asked = tuple[str, ...]
"""What is asked after the last round."""
FEWEST = Policy().minimum_sites
"""Sites that secure sums are over, at least."""
UNKNOWN_LEVELS = 2
"""Levels that a column of names is taken to have until sites say."""
LISTED_VECTORS = 12
"""Vectors of a message up to which each is listed."""


# --- the server ----------------------------------------------------------------------------------


def provisional_example(schema: Mapping[str, Any]) -> tuple[Example, bool] | None:
    """What an example will look like by the settings, and whether that is sure; None: sites will say."""
    if "x" in schema:
        given = schema.get("levels", {})
        open_ones = [c for c in schema.get("categories", ()) if c not in given]
        some = dict(given) | {c: [""] * UNKNOWN_LEVELS for c in open_ones}
        return Example(None, ((width(dict(schema) | {"levels": some}),),), (torch.float32,)), not open_ones
    if "size" in schema:
        return Example(None, (tuple(schema["size"]),), (torch.float32,)), True
    return None


def check_deployment(deployment: Deployment | FormulaDeployment, folder: Path, sites: list[str]) -> list[str]:
    """Make everything that is made of the settings, as far as it can be before sites answer; what it is, in
    words. Raises where a setting is wrong."""
    if isinstance(deployment, FormulaDeployment):
        about = deployment.study
        named = dict.fromkeys([*about.columns, *about.formula.group_columns])
        what = f"formula {about.formula.text}, {about.family.name}, by {deployment.fit.method}"
        return [what, f"columns that sites need: {', '.join(named)}"]
    if sites:
        deployment.settings.participation.check(roster_of_sites({n: SiteRecord(units=1) for n in sites}))
    found = provisional_example(deployment.schema)
    example = Example(None, ((1,),), (torch.float32,)) if found is None else found[0]
    sure = found is not None and found[1]
    if not sure and isinstance(entry_named(deployment.entry, folder), Model):
        method = deployment.method(example)  # how many inputs it has will be seen when sites answer
    elif found is None:
        return ["the method and the model are made when sites have said what their examples look like"]
    else:
        method = deployment.prepared(example)
    if sites:
        method.check(sites)
    study = deployment.training(method, example, deployment.schema)
    model = method.model
    words = [f"model {deployment.entry}: {type(model).__name__}, {model.initial_z().numel()} numbers in z"]
    if sure:
        study.description()
        words[0] += f", {model.initial_phi().numel()} in phi, for examples of shape {list(example.shapes[0])}"
    else:
        words[0] += "; whether it takes the examples is seen when sites have said what these look like"
    engine = "" if study.method is method else f", which runs as {type(study.method).__name__}"
    return [f"method {type(method).__name__}{engine}", *words]


def check_formula(about: Mapping[str, str | int], name: str) -> None:
    """Raise where a formula, its family or its method cannot be used."""
    FormulaDeployment.of("check", about, 0, RoundTerms(), name)


def check_folder(folder: ServerFolder) -> None:
    """Raise where what a folder's settings say cannot be run."""
    check_deployment(deployment(folder), folder.app, folder.names)


def server_check(root: Path, say: Say) -> None:
    """Method, model, settings and schema, before anybody is asked."""
    folder = ServerFolder(root.absolute())
    admitted = folder.names
    asked = folder.settings.get("privacy", {}).get("secure", False) is not False
    if asked and len(admitted) < FEWEST:
        about = dict(folder.settings) | {"privacy": without_secure(folder.settings["privacy"])}
        run = deployment_of(folder.app / FEDERATION, about, "check")
    else:
        run = deployment(folder)
    words = check_deployment(run, folder.app, admitted)
    settings, terms = run.settings, run.terms
    say(f"{folder.settings.get('name', 'federation')}: the settings can be used")
    schema = _about_columns(run.study.form) if isinstance(run, FormulaDeployment) else run.schema
    for line in (*_schema_words(schema), *words):
        say(f"  {line}")
    if isinstance(run, FormulaDeployment):
        say(f"  questions to {terms.sites} site(s) at least, all of whom must answer")
    else:
        rounds = "rounds until it has converged" if settings.rounds is None else f"{settings.rounds} rounds"
        quorum = "all replies" if terms.waits else f"{terms.quorum:.0%} of the replies"
        least = f"each of {terms.sites} site(s) at least"
        say(f"  {rounds}, {least}, closed by {quorum}, or by {terms.timeout:g} s")
    say(f"  admitted: {', '.join(admitted) or 'nobody yet'}")
    if run.secure is not None:
        for line in secure_words(run.secure):
            say(f"  {line}")
    elif asked:
        say(f"  sums are secure once {FEWEST} sites or more are admitted; over fewer they are refused")
    if len(admitted) < terms.first:
        say(f"  the run begins with {terms.first} site(s), and {len(admitted)} are admitted")


def secure_words(terms: SecureTerms) -> list[str]:
    """What secure sums are between."""
    sites = len(terms.admitted)
    least = terms.threshold(sites)
    words = [
        f"sums are secure: nobody sees one site's; {least} of {sites} sites must be heard",
        f"the list's fingerprint, for fedpop site trust: {fingerprint(terms.admitted)}",
    ]
    if least == sites:
        words.append(
            f"warning: with {sites} sites a lost one stops the run until it is back; four can lose one"
        )
    return words


def without_secure(privacy: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in privacy.items() if name not in SECURE}


def _about_columns(form: Mapping[str, Any]) -> dict[str, Any]:
    """What settings say of a formula's columns, as of a table's."""
    named = [column for setting in ("range", "unit") for column in form.get(setting, ())]
    return dict(form) | {"x": list(dict.fromkeys(named))}


def _schema_words(schema: Mapping[str, Any]) -> list[str]:
    """A line for each column."""
    out = []
    for column in columns_of(schema):
        if column in numeric_columns(schema):
            unit, limits = schema.get("unit", {}).get(column), schema.get("range", {}).get(column)
            more = "" if unit is None else f" in {unit}"
            more += "" if limits is None else f" from {limits[0]:g} to {limits[1]:g}"
            out.append(f"column {column}: numbers{more}")
        else:
            names = (
                schema.get("classes") if column == schema.get("y") else schema.get("levels", {}).get(column)
            )
            what = "names that sites agree on" if names is None else ", ".join(names)
            role = next((r for r in ("group", "split") if schema.get(r) == column), None)
            out.append(f"column {column}: {role or what}")
    return out


# --- a site --------------------------------------------------------------------------------------


def site_check(root: Path, federation: Path | None, say: Say) -> None:
    """Whether a site's data fit the federation, and what would be sent. Nothing is sent, nothing written."""
    site = open_site(root.absolute())
    place = site.data
    say(f"site {site.name}: its data are {place.where}")
    for words in form_changes(site.folder, place.where, place.table):
        say(f"  {words}")
    require_some(place.where, site.name, site.folder, site.table)
    afterwards: Asked = ()
    if federation is not None and isinstance(about := _deployment_in(federation), FormulaDeployment):
        _check_formula(about, site, say)
        return
    if federation is None:
        found = _last_study(site.folder)
        if found is None:
            say(
                "  there are data; whether they fit is known once the server has greeted this site, or with "
                f"the federation's {FEDERATION} and model: fedpop site check {root} --federation PATH"
            )
            return
        (study, name), rounds = found, "as many rounds as the server asks for"
    else:
        study, rounds, afterwards = _study_from_settings(federation, place, say)
        name = federation.name
    fits = _fitting(study, place, say)
    say(f"  the data fit {name}: {fits.train.sizes.sum()} rows of {len(fits)} unit(s)")
    if not isinstance(study, Training):
        return
    level = logging.getLogger("fedpop").level
    try:
        logging.getLogger("fedpop").setLevel(logging.ERROR)
        written = rehearsed(study, fits, site.name)
    except FedpopError as error:
        say(f"  what would be sent could not be rehearsed with this site alone: {error}")
        return
    finally:
        logging.getLogger("fedpop").setLevel(level)
    _say_written(written, fits.train.sizes.sum().item(), site.spectral_rows, rounds, afterwards, say)


def _last_study(folder: Path) -> tuple[Survey | Training, str] | None:
    """What the server said of its federation the last time that it greeted this site."""
    files = sorted((folder / "experiments").glob(f"*/{DESCRIPTION}"), key=lambda f: f.stat().st_mtime)
    if not files:
        return None
    stored = read_sealed(files[-1], "a study's description")
    study = study_from(stored["study"], read_tensors(files[-1].with_name(MODEL), stored["digest"]))
    if not isinstance(study, Survey | Training):
        raise SettingsError(f"{files[-1].parent.name} is about a formula: its fit is not rehearsed")
    return study, files[-1].parent.name


def _deployment_in(path: Path) -> Deployment | FormulaDeployment:
    """What a copy of the federation's settings says."""
    file = path / FEDERATION if path.is_dir() else path
    return deployment_of(file.absolute(), read_toml(file, "the server's operator has it"), "check")


def _check_formula(deployment: FormulaDeployment, site: Site, say: Say) -> None:
    """Whether this site's rows fit a formula, whether it would answer, and with what: the search over its own
    groups alone, in this process."""
    study, place = deployment.study, site.data
    site.allowed.require_study(study)
    rows = study.read(place)
    written, members = Written(), LocalMembers(study, rows)
    groups = Groups(members, study)
    agreed_on(groups, deployment.fit.levels, deployment.fit.min_count, deployment.fit.contrasts)
    site.small_counts.check(groups.study, rows, answered_designs(site.folder))
    say(f"  the data fit {study.formula.text}: {len(rows)} rows of {members.units} group(s)")
    journal = Journal()
    try:
        asked = JournaledMembers(study, journal, LocalMembers(study, rows))
        fitted_over(asked, compared(asked, study)[0], deployment.fit)
    except FedpopError as error:
        say(f"  what would be sent could not be rehearsed to the end with this site alone: {error}")
    for entry in journal.entries.values():
        written.add(written.before, Rehearsed.of(entry.question, entry.total))
    say(f"  asked, of {len(rows)} row(s); the search over all sites may take another number of steps:")
    for sending in written.before:
        say(f"    {_words(sending)}")


def _study_from_settings(path: Path, place: SiteData, say: Say) -> tuple[Survey | Training, str, Asked]:
    """The study that the federation's settings make of this site's data alone."""
    deployment = _deployment_in(path)
    assert isinstance(deployment, Deployment)
    rounds = deployment.settings.rounds
    words = "rounds until it has converged" if rounds is None else f"{rounds} rounds"
    survey, after = Survey(deployment.schema), tuple(deployment.afterwards)
    if "x" not in deployment.schema:
        example = survey.read(place).example
        return deployment.training(deployment.prepared(example), example, deployment.schema), words, after
    data = _fitting(survey, place, say, read=True)
    written = Written()
    members = Watched(survey, data, place.site, [], written)
    members.asks(scales_of(deployment.schema), {})
    form, example = agreed(deployment.schema, members.asks)
    say("  asked first, about columns:")
    for sending in written.before:
        say(f"    {_words(sending)}")
    return deployment.training(deployment.prepared(example), example, form), words, after


def _fitting(study: Survey | Training, place: SiteData, say: Say, read: bool = False) -> Any:
    """The site's data as the study reads them; what does not fit is told with its values first."""
    form = study.form
    try:
        data = study.read(place)
        if "x" in form:
            for note in table_notes(read_table(Path(place.where), form, place.site, place.table), form):
                say(f"  {note}")
        return data if read else study.unit_data(data).federation
    except DataError:
        if "x" in form and ":" not in place.where:
            _say_columns(columns_there(place.where, place.table), columns_of(form), say)
            columns = read_columns(Path(place.where), columns_of(form), place.site, place.table)
            bad = bad_cells(columns, form)
            for cells in bad:
                say(f"  {cells.words(columns, values=True)}")
        raise


def _say_columns(there: Sequence[str], wanted: Sequence[str], say: Say) -> None:
    """What the table has, where that is not all that is wanted: for the site alone."""
    if there and not set(wanted) <= set(there):
        say(f"  its columns are {', '.join(map(repr, there))}; wanted are {', '.join(map(repr, wanted))}")


def _say_written(written: Written, rows: int, least: int, rounds: str, afterwards: Asked, say: Say) -> None:
    """Everything that would leave the site, each kind once."""
    say(
        f"  asked before the rounds, of {rows} row(s):"
        if written.before
        else "  nothing is asked before rounds"
    )
    for sending in written.before:
        few = sending.shows_rows is not None and rows < least and sending.shows_rows < least
        say(f"    {_words(sending)}{f' (refused with fewer than {least} rows)' if few else ''}")
    for sending in written.rounds:
        often = "each" if len(written.rounds) == 1 else "some"
        say(f"  in {often} of {rounds}, of {rows} row(s): {_words(replace(sending, what='', times=1))}")
        for name, length in sending.vectors.items():
            say(f"    {name}, {length}: {VECTORS[name].what if name in VECTORS else 'the method says what'}")
        beside = [name for name in sending.beside if name in NUMBERS]
        say(f"    beside them {len(beside)} numbers: {', '.join(beside)}")
    if afterwards:
        say(f"  after the last round, sums for: {', '.join(afterwards)}")
    say("  a message that the server's clip or compression changes has no more numbers than these")


def _words(sending: Rehearsed) -> str:
    """How many numbers, by name."""
    total, names = sum(sending.vectors.values()), list(sending.vectors.items())
    each = ", ".join(f"{name} {length}" for name, length in names[:LISTED_VECTORS])
    more = f" and {len(names) - LISTED_VECTORS} more vectors" if len(names) > LISTED_VECTORS else ""
    often = f"{sending.times} times " if sending.times > 1 else ""
    head = f"{sending.what}: " if sending.what else ""
    return f"{head}{often}{total} number(s)" + (f" ({each}{more})" if names else "")
