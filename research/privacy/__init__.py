"""What differential privacy costs: the learned subspace against epsilon, for several numbers of clients.

The paper's synthetic task with five examples a client. One client in ten takes part in a round, and starts
are random, since start questions see data; everything else is FedSOUL's default, as ``privacy=`` leaves it.
"""

from __future__ import annotations

import warnings
from typing import Any

from fedpop.comparison.truth import as_matrix
from fedpop.data.synthetic import SyntheticTask
from fedpop.errors import FedpopWarning
from fedpop.evaluation.subspace import principal_angle
from fedpop.methods.fedsoul import FedSOUL
from fedpop.priors import Normal
from fedpop.privacy import Gaussian
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, record, values
from research.experiment import Asked, Experiment, Job
from research.seeds import middle_of

NAME = "privacy"
ROUNDS, SHARE, DELTA = 400, 0.1, 1e-6
CLIENTS = (300, 1000, 3000)
EPSILONS = (8.0, 4.0, 2.0, 1.0)
OPEN = "no privacy"


def private_name(epsilon: float) -> str:
    return f"epsilon {epsilon:g}"


METHODS = (OPEN, *(private_name(e) for e in EPSILONS))


def setting_of(clients: int) -> dict[str, Any]:
    return {"clients": clients, "rounds": ROUNDS, "share": SHARE, "delta": DELTA}


def job(clients: int, seed: int) -> list[Record]:
    """All budgets on one draw of the task."""
    task = SyntheticTask(b=clients, share_small=1.0, held_out=2)
    data, out = task.make(seed), []
    for name in METHODS:
        budget = next((e for e in EPSILONS if private_name(e) == name), None)
        privacy = None if budget is None else Gaussian(epsilon=budget, delta=DELTA)
        method = FedSOUL(task.model(seed), start="random", prior=Normal(scale=1.0))
        with warnings.catch_warnings():  # few clients are told so: that is what is measured
            warnings.simplefilter("ignore", FedpopWarning)
            population = method.fit(
                data.clients, rounds=ROUNDS, participation=SHARE, seed=seed, privacy=privacy, progress=False
            )
        phi = as_matrix(population.published["phi"], data.phi)
        metrics = {"angle": principal_angle(data.phi, phi)}
        cost = population.totals | {"rounds": population.rounds}
        out.append(record(NAME, setting_of(clients), name, seed, metrics, cost, method.describe()))
    return out


def jobs(asked: Asked) -> list[Job]:
    return [
        Job(job, (clients, seed), f"{clients} clients, seed {seed}", setting_of(clients), seed, METHODS)
        for seed in range(asked.seeds)
        for clients in CLIENTS
    ]


# --- the report ----------------------------------------------------------------------------------


def angles(results: Results) -> Sheet:
    """Medians over seeds."""
    rows = []
    for clients in CLIENTS:
        found = {name: values(results.of(setting_of(clients), name), "angle") for name in METHODS}
        if found[OPEN]:
            cells = (f"{middle_of(v):.4f}" if v else "-" for v in found.values())
            rows.append((str(clients), str(len(found[OPEN])), *cells))
    return Sheet(("clients", "seeds", *METHODS), rows)


def _curve(results: Results) -> str:
    lines = {}
    for clients in CLIENTS:
        of = {e: values(results.of(setting_of(clients), private_name(e)), "angle") for e in EPSILONS}
        if any(of.values()):
            lines[f"{clients} clients"] = [(e, middle_of(v)) for e, v in sorted(of.items()) if v]
    return plots.curves(lines, "epsilon", "principal angle to the truth", log_x=True)


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Angle to the true subspace": angles(results)}


def page(results: Results) -> Page:
    what = "Distance of the learned subspace to the truth against what was spent; medians over seeds."
    lead = (
        f"The synthetic task with five examples a client, {ROUNDS} rounds, one client in ten a round, from "
        f"random starts; delta {DELTA:g}, against readers of theta."
    )
    sections = [
        Section("What privacy costs", figures=[Figure(_curve(results), what)]),
        Section("Medians over seeds", sheet=angles(results)),
    ]
    return Page("fedpop: what differential privacy costs", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=3, jobs=jobs, sheets=sheets, page=page)
