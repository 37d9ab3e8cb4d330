"""What local epochs on phi cost in exactness: where theta settles, against the number of epochs.

The paper's synthetic task, where the exact optimum is known. A client's own steps pull phi towards what suits
that client alone, so with a constant step the population settles off the optimum, the further the more epochs
there are; with decreasing steps it comes back. One gradient a round (the paper's) stands beside it.
"""

from __future__ import annotations

from typing import Any

from fedpop.client.local_sgd import LocalSGD
from fedpop.client.phi_step import PhiStep
from fedpop.comparison.truth import as_matrix, exact
from fedpop.data.synthetic import SyntheticTask
from fedpop.evaluation.subspace import principal_angle
from fedpop.methods.fedsoul import FedSOUL
from fedpop.models.base import Model
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, record, values
from fedpop.server.averaging import Averaging
from fedpop.server.optimisers import SGD, Constant, Decay, MeanMove, Schedule
from research.experiment import Asked, Experiment, Job
from research.seeds import middle_of

NAME = "drift"
ROUNDS, RATE = 1000, 0.002  # ten times the rate is stable for the mean of all clients, not for each alone
EPOCHS = (1, 2, 5, 10, 20)
SCHEDULES: dict[str, Schedule] = {"constant": Constant(), "decreasing": Decay(0.25)}
PLAIN = "one gradient"


def local_name(epochs: int) -> str:
    return f"{epochs} epoch{'s' if epochs > 1 else ''}"


METHODS = (PLAIN, *(local_name(e) for e in EPOCHS))


def setting_of(schedule: str) -> dict[str, Any]:
    return {"steps": schedule, "rounds": ROUNDS, "rate": RATE}


def method_named(name: str, schedule: Schedule, model: Model, examples: int) -> FedSOUL:
    """The same rate a everywhere: the plain round's step is a / N, which is that of one full-batch epoch."""
    average = Averaging("tail") if isinstance(schedule, Constant) else Averaging("last")
    common: dict[str, Any] = {"average": average}
    if name == PLAIN:
        return FedSOUL(model, phi_step=SGD(RATE / examples, schedule), **common)
    epochs = next(e for e in EPOCHS if local_name(e) == name)
    step = PhiStep(MeanMove(), local=LocalSGD(epochs, RATE), schedule=schedule)
    return FedSOUL(model, phi_step=step, **common)


def job(schedule: str, seed: int) -> list[Record]:
    """All numbers of epochs on one draw of the task."""
    task = SyntheticTask()
    data = task.make(seed)
    examples = sum(len(c.y) for c in data.clients)
    fits = {}
    for name in METHODS:
        method = method_named(name, SCHEDULES[schedule], task.model(seed), examples)
        fits[name] = method.fit(data.clients, rounds=ROUNDS, seed=seed, progress=False)
    best = exact(task, data, seed, list(fits.values()))
    optimum = as_matrix(best.phi, data.phi)
    out = []
    for name, population in fits.items():
        phi = as_matrix(population.published["phi"], data.phi).double()
        metrics = {
            "angle_to_optimum": principal_angle(optimum, phi),
            "likelihood_gap": best.log_likelihood - population.log_likelihood().value,
            "angle_to_truth": principal_angle(data.phi, phi),
            "optimum_to_truth": principal_angle(data.phi, optimum),
        }
        cost = population.totals | {"rounds": population.rounds}
        config = population.algorithm.describe()
        out.append(record(NAME, setting_of(schedule), name, seed, metrics, cost, config))
    return out


def jobs(asked: Asked) -> list[Job]:
    return [
        Job(job, (schedule, seed), f"{schedule} steps, seed {seed}", setting_of(schedule), seed, METHODS)
        for seed in range(asked.seeds)
        for schedule in SCHEDULES
    ]


# --- the report ----------------------------------------------------------------------------------


def medians(results: Results) -> Sheet:
    """Medians over seeds."""
    columns = ("steps", "on phi", "seeds", "angle to optimum", "log-lik. gap", "angle to truth", "optimum's")
    rows = []
    for schedule in SCHEDULES:
        for name in METHODS:
            records = results.of(setting_of(schedule), name)
            if records:
                angle, gap, truth, best = (
                    middle_of(values(records, m))
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
        lines[f"local epochs, {schedule}"] = [(float(e), middle_of(v)) for e, v in of.items() if v]
        plain = values(results.of(setting_of(schedule), PLAIN), metric)
        if plain:
            lines[f"one gradient, {schedule}"] = [
                (float(e), middle_of(plain)) for e in (EPOCHS[0], EPOCHS[-1])
            ]
    return plots.curves(lines, "local epochs a round", label, log_x=True, looks=LOOKS)


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Over seeds": medians(results)}


def page(results: Results) -> Page:
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
        Section("Medians over seeds", sheet=medians(results)),
    ]
    return Page("fedpop: what local epochs on phi cost", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=3, jobs=jobs, sheets=sheets, page=page)
