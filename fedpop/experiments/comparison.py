"""Methods under one protocol: the same data, splits, participation draws and budget, one table.

Every method is run on every seed. A budget is a number of rounds, the same for all, or a number of backbone
example-passes, for which each method gets as many rounds as its own price allows (``budget``). Who takes part
in a round depends on the seed and the round only; methods that need everyone, or one client at a time, have
their own rule, and the table says so. Test scores are of the final model, and averaged over the last ten
rounds; nothing is chosen by them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedpop.algorithms.base import Algorithm, require_whole
from fedpop.errors import CheckpointError, DataError, SettingsError
from fedpop.evaluation.protocol import Evaluation, Watch, check_newcomers, evaluate, evaluate_new
from fedpop.experiments.budget import rounds_within
from fedpop.experiments.methods import Entry
from fedpop.experiments.runner import Job, run_jobs
from fedpop.federation.clients import Client, Federation
from fedpop.federation.participation.rules import Participation
from fedpop.federation.participation.rules import resolve as resolve_participation
from fedpop.files import read_json, writable_folder, write_json
from fedpop.models.base import Model
from fedpop.population import Population
from fedpop.report.results import Record, Results, mean, record, values
from fedpop.runtime.callbacks import Callback

EXPERIMENT = "compare"
ROUNDS = 500
LOOKS = 20
"""Evaluations on the way, unless told."""


@dataclass(frozen=True)
class Subject:
    """What methods are compared on: clients with their splits, clients never seen, and the model, if the
    methods do not bring their own."""

    clients: Federation
    newcomers: Sequence[Client] = ()
    model: Model | None = None


class Source(ABC):
    """Where a seed's subject comes from."""

    @abstractmethod
    def make(self, seed: int) -> Subject: ...

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain values that tell it from any other."""


@dataclass(frozen=True)
class Given(Source):
    """The same data for every seed."""

    subject: Subject

    def make(self, seed: int) -> Subject:
        return self.subject

    def describe(self) -> dict[str, Any]:
        new = self.subject.newcomers
        about = {"data": self.subject.clients.fingerprint(), "new_clients": len(new)}
        return about | ({"new_data": Federation.of(list(new)).fingerprint()} if new else {})


@dataclass(frozen=True)
class Terms:
    """What is the same for all methods of a comparison."""

    rounds: int | None = None
    passes: float | None = None
    participation: Participation | int | float | Sequence[float] | None = None
    every: int | None = None
    last: int = 10

    def __post_init__(self) -> None:
        if self.rounds is not None and self.passes is not None:
            raise SettingsError("a budget is a number of rounds or of backbone passes, not both")
        if self.rounds is None and self.passes is None:
            object.__setattr__(self, "rounds", ROUNDS)
        if self.rounds is not None:
            require_whole(rounds=self.rounds)
        if self.passes is not None and (
            isinstance(self.passes, bool) or not isinstance(self.passes, int | float)
        ):
            raise SettingsError(f"passes is a number, not {self.passes!r}")
        if not (self.passes or self.rounds or 0) > 0:
            raise SettingsError("a budget is positive")
        if self.every is not None:
            require_whole(every=self.every)
        _ = Watch(every=self.every, last=self.last)
        if self.participation is not None:
            object.__setattr__(self, "participation", resolve_participation(self.participation))

    def rule(self, method: type[Algorithm] | Algorithm) -> Participation:
        """Who takes part: what was asked for, or what the method must have."""
        if self.participation is None or method.participation != "any":
            return method.usual_participation()
        return resolve_participation(self.participation)

    def describe(self) -> dict[str, Any]:
        budget = {"rounds": self.rounds} if self.passes is None else {"passes": self.passes}
        who = None if self.participation is None else resolve_participation(self.participation).describe()
        return budget | {"participation": who, "every": self.every, "last": self.last}


# --- one run ---------------------------------------------------------------------------------


def fitted(
    method: Algorithm, clients: Federation, terms: Terms, seed: int, callbacks: Sequence[Callback] = ()
) -> Population:
    """A run of one method on the terms of all."""
    rule = terms.rule(method)
    rounds = terms.rounds
    if rounds is None:
        assert terms.passes is not None
        rounds = rounds_within(method, clients, terms.passes, seed, rule)
    for callback in callbacks:
        if isinstance(callback, Watch) and callback.every is None:
            callback.every = max(1, rounds // LOOKS)
    return method.fit(
        clients, rounds=rounds, seed=seed, participation=rule, callbacks=callbacks, progress=False
    )


def run_one(
    source: Source, entry: Entry, terms: Terms, seed: int, setting: dict[str, Any], folder: str
) -> list[Record]:
    """The record of one method and seed, for a worker process; curves and clients go to a file beside it."""
    subject = source.make(seed)
    method = entry.build(subject.model)
    watch = Watch(every=terms.every, last=terms.last)
    population = fitted(method, subject.clients, terms, seed, [watch])
    final = evaluate(population, "test")
    metrics: dict[str, float | None] = {f"test_{n}": v for n, v in final.summary().items()}
    metrics["plug_in"] = float(final.plug_in)
    metrics["unserved"] = float(len(final.unserved))
    metrics["left_out"] = float(sum(len(m["left_out"]) for m in population.history))
    metrics |= {f"last_{n}": v for n, v in watch.mean_of_last().items()}
    if "validation" in subject.clients.splits:
        metrics |= {f"validation_{n}": v for n, v in evaluate(population, "validation").summary().items()}
    if subject.newcomers:
        new = evaluate_new(population, subject.newcomers)
        for kind, found in (("new", new.own_data), ("new_without", new.without)):
            metrics |= {} if found is None else {f"{kind}_{n}": v for n, v in found.summary().items()}
            metrics |= {} if found is None else {f"{kind}_unserved": float(len(found.unserved))}
    details = {"label": entry.label, "seed": seed, "points": watch.points} | _details(final)
    write_json(details_path(folder, entry.label, seed), details)
    cost = population.totals | {"rounds": population.rounds}
    return [record(EXPERIMENT, setting, entry.label, seed, metrics, cost, config_of(method, terms))]


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
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", label)
    digest = zlib.crc32(label.encode())  # two labels may look alike once they are plain
    return Path(folder) / "details" / f"{plain}-{digest:08x}-seed{seed}.json"


def config_of(method: Algorithm, terms: Terms) -> dict[str, Any]:
    """What a record says about its method: all settings, and who took part."""
    who = terms.rule(method).describe()
    plain: dict[str, Any] = json.loads(json.dumps(method.describe() | {"participation": who}))
    return plain | {"class": type(method).__name__}


def in_worker(*arguments: Any) -> list[Record]:
    """``run_one`` in a process of its own, among others: one thread."""
    torch.set_num_threads(1)
    return run_one(*arguments)


# --- all of them -----------------------------------------------------------------------------


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """3 is 0, 1, 2; a list is itself.

    >>> seeds_of(3), seeds_of([7])
    ([0, 1, 2], [7])
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int | Sequence):
        raise SettingsError(f"seeds are a number of them or different whole numbers, not {seeds!r}")
    out = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    require_whole(**{f"seed {s}": s for s in out})
    if not out or len(set(out)) < len(out):
        raise SettingsError(f"seeds are a number of them or different whole numbers, not {seeds!r}")
    return out


