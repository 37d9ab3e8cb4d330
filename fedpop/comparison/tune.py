"""Random search of methods' settings, on validation examples only.

Every method that has something to search for gets the same number of trials; the first is its settings as
they are written. Test examples are taken away before a trial sees the clients. The settings whose validation
score is best, averaged over the seeds of the search, are chosen; a trial that diverged never is.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedpop.comparison.config import Config, changed, read_config, to_toml, with_entry, with_settings
from fedpop.comparison.run import config_of, fitted, opened, run_path
from fedpop.comparison.runner import Job, run_jobs, workers
from fedpop.comparison.terms import Entry, Source, Subject, Terms, check_entry, in_line, seeds_of
from fedpop.errors import DataError, FedpopError, SettingsError, warn_user
from fedpop.evaluation.scores import CLASSES, HIGH_IS_GOOD, INTERVAL_LEVEL, REAL
from fedpop.extras import require_report
from fedpop.federation.clients import Federation
from fedpop.files import write_bytes
from fedpop.keys import Key
from fedpop.population import evaluate
from fedpop.report import plots, terminal
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.records import Report
from fedpop.report.results import Record, Results, mean, record, values

NAME = "tune"
METRIC = "nll"
"""What is maximised by default: the log-score, which both kinds of targets have."""


def draw(space: Any, key: Key, where: str) -> Any:
    """One value: of a list, or of an interval, ``{log = [a, b]}``, ``{linear = [a, b]}`` or, for whole
    numbers, ``{whole = [a, b]}``.

    >>> draw([1, 2, 5], Key(0), "here") in (1, 2, 5), 0.1 <= draw({"log": [0.1, 10]}, Key(0), "here") <= 10
    (True, True)
    """
    u = float(key.uniform(key.server(), (1,), torch.float64)[0, 0])
    if isinstance(space, list) and space:
        return space[min(int(u * len(space)), len(space) - 1)]
    if isinstance(space, Mapping) and len(space) == 1:
        ((kind, ends),) = space.items()
        good = isinstance(ends, list) and len(ends) == 2 and all(isinstance(e, int | float) for e in ends)
        if good and ends[0] <= ends[1]:
            low, high = ends
            if kind == "log" and low > 0:
                return math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
            if kind == "linear":
                return low + u * (high - low)
            if kind == "whole" and isinstance(low, int) and isinstance(high, int):
                return low + min(int(u * (high - low + 1)), high - low)
    raise SettingsError(
        f"{where}: a search is a list of choices, {{log = [a, b]}} with a > 0, {{linear = [a, b]}} or "
        f"{{whole = [a, b]}}, not {space!r}"
    )


def spaces(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """What to search for by name; ``local.rate = ...`` may be written with quotation marks or without.

    >>> spaces({"local": {"rate": {"log": [0.1, 1]}}, "heads.epochs": [1, 2]})
    {'local.rate': {'log': [0.1, 1]}, 'heads.epochs': [1, 2]}
    """
    out: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and not set(value) & {"log", "linear", "whole"}:
            out |= spaces(value, f"{path}{name}.")
        else:
            out[path + name] = value
    return out


def trials_of(entry: Entry, count: int, seed: int) -> list[Entry]:
    """The method with the settings of each trial: as written first, then drawn."""
    out = [with_entry(entry, entry.settings)]
    for t in range(1, count if entry.search else 1):
        settings: Mapping[str, Any] = entry.settings
        for name, space in spaces(entry.search).items():
            key = Key(seed, round=t, purpose=f"tune/{entry.label}/{name}")
            settings = changed(settings, name, draw(space, key, f"{entry.where}: search {name!r}"))
        out.append(with_entry(entry, settings))
    return out


def without_test(subject: Subject) -> Subject:
    """The subject as a search may see it."""
    if "validation" not in subject.clients.splits:
        raise DataError("settings are searched for on validation examples, and there are none")
    splits = {name: packed for name, packed in subject.clients.splits.items() if name != "test"}
    return Subject(Federation(subject.clients.names, splits, subject.clients.embedded), (), subject.model)


def run_trial(
    source: Source, entry: Entry, terms: Terms, seed: int, setting: dict[str, Any], folder: str
) -> list[Record]:
    """The record of one trial and seed; a run that fails has no scores, and says why. A run is kept in the
    folder while it lasts."""
    subject = without_test(source.make(seed))
    method = entry.build(subject.model)
    config = config_of(method, terms) | {"settings": dict(entry.settings)}
    metrics: dict[str, float | None] = {}
    cost: dict[str, float] = {}
    checkpoints = run_path(folder, f"{entry.label}-{setting['trial']}", seed)
    try:
        population = fitted(method, subject.clients, terms, seed, checkpoints=checkpoints)
        metrics = {f"validation_{n}": v for n, v in evaluate(population, "validation").summary().items()}
        cost = population.totals | {"rounds": population.rounds}
    except FedpopError as error:
        config["failed"] = str(error)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return [record(NAME, setting, entry.label, seed, metrics, cost, config)]


@dataclass(frozen=True)
class Choice:
    """What a search came to for one method."""

    label: str
    trial: int
    settings: Mapping[str, Any]
    score: float


def choose(records: Sequence[Record], label: str, metric: str) -> Choice:
    """The trial with the best mean validation score over seeds; trials with a missing score are out."""
    trials: dict[int, list[Record]] = {}
    for r in records:
        if r["method"] == label:
            trials.setdefault(r["setting"]["trial"], []).append(r)
    found = []
    for t, own in sorted(trials.items()):
        numbers = [r["metrics"].get(f"validation_{metric}") for r in own]
        if None not in numbers:
            found.append((mean([float(v) for v in numbers if v is not None]), t))
    if not found:
        raise SettingsError(
            f"{label}: none of its {len(trials)} trials has a finite validation {metric}; search elsewhere "
            "(smaller steps?)"
        )

    def worth(score: float) -> float:
        if metric == "coverage":  # of intervals that are right, not of wide ones
            return -abs(score - INTERVAL_LEVEL)
        return score if metric in HIGH_IS_GOOD else -score

    best, t = max(found, key=lambda f: worth(f[0]))
    return Choice(label, t, trials[t][0]["config"]["settings"], best)


def tune(config: Config, folder: Path, processes: int | None, show: bool = True) -> list[Choice]:
    """Search, and write ``tuned.toml`` for ``fedpop compare``."""
    how = config.tune
    metric = how.metric or METRIC
    seeds = seeds_of(how.seeds)
    first = without_test(config.task.make(seeds[0]))
    assert first.model is not None
    known = CLASSES if first.model.likelihood.classes(first.model.outputs) else REAL[:3]
    if metric not in known:
        raise SettingsError(f"{config.path}, [tune]: metric is one of {', '.join(known)}, not {metric!r}")
    terms = replace(config.terms, every=None, last=0)
    if how.rounds is not None or how.passes is not None:
        terms = replace(terms, rounds=how.rounds, passes=how.passes)
    if terms.privacy is not None:
        warn_user(
            "each trial has a ledger of its own, and validation scores have no noise: what a search says of "
            "its clients is in none of them; search on data that are not those of the final run"
        )
    setting = {"task": config.task.describe()} | terms.describe() | {"search": how.seed, "metric": metric}
    setting = json.loads(json.dumps(setting))
    results = opened(folder, NAME, setting, resume=True)
    jobs = []
    for entry in config.entries:
        for t, trial in enumerate(trials_of(entry, how.trials, how.seed)):
            check_entry(trial, first, terms)  # every setting is checked before any work
            own = config_of(trial.build(first.model), terms)
            whole = setting | {"trial": t}
            expected = json.loads(json.dumps(own | {"settings": dict(trial.settings)}))
            for seed in seeds:
                label = f"{entry.label}, trial {t}, seed {seed}"
                arguments = (config.task, trial, terms, seed, whole, str(folder))
                jobs.append(Job(run_trial, arguments, label, whole, seed, (entry.label,), expected))
    run_jobs(jobs, results, processes, NAME, show)
    asked = {(j.methods[0], j.setting["trial"], j.seed) for j in jobs}
    records = [r for r in results.records if (r["method"], r["setting"]["trial"], r["seed"]) in asked]
    choices = [choose(records, e.label, metric) for e in config.entries]
    write_tuned(config, choices, folder)
    return choices


def write_tuned(config: Config, choices: Sequence[Choice], folder: Path) -> Path:
    """The settings file with what was chosen in it."""
    raw = with_settings(config, {c.label: c.settings for c in choices})
    head = f"# Chosen on validation examples by fedpop tune {config.path.name}; for fedpop compare.\n\n"
    path = folder / "tuned.toml"
    write_bytes(path, (head + to_toml(raw)).encode())
    return path


# --- the report ----------------------------------------------------------------------------------


def metric_of(results: Results) -> str:
    return str(results.records[0]["setting"]["metric"])


def chosen_sheet(results: Results) -> Sheet:
    """One row per method: what was chosen, out of how many trials."""
    metric = metric_of(results)
    columns = ("method", "chosen settings", "trial", "of", "failed", f"validation {metric}", "as written")
    rows = []
    for method in results.methods():
        trials = _scores(results, method, metric)
        lost = sum(v is None for v in trials.values())
        first = trials.get(0)
        written = "-" if first is None else f"{first:.4g}"
        try:
            best = choose(results.records, method, metric)
        except SettingsError:
            rows.append((method, "none", "-", str(len(trials)), str(lost), "-", written))
            continue
        settings = in_line(dict(best.settings)) or "as they are"
        rows.append(
            (method, settings, str(best.trial), str(len(trials)), str(lost), f"{best.score:.4g}", written)
        )
    return Sheet(columns, rows)


def _scores(results: Results, method: str, metric: str) -> dict[int, float | None]:
    out: dict[int, float | None] = {}
    for t in sorted({r["setting"]["trial"] for r in results.of(method=method)}):
        own = [r for r in results.of(method=method) if r["setting"]["trial"] == t]
        numbers = values(own, f"validation_{metric}")
        out[t] = mean(numbers) if len(numbers) == len(own) else None
    return out


def trials_sheet(results: Results) -> Sheet:
    """Every trial."""
    metric = metric_of(results)
    rows = []
    for method in results.methods():
        for t, score in _scores(results, method, metric).items():
            own = next(r for r in results.of(method=method) if r["setting"]["trial"] == t)
            settings = in_line(own["config"]["settings"]) or "as they are"
            rows.append((method, settings, str(t), "-" if score is None else f"{score:.4g}"))
    return Sheet(("method", "settings", "trial", f"validation {metric}"), rows)


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Chosen on validation examples": chosen_sheet(results), "All trials": trials_sheet(results)}


def show(results: Results, console: Console) -> None:
    """What was chosen, on the terminal; all trials are in the files."""
    terminal.show(chosen_sheet(results), "Chosen on validation examples", console)


def page(results: Results) -> Page:
    metric = metric_of(results)
    groups = {
        m: [v for v in _scores(results, m, metric).values() if v is not None] for m in results.methods()
    }
    groups = {m: v for m, v in groups.items() if v}
    better = "higher" if metric in HIGH_IS_GOOD else "lower"
    figures = []
    if groups:
        best = {m: min(v, key=lambda s: -s if metric in HIGH_IS_GOOD else s) for m, v in groups.items()}
        near = sorted(best.values())[len(best) // 2]
        # Trials far off would hide the differences that matter.
        far = max(near + 4 * abs(near) + 1, *best.values())
        figures.append(
            Figure(
                plots.dots(groups, f"validation {metric} ({better} is better)", far=far),
                "Every dot is a trial, the stroke their mean; trials far off are counted at the edge.",
            )
        )
    sections = [
        Section("Chosen", sheet=chosen_sheet(results), figures=figures, wide=True),
        Section("All trials", sheet=trials_sheet(results)),
    ]
    lead = (
        "Settings searched for at random, the same number of trials for every method that has something to "
        "search for, judged on validation examples; no trial saw a test example."
    )
    return Page("fedpop: a search", lead, sections)


REPORT = Report(name=NAME, sheets=sheets, page=page, show=show)


def tune_file(
    path: Path, out: Path | None = None, data: Path | None = None, processes: int | None = None
) -> None:
    """``fedpop tune``: a settings file's search, printed and written."""
    require_report()
    many = workers(processes)
    config = read_config(path, data)
    folder = out or Path("runs") / f"{config.name}-tune"
    tune(config, folder, many)
    REPORT.tell(Results.open(folder))
    line = f"The chosen settings: fedpop compare {folder / 'tuned.toml'}"
    terminal.console().print(line, soft_wrap=True)
