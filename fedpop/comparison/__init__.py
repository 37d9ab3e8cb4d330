"""Methods under one protocol: the same data, splits, participation draws and budget, one table.

Every method is run on every seed. A budget is a number of rounds, the same for all, or a number of backbone
example-passes, for which each method gets as many rounds as its own price allows (``budget``). Who takes part
in a round depends on the seed and the round only; methods that need everyone, or one client at a time, have
their own rule, and the table says so. Test scores are of the final model, and averaged over the last ten
rounds; nothing is chosen by them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpop.checked import Count, Few, Positive, Seed, Whole, checked
from fedpop.comparison import page, run, sheets
from fedpop.comparison.terms import Given, Subject, Terms, entries_of, seeds_of
from fedpop.errors import CheckpointError, SettingsError
from fedpop.federation.clients import Client, Federation
from fedpop.federation.participation.rules import Said
from fedpop.files import DAMAGED, folder_named, read_json, reading
from fedpop.methods.base import Algorithm
from fedpop.report.html import write_page
from fedpop.report.records import Report
from fedpop.report.results import Record, Results, mean, values
from fedpop.report.terminal import as_text


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
        if not isinstance(order, list):
            raise CheckpointError(f"{path} is not a list of methods; {DAMAGED}")
        methods = [m for m in order if m in found] + [m for m in found if m not in order]
        details = {}
        for r in results.records:
            path = run.details_path(results.folder, r["method"], r["seed"])
            if path.exists():
                details[r["method"], r["seed"]] = _details(path)
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
        return "\n".join([as_text(sheets.summary(self)), *sheets.notes(self)])

    def report(self, path: str | Path) -> Path:
        """Write the page with curves, clients, calibration and costs."""
        return write_page(Path(path), page.page(self))


def _details(path: Path) -> dict[str, Any]:
    """Curves and clients of one record, as far as figures need them."""
    found = read_json(path)
    with reading(path, "the curves of a comparison"):
        points, lengths = (
            found["points"],
            {len(v) for v in found["scores"].values()} - {len(found["clients"])},
        )
        if lengths or any(not isinstance(p, dict) or "round" not in p for p in points):
            raise ValueError("points, clients and scores do not belong together")
        _ = [(float(c), float(a), int(n)) for c, a, n in found["reliability"]]
        return dict(found)


REPORT = Report(
    name=run.NAME,
    sheets=lambda results: sheets.sheets(Comparison.of(results)),
    page=lambda results: page.page(Comparison.of(results)),
    text=lambda results: sheets.text(Comparison.of(results)),
    show=lambda results, console: sheets.show(Comparison.of(results), console),
)


@checked
def compare(
    methods: Sequence[Algorithm] | Mapping[str, Algorithm],
    clients: Any,
    *,
    rounds: Count | None = None,
    passes: Positive | None = None,
    seeds: Few | Sequence[Seed] = 1,
    participation: Said = None,
    newcomers: Sequence[Client] = (),
    every: Count | None = None,
    last: Whole = 10,
    out: str | Path | None = None,
    resume: bool = False,
    processes: Count = 1,
    progress: bool | None = None,
) -> Comparison:
    """Run methods under one protocol and compare them on the clients' test examples.

    Args:
        methods: A list of them, or a mapping of labels to them.
        clients: As for ``fp.fit``, with ``test`` sets (``fp.hold_out`` sets some aside).
        rounds: The budget of every method, 500 by default; or
        passes: the budget in backbone example-passes, for which each method gets the rounds that its own
            price allows.
        seeds: How many, or which; every method is run on each.
        participation: Who takes part in a round, as for ``fp.fit``; the same clients for all methods.
        newcomers: Clients (with ``test`` sets) that take no part and are scored afterwards.
        every: All clients are evaluated after every so many rounds; None does so at the end only.
        last: They are evaluated after each of so many last rounds as well, 10 by default.
        out: A folder for ``results.json``, ``results.md`` and ``report.html`` (which needs the extra
            "report"); None keeps nothing.
        resume: Runs that are there already are not run again, and one that was interrupted goes on.
        processes: So many methods run side by side, 1 by default.
        progress: Show a bar; None shows it on a terminal only.

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
        folder = folder_named(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        results = run.compare_all(
            source,
            entries,
            terms,
            seeds_of(seeds),
            folder,
            resume=resume,
            processes=0 if processes == 1 else processes,
            show=show,
            keeps=out is not None,
        )
        if out is not None:
            REPORT.write(results)
        return Comparison.of(results)
