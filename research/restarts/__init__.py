"""Are local optima left? The seeds of the synthetic experiment that missed the optimum without annealing.

With the noise's variance at its value from the first round on, six of ninety seeds ended far below the
optimum. They are run again as they are now, and by ``fit(restarts=3)``, which adds three runs from random
starts to the default's own and returns the one of the largest marginal likelihood.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fedpop.comparison.truth import METHODS, as_matrix, exact
from fedpop.comparison.truth import setting_of as of
from fedpop.data.synthetic import SyntheticTask
from fedpop.evaluation.subspace import principal_angle
from fedpop.files import read_json
from fedpop.report.html import Page, Section, Sheet
from fedpop.report.results import Record, Results, record
from research.experiment import Asked, Experiment, Job
from research.synthetic import LOCAL_OPTIMUM, name_of

NAME = "restarts"
METHOD = "FedSOUL"
RESTARTS = 3
"""Further runs from random starts."""
MISSED = (
    (SyntheticTask(n_small=2), (0, 1, 3)),
    (SyntheticTask(b=100, d=2, k=50), (0,)),
    (SyntheticTask(b=100, d=5, k=20), (3, 4)),
)
"""Tasks, and seeds of theirs."""


def setting_of(setting: dict[str, Any], restarts: int) -> dict[str, Any]:
    return setting | {"restarts": restarts}


def job(setting: dict[str, Any], restarts: int, seed: int) -> list[Record]:
    """Each run's likelihood below the exact optimum's, and the returned one's distance to the truth."""
    task = SyntheticTask(**setting)
    data = task.make(seed)
    build, rounds = METHODS[METHOD]
    with tempfile.TemporaryDirectory() as folder:
        population = build(task.model(seed)).fit(
            data.clients, rounds=rounds, seed=seed, restarts=restarts, out=folder, progress=False
        )
        scores = read_json(Path(folder) / "restarts.json")["log_likelihood"]
    best = exact(task, data, seed, [population])
    gaps = [best.log_likelihood - score for score in scores]
    metrics: dict[str, float | None] = {f"gap_{i}": gap for i, gap in enumerate(gaps)}
    metrics |= {
        "gap": min(gaps),
        "settled": float(min(gaps) <= LOCAL_OPTIMUM),
        "principal_angle": principal_angle(data.phi, as_matrix(population.published["phi"], data.phi)),
        "principal_angle_exact": principal_angle(data.phi, as_matrix(best.phi, data.phi)),
    }
    config = population.algorithm.describe()
    cost = population.totals | {"rounds": population.rounds}
    return [record(NAME, setting_of(setting, restarts), METHOD, seed, metrics, cost, config)]


def jobs(asked: Asked) -> list[Job]:
    return [
        Job(
            job,
            (of(task), RESTARTS, seed),
            f"{name_of(of(task))}, seed {seed}",
            setting_of(of(task), RESTARTS),
            seed,
            (METHOD,),
        )
        for task, seeds in MISSED
        for seed in seeds
    ]


# --- the report ----------------------------------------------------------------------------------

TEXT = (
    "gap: log-likelihood below the exact optimum's, of the default run and of each restart from a random "
    f"start; settled: the best of them is within {LOCAL_OPTIMUM:g}. angle: principal-angle distance to the "
    "truth of the run that was returned, beside the exact optimum's."
)


def seed_by_seed(results: Results) -> Sheet:
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


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Seed by seed": seed_by_seed(results)}


def page(results: Results) -> Page:
    settled = sum(r["metrics"]["settled"] for r in results.records)
    lead = (
        "The seeds of the synthetic experiment that ended in a local optimum before the noise's variance was "
        "annealed, run as they are now, and with restarts from random starts: "
        f"{settled:.0f} of {len(results.records)} reach the optimum."
    )
    section = Section("Seed by seed", TEXT, seed_by_seed(results))
    return Page("fedpop: restarts", lead, [section])


EXPERIMENT = Experiment(name=NAME, seeds=None, jobs=jobs, sheets=sheets, page=page)
