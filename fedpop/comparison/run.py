"""The runs of a comparison: every method on every seed, what is there already not again."""

from __future__ import annotations

import json
import re
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpop.checked import Whole
from fedpop.comparison.budget import rounds_within
from fedpop.comparison.runner import Job, run_jobs, tell
from fedpop.comparison.terms import Entry, Source, Terms, check
from fedpop.errors import CheckpointError, EstimateError, OtherSettingsError, warn_user
from fedpop.evaluation.scores import Evaluation
from fedpop.evaluation.verdict import loss_trend
from fedpop.federation.clients import Federation
from fedpop.files import writable_folder, write_json
from fedpop.methods.base import Algorithm, hierarchy_of
from fedpop.population import Population, evaluate, evaluate_new
from fedpop.report.results import Record, Results, record
from fedpop.run.callbacks import Callback
from fedpop.run.run import Run
from fedpop.run.watch import Watch

NAME = "compare"
EVALUATIONS_ON_THE_WAY = 20
"""Evaluations on the way, by default."""
CHECKPOINTS_ON_THE_WAY = 20
"""Checkpoints of a run that is kept while it lasts."""


def fitted(
    method: Algorithm,
    clients: Federation,
    terms: Terms,
    seed: int,
    callbacks: Sequence[Callback] = (),
    checkpoints: Path | None = None,
) -> Population:
    """A run of one method on the terms of all; with ``checkpoints`` in a folder while it lasts, one that was
    interrupted is taken up in its midst."""
    rule = terms.rule(method)
    rounds = terms.rounds
    if rounds is None:
        assert terms.passes is not None
        rounds = rounds_within(method, clients, terms.passes, seed, rule)
    for callback in callbacks:
        if isinstance(callback, Watch):
            callback.usually_every(max(1, rounds // EVALUATIONS_ON_THE_WAY))

    def go_on() -> Population:
        return method.fit(
            clients,
            rounds=rounds,
            seed=seed,
            participation=rule,
            callbacks=callbacks,
            progress=False,
            precision=terms.precision,
            privacy=terms.privacy,
            secure=terms.secure,
            out=checkpoints,
            resume=checkpoints is not None,
            checkpoint_every=checkpoints_every(rounds),
        )

    return go_on() if checkpoints is None else taken_up(go_on, checkpoints)


def checkpoints_every(rounds: int) -> int:
    """Rounds between checkpoints of a run of so many."""
    return max(1, rounds // CHECKPOINTS_ON_THE_WAY)


def taken_up(go_on: Callable[[], Population], checkpoints: Path) -> Population:
    """A run that goes on where it was left in its folder, and from its beginning where other settings left
    that."""
    try:
        return go_on()
    except OtherSettingsError as error:  # a run that is in use, or a full disk, is another matter
        warn_user(f"the run in {checkpoints} was left by other settings and is begun anew ({error})")
        shutil.rmtree(checkpoints)
        return go_on()


@dataclass
class Looks(Watch):
    """A watch that also tells the bar how far a run is, of all its rounds, looks and last evaluations."""

    after: Whole = 1
    """Evaluations that come after the last round."""

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        stop = super().after_round(run, metrics)
        tell(self._share(run), f"round {run.round} of {run.facts.rounds}")
        return stop

    def _look(self, run: Run) -> dict[str, Any]:
        tell(self._share(run), f"evaluating after round {run.round}")
        return super()._look(run)

    def _share(self, run: Run) -> float:
        rounds, every = run.facts.rounds, self.every
        first = max(rounds - self.last, 0)  # after it every round is evaluated
        looks = rounds - first + (first // every if every else 0)
        return (run.round + len(self.points)) / (rounds + looks + self.after)


def run_one(
    source: Source, entry: Entry, terms: Terms, seed: int, setting: dict[str, Any], folder: str, keeps: bool
) -> list[Record]:
    """The record of one method and seed, for a worker process; curves and clients go to a file beside it.
    With ``keeps`` the run is kept while it lasts."""
    started = time.perf_counter()
    subject = source.make(seed)
    method = entry.build(subject.model)
    chosen = "validation" in subject.clients.splits
    watch = Looks(every=terms.every, last=terms.last, after=1 + chosen + bool(subject.newcomers))
    checkpoints = run_path(folder, entry.label, seed) if keeps else None
    population = fitted(method, subject.clients, terms, seed, [watch], checkpoints)
    trained = time.perf_counter()
    tell(0.0, "evaluating")
    final = evaluate(population, "test")
    metrics: dict[str, float | None] = {f"test_{n}": v for n, v in final.summary().items()}
    metrics |= _with_theta(population, final)
    metrics["plug_in"] = float(final.plug_in)
    metrics["unserved"] = float(len(final.unserved))
    metrics["left_out"] = float(sum(len(m["left_out"]) for m in population.history))
    verdict = population.convergence or loss_trend(population.history)
    metrics["unsettled"] = float(verdict is not None and verdict.converged is False)
    metrics |= {f"last_{n}": v for n, v in watch.mean_of_last().items()}
    if chosen:
        tell(0.0, "evaluating on validation examples")
        metrics |= {f"validation_{n}": v for n, v in evaluate(population, "validation").summary().items()}
    if subject.newcomers:
        tell(0.0, "evaluating new clients")
        new = evaluate_new(population, subject.newcomers)
        for kind, found in (("new", new.own_data), ("new_without", new.without)):
            metrics |= {} if found is None else {f"{kind}_{n}": v for n, v in found.summary().items()}
            metrics |= {} if found is None else {f"{kind}_unserved": float(len(found.unserved))}
    details = {"label": entry.label, "seed": seed, "points": watch.points} | _details(final)
    write_json(details_path(folder, entry.label, seed), details)
    ended = time.perf_counter()
    spent = ended - trained + watch.seconds
    rest = max(ended - started - spent - population.totals["seconds"], 0.0)
    cost = population.totals | {"rounds": population.rounds}
    cost |= {"evaluation_seconds": spent, "rest_seconds": rest}
    if checkpoints is not None:
        shutil.rmtree(checkpoints)
    return [record(NAME, setting, entry.label, seed, metrics, cost, config_of(method, terms))]


def _with_theta(population: Population, final: Evaluation) -> dict[str, float | None]:
    """Coverage of intervals that do not take theta for granted, where its information can be had."""
    embedded = population.federation is not None and population.federation.embedded
    if "coverage" not in final.scores or hierarchy_of(population.algorithm) is None or embedded:
        return {}
    if "epsilon" in (population.history or [{}])[-1]:
        return {}  # its information would be one more look at the data
    with suppress(EstimateError):  # theta is too large, or the data do not determine it
        found = evaluate(population, "test", widths=False, theta_uncertainty=True)
        return {"theta_coverage": float(found.scores["coverage"].mean())}
    return {}


def _details(final: Evaluation) -> dict[str, Any]:
    return {
        "clients": list(final.names),
        "scores": {n: [_number(v) for v in t.tolist()] for n, t in final.scores.items()},
        "reliability": [[b.confidence, b.accuracy, b.count] for b in final.reliability],
    }


def _number(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def details_path(folder: str | Path, label: str, seed: int) -> Path:
    """The file of a record's curves and clients."""
    return Path(folder) / "details" / f"{_file_name(label, seed)}.json"


def run_path(folder: str | Path, label: str, seed: int) -> Path:
    """Where a run is kept while it lasts."""
    return Path(folder) / "runs" / _file_name(label, seed)


def _file_name(label: str, seed: int) -> str:
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", label)
    digest = zlib.crc32(label.encode())  # two labels may look alike once they are plain
    return f"{plain}-{digest:08x}-seed{seed}"


def config_of(method: Algorithm, terms: Terms) -> dict[str, Any]:
    """What a record says about its method: all settings, and who took part."""
    who = terms.rule(method).describe()
    plain: dict[str, Any] = json.loads(json.dumps(method.describe() | {"participation": who}))
    return plain | {"class": type(method).__name__}


def compare_all(
    source: Source,
    entries: Sequence[Entry],
    terms: Terms,
    seeds: Sequence[int],
    folder: Path,
    *,
    resume: bool,
    processes: int | None,
    show: bool = True,
    keeps: bool = True,
) -> Results:
    """Run what is missing; ``processes`` 0 is this one. Runs are kept in the folder while they last, to be
    gone on with, unless not ``keeps``."""
    first = source.make(seeds[0])
    check(first, entries, terms)
    setting = json.loads(json.dumps({"task": source.describe()} | terms.describe()))
    results = opened(folder, NAME, setting, resume)
    writable_folder(folder / "details")
    if not resume:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    jobs = [
        Job(
            run_one,
            (source, entry, terms, seed, setting, str(folder), keeps),
            f"{entry.label}, seed {seed}",
            setting,
            seed,
            (entry.label,),
            config_of(entry.build(first.model), terms),
        )
        for seed in seeds
        for entry in entries
    ]
    write_json(folder / "details" / "methods.json", [e.label for e in entries])
    # Of methods whose settings changed nothing old stays, or a mean would be over both.
    results.records = [r for r in results.records if not any(job.overrules(r) for job in jobs)]
    run_jobs(jobs, results, processes, NAME, show)
    if (folder / "runs").exists():
        shutil.rmtree(folder / "runs")
    return results


def opened(folder: Path, experiment: str, setting: dict[str, Any], resume: bool) -> Results:
    """The results in a folder, if they are of this comparison."""
    results = Results.open(folder)
    if results.records and not resume:
        raise CheckpointError(
            f"{folder} already holds results; use resume=True to go on with them, or another output folder"
        )
    for r in results.records:
        theirs = {k: v for k, v in r["setting"].items() if k != "trial"}
        if r["experiment"] != experiment or theirs != setting:
            known = theirs if r["experiment"] == experiment else {}
            other = [k for k in setting if setting[k] != known.get(k)]
            raise CheckpointError(
                f"{folder / 'results.json'} holds records of another comparison ({', '.join(other)} differ); "
                "use another output folder"
            )
    return results
