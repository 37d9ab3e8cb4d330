"""Do restarts settle local optima? The seeds of the synthetic experiment that missed the optimum, run again.

``fit(restarts=3)`` adds three runs from random starts to the default's own and returns the one of the largest
marginal likelihood. The seeds are those whose record in the synthetic results says ``local_optimum``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from fedpop.data.synthetic import SyntheticTask
from fedpop.evaluation.subspace import principal_angle
from fedpop.experiments.runner import Job
from fedpop.experiments.synthetic import LOCAL_OPTIMUM, as_matrix, exact, method_named
from fedpop.files import read_json
from fedpop.report.results import Record, Results, record

EXPERIMENT = "restarts"
METHOD = "FedSOUL"
RESTARTS = 3


def setting_of(setting: dict[str, Any], restarts: int) -> dict[str, Any]:
    return setting | {"restarts": restarts}


def job(setting: dict[str, Any], restarts: int, seed: int) -> list[Record]:
    """Each run's likelihood below the exact optimum's, and the returned one's distance to the truth."""
    torch.set_num_threads(1)
    task = SyntheticTask(**setting)
    data = task.make(seed)
    method, rounds = method_named(METHOD, task.model(seed))
    with tempfile.TemporaryDirectory() as folder:
        population = method.fit(
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
    return [record(EXPERIMENT, setting_of(setting, restarts), METHOD, seed, metrics, cost, config)]


def jobs(synthetic: Results, restarts: int) -> list[Job]:
    """One job for each seed that missed."""
    missed = [r for r in synthetic.of(method=METHOD) if r["metrics"].get("local_optimum")]
    return [
        Job(
            job,
            (r["setting"], restarts, r["seed"]),
            f"{r['setting']['b']},{r['setting']['d']},{r['setting']['k']} seed {r['seed']}",
            setting_of(r["setting"], restarts),
            r["seed"],
            (METHOD,),
        )
        for r in missed
    ]