def entries_of(methods: Sequence[Algorithm] | Mapping[str, Algorithm]) -> list[Entry]:
    """Methods as they are, under their labels."""
    for method in methods.values() if isinstance(methods, Mapping) else methods:
        if not isinstance(method, Algorithm):
            raise SettingsError(f"compare takes methods such as fp.FedAvg(model), not {method!r}")
    named = list(methods.items()) if isinstance(methods, Mapping) else [(m.label, m) for m in methods]
    entries = [Entry(label, given=method) for label, method in named]
    check_labels(entries)
    return entries


def check_labels(entries: Sequence[Entry], where: str = "") -> None:
    labels = [e.label for e in entries]
    if not labels:
        raise SettingsError(f"{where}there is no method to compare")
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise SettingsError(
            f"{where}two methods are called {twice[0]}; give each a label of its own (a mapping of labels to "
            "methods, or label = ... in a file)"
        )


def check(subject: Subject, entries: Sequence[Entry], terms: Terms) -> None:
    """Raise before any work where a comparison cannot be made."""
    if "test" not in subject.clients.splits:
        raise DataError(
            "methods are compared on test examples: give fedpop.Client(x, y, test=(x, y)), or set some aside "
            "with fedpop.hold_out(clients)"
        )
    check_newcomers(subject.newcomers, subject.clients)
    for entry in entries:
        method = entry.build(subject.model)
        rule = terms.rule(method)
        rule.check(len(subject.clients))
        method.check(len(subject.clients))
        method.check_participation(rule)


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
) -> Comparison:
    """Run what is missing; ``processes`` 0 is this one."""
    first = source.make(seeds[0])
    check(first, entries, terms)
    setting = json.loads(json.dumps({"task": source.describe()} | terms.describe()))
    results = opened(folder, EXPERIMENT, setting, resume)
    writable_folder(folder / "details")
    call = run_one if processes == 0 else in_worker
    jobs = [
        Job(
            call,
            (source, entry, terms, seed, setting, str(folder)),
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
    wanted = {job.methods[0]: job.config for job in jobs}
    results.records = [r for r in results.records if wanted.get(r["method"], r["config"]) == r["config"]]
    run_jobs(jobs, results, processes, EXPERIMENT, show)
    return Comparison.of(results)


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


@dataclass(frozen=True, repr=False)
class Comparison:
    """Records of all methods and seeds; printed, a table.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> clients = [fp.Client(x, a * x[:, 0], test=(x, a * x[:, 0])) for a in (1.0, 2.0)]
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
    >>> comparison = fp.compare([fp.FedAvg(model), fp.FedRep(model, heads="exact")], clients, rounds=3)
    >>> comparison.methods, round(comparison.mean("FedRep", "test_rmse"), 3)
    (['FedAvg', 'FedRep'], 0.0)
    """

    records: Sequence[Record]
    details: Mapping[tuple[str, int], Mapping[str, Any]]
    methods: Sequence[str]

    @classmethod
    def of(cls, results: Results) -> Comparison:
        """From a folder's records and the files beside them."""
        path = results.folder / "details" / "methods.json"
        found, order = results.methods(), read_json(path) if path.exists() else []
        methods = [m for m in order if m in found] + [m for m in found if m not in order]
        details = {}
        for r in results.records:
            path = details_path(results.folder, r["method"], r["seed"])
            if path.exists():
                details[r["method"], r["seed"]] = read_json(path)
        return cls(results.records, details, methods)

    def of_method(self, method: str) -> list[Record]:
        if method not in self.methods:
            raise SettingsError(f"no method {method!r} here; there are {', '.join(self.methods)}")
        return [r for r in self.records if r["method"] == method]

    def mean(self, method: str, metric: str, of: str = "metrics") -> float:
        """A metric, or with ``of="cost"`` a cost, averaged over seeds."""
        return mean(values(self.of_method(method), metric, of))

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.methods)}; {len({r['seed'] for r in self.records})} seed(s))"

    def __str__(self) -> str:
        from fedpop.report.compare import notes, summary
        from fedpop.report.terminal import as_text

        return "\n".join([as_text(summary(self)), *notes(self)])

    def report(self, path: str | Path) -> Path:
        """Write the page with curves, clients, calibration and costs."""
        from fedpop.report.compare import page

        return page(self, Path(path))


