"""The reports of the synthetic task: the demo's, and that of the whole experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedpop.data.synthetic import Synthetic
from fedpop.experiments.comparison import Comparison
from fedpop.experiments.synthetic import METHODS, Outcome
from fedpop.population import Population
from fedpop.report import plots
from fedpop.report.html import Figure, Section, Sheet, write_report
from fedpop.report.results import Record, Results, mean, middle, values
from fedpop.runtime.progress import human_bytes

COLUMNS = (
    "method",
    "kernel",
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


def row(item: Record) -> tuple[str, ...]:
    """One record as cells of the demo's table."""
    m, cost = item["metrics"], item["cost"]
    kernel = item["config"].get("kernel")
    return (
        item["method"],
        kernel["kind"] if isinstance(kernel, dict) else "-",
        f"{m['principal_angle']:.3f}",
        f"{m['z_error']:.3f}",
        f"{m['log_likelihood']:.3f}",
        f"{100 * m['coverage90']:.1f} %",
        human_bytes(cost["bytes_up"]) if cost["bytes_up"] else "-",
        f"{cost['seconds']:.1f}",
    )


def demo_table(outcomes: Sequence[Outcome]) -> Sheet:
    return Sheet(COLUMNS, [row(o.record) for o in outcomes], frozenset({0}))


def demo_report(
    path: Path, outcomes: Sequence[Outcome], data: Synthetic, comparison: Comparison | None = None
) -> Path:
    """What ``make demo`` leaves to look at."""
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
        Section("What was learned", EXPLAINED, demo_table(outcomes)),
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
    return write_report(path, "fedpop: the synthetic task", lead, sections)


def _compared(comparison: Comparison) -> list[Section]:
    """More methods, under the protocol of ``fedpop compare``."""
    from fedpop.report import compare

    return [
        Section("More methods, under one protocol", compare.PROTOCOL, compare.summary(comparison)),
        Section("", figures=compare.on_the_way(comparison)[:2]),
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


# --- the whole experiment --------------------------------------------------------------------


def name_of(setting: dict[str, Any]) -> str:
    """``100,2,20`` for (b, d, k), and what else is unusual."""
    name = f"{setting['b']},{setting['d']},{setting['k']}"
    if setting["share_small"] != 0.9:
        name += f" {100 * setting['share_small']:.0f}%"
    if setting["n_small"] != 5:
        name += f" N={setting['n_small']}"
    return name


LEGEND = (
    "setting: (b, d, k), with 90 % of the clients having N = 5 examples and the rest 10, unless another "
    "share or N is given. angle: principal-angle distance to the truth, and as a ratio to the exact's. "
    "z error: mean error of z after alignment. log-lik.: held-out predictive log-likelihood per example. "
    "90 % cov.: coverage of the 90 % intervals, mean over seeds, beside the exact optimum's; these plug-in "
    "intervals ignore the uncertainty of theta, 'theta too' includes it. local: seeds that ended in a local "
    "optimum."
)


def summary_table(results: Results) -> Sheet:
    """Medians over seeds, setting by setting and method by method."""
    columns = (
        "setting",
        "method",
        "seeds",
        "angle",
        "/ exact",
        "z error",
        "log-lik.",
        "90 % cov.",
        "exact's",
        "theta too",
        "local",
    )
    rows = []
    for setting in ordered_settings(results):
        for method in ("Exact", *METHODS):
            records = results.of(setting, method)
            if records:
                rows.append((name_of(setting), method, *_cells(records)))
    return Sheet(columns, rows, frozenset(i for i, r in enumerate(rows) if r[1] == "FedSOUL"))


def _cells(records: Sequence[Record]) -> tuple[str, ...]:
    ratios = [
        r["metrics"]["principal_angle"] / r["metrics"]["principal_angle_exact"]
        for r in records
        if r["metrics"]["principal_angle"] is not None
    ]
    theta = values(records, "coverage90_theta")
    local = values(records, "local_optimum")
    return (
        str(len(records)),
        f"{middle(values(records, 'principal_angle')):.3f}",
        f"{middle(ratios):.3f}",
        f"{middle(values(records, 'z_error')):.3f}",
        f"{middle(values(records, 'log_likelihood')):.3f}",
        f"{100 * mean(values(records, 'coverage90')):.1f} %",
        f"{100 * mean(values(records, 'coverage90_exact')):.1f} %",
        f"{100 * mean(theta):.1f} %" if theta else "-",
        f"{sum(local):.0f}" if local else "-",
    )


def ordered_settings(results: Results) -> list[dict[str, Any]]:
    """Settings in the experiment's own order."""
    from fedpop.experiments.synthetic import TASKS, setting_of

    known = [setting_of(task) for task in TASKS]
    present = results.settings()
    return [s for s in known if s in present] + [s for s in present if s not in known]


def experiment_report(results: Results, path: Path) -> Path:
    """The report of ``fedpop experiment synthetic``."""
    settings = ordered_settings(results)
    groups = {
        name_of(s).replace(" ", "\n"): {
            m: values(results.of(s, m), "principal_angle") for m in ("Exact", *METHODS)
        }
        for s in settings
    }
    errors = {
        name: {m: values(results.of(s, m), "z_error") for m in ("Exact", *METHODS)}
        for name, s in zip(groups, settings, strict=True)
    }
    figures = [
        Figure(plots.spread(groups, "principal-angle distance"), "Every dot is a seed, the line the median."),
        Figure(
            plots.spread(errors, "error of z"), "Mean error of the clients' own parameters after alignment."
        ),
    ]
    sections = [
        Section("Distance to the truth", figures=figures, wide=True),
        Section(
            "Medians over seeds",
            LEGEND,
            sheet=summary_table(results),
        ),
    ]
    lead = (
        "The paper's synthetic task in all its settings. FedSOUL is the default preset, FedSOUL-paper is "
        "Algorithm 1 to the letter; FedRep has exact local heads, from a random start and from "
        "FedSOUL's own (spectral)."
    )
    return write_report(path, "fedpop: the synthetic experiments", lead, sections)
