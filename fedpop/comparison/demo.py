"""``fedpop demo``: the paper's synthetic task, FedSOUL beside other methods and the exact optimum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedpop.comparison import Comparison
from fedpop.comparison.page import on_the_way
from fedpop.comparison.run import compare_all
from fedpop.comparison.sheets import notes, protocol, summary
from fedpop.comparison.tasks import Task
from fedpop.comparison.terms import Terms, entry_from
from fedpop.comparison.truth import METHODS, Outcome, run_beside_truth
from fedpop.data.synthetic import Synthetic, SyntheticTask
from fedpop.extras import require_report
from fedpop.files import read_json, writable_folder, write_json
from fedpop.models.predictive import Predictive
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.records import Report
from fedpop.report.results import Record, Results
from fedpop.run.progress import human_bytes

NAME = "demo"
COMPARED: tuple[dict[str, Any], ...] = (
    {"name": "FedSOUL"},
    {"name": "LocalOnly", "local": {"epochs": 2, "rate": 0.01}},
    {"name": "FedAvg", "local": {"epochs": 2, "rate": 0.01}},
    {"name": "FedAvgFT", "local": {"epochs": 2, "rate": 0.01}, "fine_tune": {"epochs": 20, "rate": 0.01}},
    {"name": "SCAFFOLD", "local": {"epochs": 2, "rate": 0.005}},
    {"name": "FedPer", "local": {"epochs": 2, "rate": 0.01}},
    {"name": "FedRep", "head": {"epochs": 5, "rate": 0.01}, "body": {"epochs": 2, "rate": 0.01}},
    {
        "name": "FedRep",
        "label": "FedRep-spectral",
        "start": "spectral",
        "head": {"epochs": 5, "rate": 0.01},
        "body": {"epochs": 2, "rate": 0.01},
    },
    {
        "name": "Ditto",
        "local": {"epochs": 2, "rate": 0.01},
        "personal": {"epochs": 2, "rate": 0.01},
        "lam": 1.0,
    },
)
"""Under the protocol of ``fedpop compare``, in the form of its [[method]] tables."""
DEMO_ROUNDS = 100
FIGURES, COMPARISON = "demo.json", "comparison"
"""Beside the records: what figures are drawn from, and the folder of the comparison."""
COLUMNS = (
    "method",
    "engine",
    "angle",
    "z error",
    "log-lik.",
    "90 % cov.",
    "sent",
    "sec.",
)
EXPLAINED = (
    "angle: principal-angle distance of phi to the truth. z error: mean error of the clients' z after "
    "alignment through phi. log-lik.: held-out predictive log-likelihood per example. 90 % cov.: "
    "share of held-out observations inside their 90 % interval. sent: bytes from clients to server."
)


def run_demo(out: Path, seed: int) -> None:
    """Two tables on the terminal, and a page to look at; all of it can be made again from the folder."""
    require_report()
    console = Console()
    folder = writable_folder(out)
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    task = SyntheticTask()
    console.print(
        f"[bold]fedpop demo[/bold]: {task.b} clients, {round(100 * task.share_small)} % of them with "
        f"{task.n_small} examples, the rest with {task.n_large}; y = x' phi z + noise, {task.k} inputs, "
        f"{task.d} private parameters each."
    )
    results = keep(folder, run_beside_truth(NAME, task, seed, METHODS, progress=True), task.make(seed))
    compare_demo(task, seed, writable_folder(folder / COMPARISON))
    REPORT.tell(results)


def compare_demo(task: SyntheticTask, seed: int, folder: Path, rounds: int = DEMO_ROUNDS) -> Comparison:
    """The demo's methods under one protocol, on the same task; an older demo's records go."""
    source = Task("synthetic", task, {"validation": 0, "new_clients": 10})
    entries = [entry_from(table, "the demo") for table in COMPARED]
    terms = Terms(rounds=rounds, every=10)
    (folder / "results.json").unlink(missing_ok=True)
    results = compare_all(source, entries, terms, [seed], folder, resume=False, processes=0, keeps=False)
    return Comparison.of(results)


def keep(folder: Path, outcomes: Sequence[Outcome], data: Synthetic) -> Results:
    """Records, and beside them what figures need of populations and data that are gone afterwards."""
    fedsoul = next(o.population for o in outcomes if o.record["method"] == "FedSOUL")
    ends = {f"client {i}: {len(data.clients[i].y)} examples": i for i in (0, len(data.clients) - 1)}
    shown = {
        title: _intervals(fedsoul.predict(i, _test(data, i)[0][:30]), _test(data, i))
        for title, i in ends.items()
    }
    stranger = fedsoul.new_client().predict(_test(data, 0)[0][:30])
    shown["a client never seen, no data"] = _intervals(stranger, _test(data, 0))
    task = data.task
    about = {"b": task.b, "k": task.k, "d": task.d, "sizes": sorted({len(c.y) for c in data.clients})}
    engines = {o.record["method"]: _engine(o) for o in outcomes}
    points = {o.record["method"]: o.points for o in outcomes if o.points}
    write_json(
        folder / FIGURES,
        {"task": about, "engines": engines, "points": points, "clients": list(shown.items())},
    )
    results = Results(folder)
    results.add([o.record for o in outcomes])
    return results


def _engine(outcome: Outcome) -> str:
    learned = "kernel" in outcome.record["config"]  # which the exact optimum was not
    return outcome.population.engine.split(":")[0] if learned and outcome.population.engine else "-"


def _test(data: Synthetic, i: int) -> Any:
    return data.clients[i].test


def _intervals(p: Predictive, test: Any) -> list[tuple[float, ...]]:
    """(mean, low, high, y) of some examples."""
    low, high = p.interval(0.9)
    y = torch.as_tensor(test[1][: len(low)])
    return list(zip(p.mean.tolist(), low.tolist(), high.tolist(), y.tolist(), strict=True))


# --- the report ----------------------------------------------------------------------------------


def reached(results: Results) -> Sheet:
    """How near each method came."""
    engines = read_json(results.folder / FIGURES)["engines"]
    rows = [_row(item, engines[item["method"]]) for item in _in_order(results)]
    return Sheet(COLUMNS, rows, frozenset({0}))


def _in_order(results: Results) -> list[Record]:
    return [item for name in (*METHODS, "Exact") for item in results.of(method=name)]


def _row(item: Record, engine: str) -> tuple[str, ...]:
    m, cost = item["metrics"], item["cost"]
    return (
        item["method"],
        engine,
        f"{m['principal_angle']:.3f}",
        f"{m['z_error']:.3f}",
        f"{m['log_likelihood']:.3f}",
        f"{100 * m['coverage90']:.1f} %",
        human_bytes(cost["bytes_up"]) if cost["bytes_up"] else "-",
        f"{cost['seconds']:.1f}",
    )


def sheets(results: Results) -> dict[str, Sheet]:
    """Both tables; the second where the comparison was made."""
    compared = _compared(results)
    return {"Distance to the truth, and held-out predictions": reached(results)} | (
        {}
        if compared is None
        else {f"Under one protocol: {DEMO_ROUNDS} rounds each (* plug-in)": summary(compared)}
    )


def _compared(results: Results) -> Comparison | None:
    found = Results.open(results.folder / COMPARISON)
    return Comparison.of(found) if found.records else None


def page(results: Results) -> Page:
    """What ``fedpop demo`` leaves to look at."""
    kept = read_json(results.folder / FIGURES)
    task = kept["task"]
    sections = [
        Section("What was learned", EXPLAINED, reached(results)),
        Section("How it got there, and how far to trust it", figures=_figures(results, kept["points"])),
        Section(
            "One client at a time",
            "Held-out examples in order of their prediction: the bar is the 90 % interval, black dots are "
            "observations inside it, orange ones outside. The last is a new client without data: its "
            "parameters come from the learned population, so its intervals are wide, and honest.",
            figures=[
                Figure(plots.intervals(rows, "held-out examples", "y", title), "")
                for title, rows in kept["clients"]
            ],
        ),
    ]
    compared = _compared(results)
    if compared is not None:
        words = " ".join([protocol(compared), *(f"{note}." for note in notes(compared))])
        sections.append(Section("More methods, under one protocol", words, summary(compared)))
        sections.append(Section("", figures=on_the_way(compared)[:2]))
    lead = (
        f"{task['b']} clients hold {' or '.join(map(str, task['sizes']))} examples each of y = x' phi z + "
        f"noise, with {task['k']} inputs, a shared {task['k']} x {task['d']} matrix phi and private z. "
        "FedSOUL learns phi and the population of z without seeing a row of data; it is compared with its "
        "two limits and with the exact optimum."
    )
    return Page("fedpop: the synthetic task", lead, sections)


def _figures(results: Results, points: dict[str, list[dict[str, float]]]) -> list[Figure]:
    by_name = {item["method"]: item["metrics"] for item in _in_order(results)}
    exact = ("exact optimum", by_name["Exact"]["principal_angle"])
    angle = "principal-angle distance"
    by_round, by_bytes = (
        {m: [(p[x] / unit, p["principal_angle"]) for p in points[m]] for m in METHODS if m in points}
        for x, unit in (("round", 1), ("bytes", 1e6))
    )
    return [
        Figure(
            plots.curves(by_round, "round", angle, exact),
            "Distance of the learned subspace to the true one; the dashed line is the exact, non-federated "
            "optimum.",
        ),
        Figure(
            plots.curves(by_bytes, "megabytes sent, both ways", angle, exact),
            "The same against what was sent.",
        ),
        Figure(
            plots.bars(
                {n: 100 * m["coverage90"] for n, m in by_name.items()}, "coverage, %", ("90 %", 90.0), 1
            ),
            "Share of held-out observations inside their 90 % interval. Methods without uncertainty about z "
            "have intervals of noise only.",
        ),
        Figure(
            plots.bars({n: m["z_error"] for n, m in by_name.items()}, "error of z", digits=3),
            "Mean error of the clients' own parameters, after linear alignment through phi.",
        ),
    ]


REPORT = Report(name=NAME, sheets=sheets, page=page)
