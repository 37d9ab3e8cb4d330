"""The report of ``fedpop experiment restarts``."""

from __future__ import annotations

from pathlib import Path

from fedpop.experiments.synthetic import LOCAL_OPTIMUM
from fedpop.report.html import Section, Sheet, write_report
from fedpop.report.results import Results
from fedpop.report.synthetic import name_of

TEXT = (
    "gap: log-likelihood below the exact optimum's, of the default run and of each restart from a random "
    f"start; settled: the best of them is within {LOCAL_OPTIMUM:g}. angle: principal-angle distance to the "
    "truth of the run that was returned, beside the exact optimum's."
)


def summary_table(results: Results) -> Sheet:
    """One row for each seed that had missed the optimum."""
    columns = ("setting", "seed", "gap, default", "gaps, restarts", "settled", "angle", "exact's")
    rows = []
    for r in results.records:
        m = r["metrics"]
        again = [f"{m[f'gap_{i}']:.1f}" for i in range(1, r["setting"]["restarts"] + 1)]
        rows.append(
            (
                name_of(r["setting"]),
                str(r["seed"]),
                f"{m['gap_0']:.1f}",
                ", ".join(again),
                "yes" if m["settled"] else "no",
                f"{m['principal_angle']:.3f}",
                f"{m['principal_angle_exact']:.3f}",
            )
        )
    return Sheet(columns, rows)


def experiment_report(results: Results, path: Path) -> Path:
    settled = sum(r["metrics"]["settled"] for r in results.records)
    lead = (
        "The seeds of the synthetic experiment whose default FedSOUL ended in a local optimum, run again "
        f"with restarts from random starts: {settled:.0f} of {len(results.records)} are settled by them."
    )
    section = Section("Seed by seed", TEXT, summary_table(results))
    return write_report(path, "fedpop: restarts", lead, [section])
