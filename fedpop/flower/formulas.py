"""A formula across sites: its fit, from the first greeting of sites to each site's own copy.

Everyone is asked what the local ``mixed_model`` asks, by the same code, and every answer is in a journal
before anything is made of it: a server that was killed goes on where it stood.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpop.errors import CheckpointError, FedpopError, SettingsError
from fedpop.federation.participation import Everyone
from fedpop.federation.table_format import MINIMUM
from fedpop.files import json_lines, read_bytes, read_json, writable_folder, write_bytes, write_json
from fedpop.flower.outcome import FEDERATION
from fedpop.flower.remote import RemoteMembers, RoundTerms
from fedpop.flower.secure_sums import SecureTerms
from fedpop.flower.server_folder import FIT, OUTCOME, PRINTED, SCALES
from fedpop.flower.site import SiteExperiment, read_theta
from fedpop.flower.site_records import SiteRecord
from fedpop.flower.transport import Transport
from fedpop.message import Tensors, Total
from fedpop.mixed.fit import MixedFit
from fedpop.mixed.model import FitSettings, fitted_over
from fedpop.mixed.saved import ANSWERS, completed, described, parts_of, write_fit
from fedpop.mixed.study import SITE, FormulaStudy
from fedpop.mixed.table import labels, pandas
from fedpop.questions.forms import check_columns
from fedpop.questions.scales import ColumnScales, median_powers, plain_scales
from fedpop.run.journal import Journal, JournaledMembers
from fedpop.run.members import Asking, LocalMembers, Members
from fedpop.run.settings import Settings

log = logging.getLogger("fedpop.server")

R = TypeVar("R")

WORDS = (
    *("formula", "family", "method", "weights", "levels", "contrasts", "min_count", "missing", "na"),
    *("profile", "bootstrap"),
)
"""What ``[model]`` has where a federation is about a formula: words of ``mixed_model``, and what is asked
once there is a fit."""
SUMMARY = "fit.json"
"""In the run's folder: the fit for ``fedpop.load``, its numbers as ``fedpop fit --json`` writes them, and
what ``print`` shows."""
SITES, METRICS = "sites.json", "metrics.jsonl"
"""There, too: whose answers the fit is made of, and a line for each question."""
PROFILE, BOOTSTRAP = "profile.csv", "bootstrap.csv"
"""Where they were asked for: profile intervals, and estimates of replicates."""
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
    whom: Sequence[str] = ()
    """Sites that are waited for when it begins: those that are admitted, where ``begin`` says nothing."""
    profile: bool = False
    """Profile intervals are found, too."""
    bootstrap: int = 0
    """Parametric replicates, which sites draw from their own rows."""
    secure: SecureTerms | None = None
    """Sums are secure, between these sites."""

    def __post_init__(self) -> None:
        if self.profile and self.fit.method == "REML":
            raise SettingsError("profiles are those of the likelihood: profile intervals are for method ML")
        if self.bootstrap < 0 or self.bootstrap == 1:
            raise SettingsError(f"a bootstrap takes 2 replicates or more, not {self.bootstrap}")
        if (self.profile or self.bootstrap) and not self.terms.waits:
            raise SettingsError("profile and bootstrap need everyone in every round: [sites] quorum = 1.0")
        if self.fit.engine_for(self.study) != "exact":
            raise SettingsError("across sites a formula is fitted by the exact engine, or by scoring steps")
        if not self.terms.waits and self.fit.method == "REML":
            raise SettingsError("REML needs everyone in every round: [sites] quorum = 1.0")
        if not self.terms.waits and self.secure is not None:
            raise SettingsError("a formula's secure sums need everyone who began: [sites] quorum = 1.0")

    @classmethod
    def of(
        cls,
        experiment: str,
        model: Mapping[str, Any],
        seed: int,
        terms: RoundTerms,
        name: str,
        form: Mapping[str, Any] | None = None,
    ) -> FormulaDeployment:
        """From the words of ``[model]``, and of ``[data]`` about columns."""
        given = dict(model)
        profile, bootstrap = given.pop("profile", False), given.pop("bootstrap", 0)
        if not isinstance(profile, bool) or type(bootstrap) is not int:
            raise SettingsError("[model]: profile is true or false, bootstrap a number of replicates")
        for word in ("formula", "family", "method", "weights", "missing"):
            if word in given and not isinstance(given[word], str):
                raise SettingsError(f"[model]: {word} is a text, not {given[word]!r}")
        about: dict[str, Any] = {n: given[n] for n in ("family", "weights", "missing") if n in given}
        if "na" in given:
            about["na"] = tuple(given["na"])
        study = FormulaStudy.from_text(given["formula"], **about)
        study = replace(study, form=check_columns(form or {}, study.columns, "[data]: "))
        how = {n: given[n] for n in ("method", "levels", "contrasts", "min_count") if n in given}
        fit = FitSettings(**how)
        settings = Settings(rounds=None, seed=seed, participation=Everyone())
        return cls(
            experiment,
            study,
            replace(fit, chains=replace(fit.chains, seed=seed)),
            settings,
            terms,
            name,
            profile=profile,
            bootstrap=bootstrap,
        )

    def run(self, transport: Transport, folder: Path) -> int:
        """Fit it, or go on; at the end every site has its copy. Gives the number of questions."""
        return run_formula(self, transport, folder).rounds


def run_formula(deployment: FormulaDeployment, transport: Transport, folder: Path) -> MixedFit:
    """The fit of a formula over sites, or the rest of it."""
    name = deployment.name or deployment.experiment
    to = writable_folder(folder / FIT)
    write_json(folder / FEDERATION, {"name": name, "formula": deployment.study.formula.text})
    members = FederatedMembers(deployment, transport, folder)
    try:
        study, histograms = compared(members, deployment.study)
        some = {column: both for column, both in histograms.items() if bool(both.any())}
        write_json(folder / SCALES, {"columns": plain_scales(some), "stopped": {}})
        fit = fitted_over(members, study, deployment.fit)
    except FedpopError:
        members.forget()  # sites mend what was wrong, and are asked anew
        raise
    without = completed(fit)
    for words in without:
        log.warning("not found: %s", words)
    fit = replace(fit, points=fit.theta_points if not any("law" in w for w in without) else None)
    write_fit(fit, to)
    write_json(folder / SUMMARY, fit.plain())
    write_json(folder / OUTCOME, {"estimates": _rows(fit), "warnings": [*_warnings(fit), *without]})
    printed = "".join(f"\n{words}\n" for words in (fit, *_afterwards(deployment, fit, folder)))
    write_bytes(folder / PRINTED, printed.lstrip().encode())
    about, tensors = described(fit)
    text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    have = members.finish(tensors | {DESCRIBED: text}, fit.rounds, [("formula", fit.formula)])
    log.info("the fit is at %s", ", ".join(have) or "no site")
    return fit


def compared(members: Members, study: FormulaStudy) -> tuple[FormulaStudy, Mapping[str, Tensor]]:
    """The study under which a site stops itself where a column is out of all proportion to most sites', and
    how large columns are at sites."""
    histograms = members.asks(ColumnScales(tuple(dict.fromkeys(study.columns)), MINIMUM), {})
    medians = {column: median_powers(histogram) for column, histogram in histograms.items()}
    study = replace(study, form=dict(study.form) | {"medians": medians})
    members.update_study(study)
    return study, histograms


def _afterwards(deployment: FormulaDeployment, fit: MixedFit, folder: Path) -> Iterator[str]:
    """What was asked for beside the fit, in words; in files, too."""
    if deployment.profile:
        found = fit.confint(method="profile")
        write_bytes(folder / PROFILE, found.to_csv(index_label="parameter").encode())
        yield f"Profile intervals (95 %):\n{found.to_string()}"
    if deployment.bootstrap:
        drawn = fit.bootstrap(deployment.bootstrap, seed=deployment.settings.seed)
        write_bytes(folder / BOOTSTRAP, drawn.table.to_csv(index=False).encode())
        yield str(drawn)


class FederatedMembers(JournaledMembers):
    """Sites whose answers are in a journal; who they are is fixed with the first answer, and each answer is a
    line of ``metrics.jsonl``, as a round is."""

    def __init__(self, deployment: FormulaDeployment, transport: Transport, folder: Path) -> None:
        self._folder, journal = folder, Journal.open(folder / FIT / ANSWERS)
        self._lines = _whole_lines(folder / METRICS) if journal.entries else []
        self._started = time.monotonic() - (self._lines[-1]["seconds"] if self._lines else 0.0)
        known = read_json(folder / SITES)["sites"] if (folder / SITES).exists() else deployment.whom
        if journal.entries:
            log.info("%d answers are there already; the search goes on", len(journal.entries))
        write_bytes(folder / METRICS, "".join(f"{json.dumps(line)}\n" for line in self._lines).encode())
        self._sites = RemoteMembers(
            deployment.study,
            transport,
            deployment.experiment,
            deployment.terms,
            deployment.settings,
            before={name: SiteRecord() for name in known},
            secure=deployment.secure,
            folder=folder,
        )
        super().__init__(deployment.study, journal, self._sites)

    def ask(self, asking: Asking[R]) -> tuple[R, Total]:
        asked = self.asked
        found = super().ask(asking)
        if self.asked > asked:
            self._note(asking.question.name, found[1])
        return found

    def recorded(self, total: Total) -> None:
        """Before the first answer is in the journal, who gave it is on the disk."""
        if not (self._folder / SITES).exists():
            write_json(self._folder / SITES, {"sites": list(self._sites.names)})

    def _note(self, question: str, total: Total) -> None:
        """A line about an answer, for reports, status and the live page."""
        last = self._lines[-1] if self._lines else {}
        line = {
            "round": len(self._lines) + 1,
            "question": question,
            "left_out": [],
            "bytes_up": total.bytes_up + last.get("bytes_up", 0),
            "bytes_down": total.numbers["bytes_down"] + last.get("bytes_down", 0.0),
            "seconds": round(time.monotonic() - self._started, 3),
            **self._sites.metrics(),
        }
        self._lines.append(line)
        with (self._folder / METRICS).open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def forget(self) -> None:
        """Begin anew the next time: answers, and who gave them."""
        for file in sorted((self._folder / FIT / ANSWERS).glob("*.safetensors")):
            file.unlink()
        (self._folder / SITES).unlink(missing_ok=True)

    def finish(self, theta: Tensors, rounds: int, how: Sequence[tuple[str, str]]) -> list[str]:
        """Give everyone theta; says who has it."""
        _ = self.members  # they have the study
        self._sites.wait(self._sites.names)
        return self._sites.finish(theta, rounds, how)


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file that a kill may have cut short."""
    data = read_bytes(file) if file.exists() else b""
    return json_lines(data[: data.rfind(b"\n") + 1], file)


def _rows(fit: MixedFit) -> list[dict[str, Any]]:
    """Estimates under their names, for reports."""
    rows = [
        {"name": name, "of": "all sites", "estimate": value, "error": fit.standard_errors[name]}
        for name, value in fit.coefficients.items()
    ]
    for row in fit.to_frame().itertuples():
        if row.effect != "fixed":
            rows.append({"name": row.term, "of": row.group, "estimate": float(row.estimate)})
    return rows


def _warnings(fit: MixedFit) -> list[str]:
    words = [] if fit.converged else [fit.convergence]
    if fit.singular:
        words.append("a variance of the random effects is zero, or a correlation is one")
    return words


# --- at a site, offline --------------------------------------------------------------------------


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
    if group == SITE and SITE not in frame.columns:  # without a column rows are this site's
        frame = frame.assign(**{SITE: fit.levels[0]})
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
