"""``fedpop demo``: the paper's synthetic task, FedSOUL beside other methods and the exact optimum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from fedpop.algorithms.engine import CHOSEN, WithEngine
from fedpop.data.synthetic import Synthetic, SyntheticTask
from fedpop.experiments.comparison import Comparison
from fedpop.experiments.comparison.page import on_the_way
from fedpop.experiments.comparison.run import compare_all
from fedpop.experiments.comparison.sheets import PROTOCOL, summary
from fedpop.experiments.comparison.terms import Terms
from fedpop.experiments.methods import entry_from
from fedpop.experiments.synthetic.run import Outcome, run_task
from fedpop.experiments.tasks import Task
from fedpop.files import writable_folder
from fedpop.population import Population
from fedpop.report import plots, terminal
from fedpop.report.html import Figure, Page, Section, Sheet, write_page
from fedpop.report.results import Results, made_by
from fedpop.runtime.progress import human_bytes

METHODS = ("FedSOUL", "FedRep-spectral", "FedRep", "FedAvg")
"""With the exact optimum beside them: how near they come to the truth."""
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
ROUNDS = 100
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
    """Two tables on the terminal, and a page to look at."""
    console = Console()
    folder = writable_folder(out)
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    task = SyntheticTask()
    console.print(
        f"[bold]fedpop demo[/bold]: {task.b} clients, {round(100 * task.share_small)} % of them with "
        f"{task.n_small} examples, the rest with {task.n_large}; y = x' phi z + noise, {task.k} inputs, "
        f"{task.d} private parameters each."
    )
    outcomes = run_task(task, seed, METHODS, progress=True, theta=False)
    Results(folder).add([outcome.record for outcome in outcomes])
    terminal.show(reached(outcomes), "Distance to the truth, and held-out predictions", console)
    comparison = compare_demo(task, seed)
    terminal.show(summary(comparison), f"Under one protocol: {ROUNDS} rounds each (* plug-in)", console)
    path = write_page(folder / "report.html", page(outcomes, task.make(seed), comparison))
    console.print(f"The report is in [bold]{path}[/bold]; open it in a browser.")


def compare_demo(task: SyntheticTask, seed: int, rounds: int = ROUNDS) -> Comparison:
    """The demo's methods under one protocol, on the same task."""
    source = Task("synthetic", task, {"validation": 0, "new_clients": 10})
    entries = [entry_from(table, "the demo") for table in COMPARED]
    terms = Terms(rounds=rounds, every=10)
    with TemporaryDirectory() as held:
        results = compare_all(source, entries, terms, [seed], Path(held), resume=False, processes=0)
        return Comparison.of(results)


# --- what is told of it ----------------------------------------------------------------------


def row(outcome: Outcome) -> tuple[str, ...]:
    """One outcome as cells of the demo's table."""
    item, population = outcome.record, outcome.population
    m, cost = item["metrics"], item["cost"]
    method = population.algorithm if population is not None and "kernel" in item["config"] else None
    return (
        item["method"],
        method.engine.removeprefix(CHOSEN) if isinstance(method, WithEngine) else "-",
        f"{m['principal_angle']:.3f}",
        f"{m['z_error']:.3f}",
        f"{m['log_likelihood']:.3f}",
        f"{100 * m['coverage90']:.1f} %",
        human_bytes(cost["bytes_up"]) if cost["bytes_up"] else "-",
        f"{cost['seconds']:.1f}",
    )


def reached(outcomes: Sequence[Outcome]) -> Sheet:
    """How near each method came."""
    return Sheet(COLUMNS, [row(o) for o in outcomes], frozenset({0}))


def page(outcomes: Sequence[Outcome], data: Synthetic, comparison: Comparison | None = None) -> Page:
    """What ``fedpop demo`` leaves to look at."""
    by_name = {o.record["method"]: o.record for o in outcomes}
    exact = by_name["Exact"]["metrics"]["principal_angle"]
    lines = {
        o.record["method"]: [(p["round"], p["principal_angle"]) for p in o.points]
        for o in outcomes
        if o.points
    }
    sent = {
        o.record["method"]: [(p["bytes"] / 1e6, p["principal_angle"]) for p in o.points]
        for o in outcomes
        if o.points
    }
    task = data.task
    sizes = sorted({len(c.y) for c in data.clients})
    figures = [
        Figure(
            plots.curves(lines, "round", "principal-angle distance", ("exact optimum", exact)),
            "Distance of the learned subspace to the true one; the dashed line is the exact, non-federated "
            "optimum.",
        ),
        Figure(
            plots.curves(
                sent, "megabytes sent, both ways", "principal-angle distance", ("exact optimum", exact)
            ),
            "The same against what was sent.",
        ),
        Figure(
            plots.bars(
                {n: 100 * r["metrics"]["coverage90"] for n, r in by_name.items()},
                "coverage, %",
                ("90 %", 90.0),
                1,
            ),
            "Share of held-out observations inside their 90 % interval. Methods without uncertainty about z "
            "have intervals of noise only.",
        ),
        Figure(
            plots.bars({n: r["metrics"]["z_error"] for n, r in by_name.items()}, "error of z"),
            "Mean error of the clients' own parameters, after linear alignment through phi.",
        ),
    ]
    fedsoul = next(o.population for o in outcomes if o.record["method"] == "FedSOUL")
    assert fedsoul is not None
    clients = [_client_figure(fedsoul, data, i) for i in (0, len(data.clients) - 1)]
    newcomer = fedsoul.new_client().predict(_test(data, 0)[0][:30])
    clients.append(
        Figure(
            _interval_figure(newcomer, _test(data, 0)[1][:30], "a client never seen, no data"),
            "A new client without data: its parameters come from the learned population, so its intervals "
            "are wide, and honest.",
        )
    )
    sections = [
        Section("What was learned", EXPLAINED, reached(outcomes)),
        Section("How it got there, and how far to trust it", figures=figures),
        Section(
            "One client at a time",
            "Held-out examples in order of their prediction: the bar is the 90 % interval, black dots are "
            "observations inside it, orange ones outside.",
            figures=clients,
        ),
    ]
    if comparison is not None:
        sections += _compared(comparison)
    lead = (
        f"{task.b} clients hold {' or '.join(map(str, sizes))} examples each of y = x' phi z + noise, with "
        f"{task.k} inputs, a shared {task.k} x {task.d} matrix phi and private z. FedSOUL learns phi and the "
        "population of z without seeing a row of data; it is compared with its two limits and "
        "with the exact optimum."
    )
    return Page("fedpop: the synthetic task", lead, sections, made_by(by_name.values()))


def _compared(comparison: Comparison) -> list[Section]:
    """More methods, under the protocol of ``fedpop compare``."""
    return [
        Section("More methods, under one protocol", PROTOCOL, summary(comparison)),
        Section("", figures=on_the_way(comparison)[:2]),
    ]


def _test(data: Synthetic, i: int) -> Any:
    return data.clients[i].test


def _client_figure(population: Population, data: Synthetic, i: int) -> Figure:
    x, y = _test(data, i)
    p = population.predict(i, x[:30])
    n = len(data.clients[i].y)
    return Figure(
        _interval_figure(p, y[:30], f"client {i}: {n} examples"),
        f"A client with {n} examples of its own.",
    )


def _interval_figure(p: Any, y: Any, title: str) -> str:
    low, high = p.interval(0.9)
    rows = list(zip(p.mean.tolist(), low.tolist(), high.tolist(), torch.as_tensor(y).tolist(), strict=True))
    return plots.intervals(rows, "held-out examples", "y", title)
