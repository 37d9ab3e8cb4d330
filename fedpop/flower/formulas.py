"""A formula across sites: its fit, from the first greeting of sites to each site's own copy.

Everyone is asked what the local ``mixed_model`` asks, by the same code, and every answer is in a journal
before anything is made of it: a server that was killed goes on where it stood.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedpop.errors import CheckpointError, SettingsError
from fedpop.federation.participation import Everyone
from fedpop.files import writable_folder, write_bytes, write_json
from fedpop.flower.outcome import FEDERATION
from fedpop.flower.remote import RemoteMembers, RoundTerms
from fedpop.flower.server_folder import FIT, OUTCOME, PRINTED
from fedpop.flower.site import SiteExperiment, read_theta
from fedpop.flower.transport import Transport
from fedpop.message import Tensors
from fedpop.mixed.fit import MixedFit
from fedpop.mixed.model import FitSettings, fitted_over
from fedpop.mixed.saved import ANSWERS, completed, described, parts_of, write_fit
from fedpop.mixed.study import FormulaStudy
from fedpop.mixed.table import labels, pandas
from fedpop.run.journal import Journal, JournaledMembers
from fedpop.run.members import LocalMembers
from fedpop.run.settings import Settings

log = logging.getLogger("fedpop.server")

WORDS = ("formula", "family", "method", "weights", "levels", "contrasts", "min_count", "missing", "na")
"""What ``[model]`` has where a federation is about a formula, as ``mixed_model`` has these words."""
SUMMARY = "fit.json"
"""In the run's folder: the fit for ``fedpop.load``, its numbers as ``fedpop fit --json`` writes them, and
what ``print`` shows."""
DESCRIBED = "described"
"""A fit's plain values among the tensors that a site receives."""


@dataclass(frozen=True)
class FormulaDeployment:
    """A formula that is fitted across sites, and how."""

    experiment: str
    study: FormulaStudy
    fit: FitSettings
    settings: Settings
    terms: RoundTerms = field(default_factory=RoundTerms)
    name: str = ""

    def __post_init__(self) -> None:
        if self.fit.engine_for(self.study) != "exact":
            raise SettingsError("across sites a formula is fitted by the exact engine")
        if not self.terms.waits:
            raise SettingsError(
                "a formula's likelihood is everyone's sum: [sites] quorum is 1.0, and a site that is away is "
                "waited for"
            )

    @classmethod
    def of(
        cls, experiment: str, model: Mapping[str, Any], seed: int, terms: RoundTerms, name: str
    ) -> FormulaDeployment:
        """From the words of ``[model]``."""
        given = dict(model)
        for word in ("formula", "family", "method", "weights", "missing"):
            if word in given and not isinstance(given[word], str):
                raise SettingsError(f"[model]: {word} is a text, not {given[word]!r}")
        about: dict[str, Any] = {n: given[n] for n in ("family", "weights", "missing") if n in given}
        if "na" in given:
            about["na"] = tuple(given["na"])
        study = FormulaStudy.from_text(given["formula"], **about)
        how = {n: given[n] for n in ("method", "levels", "contrasts", "min_count") if n in given}
        fit = FitSettings(**how)
        settings = Settings(rounds=None, seed=seed, participation=Everyone())
        return cls(
            experiment, study, replace(fit, chains=replace(fit.chains, seed=seed)), settings, terms, name
        )

    def run(self, transport: Transport, folder: Path) -> int:
        """Fit it, or go on; at the end every site has its copy. Gives the number of questions."""
        return run_formula(self, transport, folder).rounds


def run_formula(deployment: FormulaDeployment, transport: Transport, folder: Path) -> MixedFit:
    """The fit of a formula over sites, or the rest of it."""
    name = deployment.name or deployment.experiment
    to = writable_folder(folder / FIT)
    write_json(folder / FEDERATION, {"name": name, "formula": deployment.study.formula.text})
    journal = Journal.open(to / ANSWERS)
    if journal.entries:
        log.info("%d answers are there already; the search goes on", len(journal.entries))
    sites = RemoteMembers(
        deployment.study, transport, deployment.experiment, deployment.terms, deployment.settings
    )
    members = JournaledMembers(deployment.study, journal, sites)
    fit = fitted_over(members, deployment.study, deployment.fit)
    without = completed(fit)
    for words in without:
        log.warning("not found: %s", words)
    fit = replace(fit, points=fit.theta_points if not any("law" in w for w in without) else None)
    write_fit(fit, to)
    write_json(folder / SUMMARY, fit.plain())
    write_bytes(folder / PRINTED, f"{fit}\n".encode())
    write_json(folder / OUTCOME, {"estimates": _rows(fit), "warnings": [*_warnings(fit), *without]})
    about, tensors = described(fit)
    text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    there = members.members
    assert isinstance(there, RemoteMembers)
    have = there.finish(tensors | {DESCRIBED: text}, fit.rounds, [("formula", fit.formula)])
    log.info("the fit is at %s", ", ".join(have) or "no site")
    return fit


