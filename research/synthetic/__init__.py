"""The paper's synthetic experiments: how near phi and z come to the truth, and to the exact optimum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedpop.comparison import truth
from fedpop.comparison.truth import Contender, Outcome, held_out, run_beside_truth, setting_of
from fedpop.data.synthetic import Synthetic, SyntheticTask
from fedpop.errors import EstimateError
from fedpop.methods import FedSOUL
from fedpop.population import Population
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, values
from research.experiment import Asked, Experiment, Job
from research.figures import spread
from research.seeds import middle_of

NAME = "synthetic"
LOCAL_OPTIMUM = 5.0
"""A run whose log-likelihood is this far below the exact optimum's sits in another, local one."""

TASKS: tuple[SyntheticTask, ...] = (
    SyntheticTask(b=100, d=2, k=20),
    SyntheticTask(b=50, d=2, k=20),
    SyntheticTask(b=200, d=2, k=20),
    SyntheticTask(b=100, d=2, k=50),
    SyntheticTask(b=100, d=2, k=5),
    SyntheticTask(b=100, d=5, k=20),
    SyntheticTask(share_small=0.5),
    SyntheticTask(n_small=2),
    SyntheticTask(share_small=0.5, n_small=2),
)
MAIN = 6
"""The first so many tasks are the six (b, d, k) of the paper; the rest vary shares and sizes."""

SAMPLED = "FedSOUL-sampled"
"""FedSOUL by Algorithm 1: with everyone answering, the default takes the exact engine on this task."""
METHODS: dict[str, Contender] = {
    "FedSOUL": truth.METHODS["FedSOUL"],
    SAMPLED: (lambda model: FedSOUL(model, engine="sampled"), 500),
    "FedSOUL-paper": (FedSOUL.paper, 1000),
} | truth.METHODS


def name_of(setting: dict[str, Any]) -> str:
    """``100,2,20`` for (b, d, k), and what else is unusual."""
    name = f"{setting['b']},{setting['d']},{setting['k']}"
    if setting["share_small"] != 0.9:
        name += f" {100 * setting['share_small']:.0f}%"
    if setting["n_small"] != 5:
        name += f" N={setting['n_small']}"
    return name


def run_task(
    task: SyntheticTask, seed: int, methods: Sequence[str] = tuple(METHODS), *, theta: bool = True
) -> list[Outcome]:
    """Methods and the exact optimum on one task and seed; of FedSOUL also whether it sits in a local optimum
    and, with ``theta``, the coverage of intervals that do not take theta for granted."""
    outcomes = run_beside_truth(NAME, task, seed, {name: METHODS[name] for name in methods})
    for outcome in outcomes:
        name, metrics = outcome.record["method"], outcome.record["metrics"]
        if name in ("FedSOUL", SAMPLED):
            metrics["local_optimum"] = float(metrics["likelihood_gap"] > LOCAL_OPTIMUM)
        if theta and name == "FedSOUL":
            metrics["coverage90_theta"] = theta_coverage(outcome.population, task.make(seed))
    return outcomes


def theta_coverage(population: Population, data: Synthetic) -> float | None:
    """Coverage when theta is drawn from its asymptotic law too; None where its information is not
    positive."""
    try:
        predict = lambda i, x: population.predict(i, x, theta_uncertainty=True)  # noqa: E731
        return held_out(predict, data)["coverage90"]
    except EstimateError:
        return None


def job(task: SyntheticTask, seed: int) -> list[Record]:
    """The records of one task and seed, for a worker process."""
    return [outcome.record for outcome in run_task(task, seed)]


def jobs(asked: Asked) -> list[Job]:
    """The paper's six settings over all seeds, then the variants."""
    out = []
    for kind, tasks in (("main", TASKS[:MAIN]), ("variant", TASKS[MAIN:])):
        for seed in range(asked.seeds):
            for task in tasks:
                setting = setting_of(task)
                label = f"{kind} {name_of(setting)}, seed {seed}"
                out.append(Job(job, (task, seed), label, setting, seed, (*METHODS, "Exact")))
    return out


# --- the report ----------------------------------------------------------------------------------

LEGEND = (
    "setting: (b, d, k), with 90 % of the clients having N = 5 examples and the rest 10, unless another "
    "share or N is given. angle: principal-angle distance to the truth, and as a ratio to the exact's. "
    "z error: mean error of z after alignment. log-lik.: held-out predictive log-likelihood per example. "
    "90 % cov.: coverage of the 90 % intervals, mean over seeds, beside the exact optimum's; these plug-in "
    "intervals ignore the uncertainty of theta, 'theta too' includes it. local: seeds that ended in a local "
    "optimum."
)


SETTING = "setting: clients b, dimensions d of z, inputs k"


def medians(results: Results) -> Sheet:
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
        f"{middle_of(values(records, 'principal_angle')):.3f}",
        f"{middle_of(ratios):.3f}",
        f"{middle_of(values(records, 'z_error')):.3f}",
        f"{middle_of(values(records, 'log_likelihood')):.3f}",
        f"{100 * mean(values(records, 'coverage90')):.1f} %",
        f"{100 * mean(values(records, 'coverage90_exact')):.1f} %",
        f"{100 * mean(theta):.1f} %" if theta else "-",
        f"{sum(local):.0f}" if local else "-",
    )


def ordered_settings(results: Results) -> list[dict[str, Any]]:
    """Settings in the experiment's own order."""
    known = [setting_of(task) for task in TASKS]
    present = results.settings()
    return [s for s in known if s in present] + [s for s in present if s not in known]


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Over seeds": medians(results)}


def page(results: Results) -> Page:
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
        Figure(
            spread(groups, SETTING, "principal-angle distance"),
            "Every dot is a seed, the line the median.",
        ),
        Figure(
            spread(errors, SETTING, "error of z"),
            "Mean error of the clients' own parameters after alignment.",
        ),
    ]
    sections = [
        Section("Distance to the truth", figures=figures, wide=True),
        Section("Medians over seeds", LEGEND, medians(results)),
    ]
    lead = (
        "The paper's synthetic task in all its settings. FedSOUL is the default preset, which takes the "
        "exact engine here, FedSOUL-sampled the same without it; FedSOUL-paper is Algorithm 1 to the letter; "
        "FedRep has exact local heads, from a random start and from FedSOUL's own (spectral)."
    )
    return Page("fedpop: the synthetic experiments", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=10, jobs=jobs, sheets=sheets, page=page)