def compare(
    methods: Sequence[Algorithm] | Mapping[str, Algorithm],
    clients: Any,
    *,
    rounds: int | None = None,
    passes: float | None = None,
    seeds: int | Sequence[int] = 1,
    participation: Participation | int | float | Sequence[float] | None = None,
    newcomers: Sequence[Client] = (),
    every: int | None = None,
    last: int = 10,
    out: str | Path | None = None,
    resume: bool = False,
    processes: int = 1,
    progress: bool | None = None,
) -> Comparison:
    """Run methods under one protocol and compare them on the clients' test examples.

    The budget is ``rounds`` (500 unless told) or ``passes``, backbone example-passes, for which each method
    gets the rounds that its own price allows. ``newcomers`` are clients (with ``test`` sets) that take no
    part and are scored afterwards. All clients are evaluated ``every`` so many rounds and after each of the
    ``last`` ones. ``out`` receives ``results.json``, ``results.md`` and ``report.html``; with ``resume``,
    runs that are there already are not run again. With several ``processes`` methods run side by side.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> clients = [fp.Client(x, a * x[:, 0], test=(x, a * x[:, 0])) for a in (1.0, 2.0)]
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
    >>> fp.compare([fp.FedSOUL(model), fp.FedAvg(model)], clients, rounds=5, seeds=2)
    Comparison(FedSOUL, FedAvg; 2 seed(s))
    """
    entries = entries_of(methods)
    terms = Terms(rounds, passes, participation, every, last)
    source = Given(Subject(Federation.of(clients), tuple(newcomers)))
    show = sys.stderr.isatty() if progress is None else progress
    if processes < 1:
        raise SettingsError(f"processes must be at least 1, not {processes}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        comparison = compare_all(
            source,
            entries,
            terms,
            seeds_of(seeds),
            writable_folder(folder),
            resume=resume,
            processes=0 if processes == 1 else processes,
            show=show,
        )
        if out is not None:
            from fedpop.report.compare import write_files

            write_files(comparison, folder)
    return comparison