def _rows(fit: MixedFit) -> list[dict[str, Any]]:
    """Estimates under their names, for reports."""
    rows = [
        {"name": name, "of": "all sites", "estimate": value, "error": fit.standard_errors[name]}
        for name, value in fit.coefficients.items()
    ]
    rows += [
        {"name": f"sd {row.term.removeprefix('sd ')}", "of": str(row.group), "estimate": float(row.estimate)}
        for row in fit.to_frame().itertuples()
        if row.effect == "random"
    ]
    return rows


def _warnings(fit: MixedFit) -> list[str]:
    words = [] if fit.converged else [fit.convergence]
    if fit.singular:
        words.append("a variance of the random effects is zero, or a correlation is one")
    return words


# --- at a site, offline --------------------------------------------------------------------------


def is_about_formula(experiment: SiteExperiment) -> bool:
    """Whether what a site was last given is a fit of a formula."""
    return isinstance(experiment.study, FormulaStudy)


def fit_at(experiment: SiteExperiment) -> MixedFit:
    """The federation's fit over this site's rows: its own groups' posteriors, and everybody's theta."""
    tensors: Tensors = read_theta(experiment.folder)
    if DESCRIBED not in tensors:
        raise CheckpointError(f"{experiment.folder} has no fit of a formula")
    about = json.loads(bytes(tensors[DESCRIBED].tolist()))
    place = experiment.site.data
    parts = parts_of(about, tensors, lambda study: LocalMembers(study, study.read(place)))
    return MixedFit(**parts)


def predicted_rows(fit: MixedFit, frame: Any, level: float) -> Any:
    """Predictions for rows of known groups, of new ones, and of no group (the population's), in the order of
    the rows, each with what it is."""
    pd, group, known = pandas(), fit.group, set(fit.levels)
    frame = frame.reset_index(drop=True)
    named = labels(frame[group]) if group in frame.columns else [None] * len(frame)
    if group in frame.columns:
        there = frame[group].notna().tolist()
        named = [name if ok else None for name, ok in zip(named, there, strict=True)]
    kinds = ["population" if n is None else "known" if n in known else "new" for n in named]
    parts = []
    for kind in dict.fromkeys(kinds):
        at = [k == kind for k in kinds]
        found = fit.predict(frame[at], kind, level=level)
        found.insert(0, "group", [n for n, here in zip(named, at, strict=True) if here])
        found.insert(1, "kind", kind)
        parts.append(found)
    return pd.concat(parts).loc[frame.index]


# --- several formulas ----------------------------------------------------------------------------


def compare_fits(root: Path, say: Callable[[str], None]) -> None:
    """A line for each fit of a federation's folder, and tests between those that are nested."""
    runs = [root / "run", *sorted((root / "fits").glob("*"))]
    fits = [MixedFit.load(run / FIT) for run in runs if (run / PRINTED).exists()]
    if not fits:
        raise SettingsError(f"{root} has no fit of a formula yet")
    say(f"{'log-likelihood':>14} {'df':>3} {'AIC':>10} {'BIC':>10}  formula")
    for fit in fits:
        how = f"{fit.formula}  ({fit.family.name}, {fit.method})"
        say(f"{fit.log_likelihood:14.4f} {fit.df:3d} {fit.aic:10.3f} {fit.bic:10.3f}  {how}")
    for i, small in enumerate(fits):
        for large in [*fits[:i], *fits[i + 1 :]]:
            if large.df > small.df:
                try:
                    say(f"{small.formula} in {large.formula}: {large.likelihood_ratio(small)}")
                except SettingsError as error:
                    say(f"{small.formula} and {large.formula} are not compared: {error}")
