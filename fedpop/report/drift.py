"""The report of ``fedpop experiment drift``."""

from __future__ import annotations

from pathlib import Path

from fedpop.experiments.drift import EPOCHS, METHODS, PLAIN, RATE, ROUNDS, SCHEDULES, local_name, setting_of
from fedpop.report import plots
from fedpop.report.html import Figure, Section, Sheet, write_report
from fedpop.report.results import Results, middle, values


def summary_table(results: Results) -> Sheet:
    """Medians over seeds."""
    columns = ("steps", "on phi", "seeds", "angle to optimum", "log-lik. gap", "angle to truth", "optimum's")
    rows = []
    for schedule in SCHEDULES:
        for name in METHODS:
            records = results.of(setting_of(schedule), name)
            if records:
                angle, gap, truth, best = (
                    middle(values(records, m))
                    for m in ("angle_to_optimum", "likelihood_gap", "angle_to_truth", "optimum_to_truth")
                )
                cells = (f"{angle:.4f}", f"{gap:.3f}", f"{truth:.4f}", f"{best:.4f}")
                rows.append((schedule, name, str(len(records)), *cells))
    return Sheet(columns, rows, frozenset(i for i, r in enumerate(rows) if r[1] == PLAIN))


LOOKS = {
    f"{what}, {schedule}": (shade, dash)
    for schedule, shade in zip(SCHEDULES, ("#D55E00", "#0072B2"), strict=True)
    for what, dash in (("local epochs", "-"), ("one gradient", "--"))
}


def _curve(results: Results, metric: str, label: str) -> str:
    lines = {}
    for schedule in SCHEDULES:
        of = {e: values(results.of(setting_of(schedule), local_name(e)), metric) for e in EPOCHS}
        lines[f"local epochs, {schedule}"] = [(float(e), middle(v)) for e, v in of.items() if v]
        plain = values(results.of(setting_of(schedule), PLAIN), metric)
        if plain:
            lines[f"one gradient, {schedule}"] = [(float(e), middle(plain)) for e in (EPOCHS[0], EPOCHS[-1])]
    return plots.curves(lines, "local epochs a round", label, log_x=True, looks=LOOKS)


def experiment_report(results: Results, path: Path) -> Path:
    """The page."""
    figures = [
        Figure(
            _curve(results, "angle_to_optimum", "principal angle to the optimum"),
            "Distance of the learned subspace to the exact optimum's; medians over seeds. The dashed lines "
            "are the plain round, which sends one gradient.",
        ),
        Figure(
            _curve(results, "likelihood_gap", "marginal log-likelihood below the optimum"),
            "The same as a loss of marginal log-likelihood, over all clients.",
        ),
    ]
    lead = (
        f"The synthetic task with 100 clients, {ROUNDS} rounds, steps a = {RATE} on phi: constant, with the "
        "mean of the last quarter of the rounds, or falling to zero from a quarter of them on, with the last "
        "iterate. Everything but the steps on phi is FedSOUL's default."
    )
    sections = [
        Section("Drift", figures=figures),
        Section("Medians over seeds", sheet=summary_table(results)),
    ]
    return write_report(path, "fedpop: what local epochs on phi cost", lead, sections)
