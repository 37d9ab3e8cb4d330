"""Clients who mean harm: what a sum, and centres in its place, make of their messages.

The paper's synthetic task, everyone in every round, rounds of FedSOUK from a random start without the guard.
A share of the clients sends, in the place of its I and J,

    scaled      a hundred times them
    flipped     their negatives
    constant    in every coordinate ten times the mean size of what honest clients send there
    colluding   all the same vector, the honest mean less 1.5 standard deviations, which takes knowing them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.comparison.truth import as_matrix
from fedpop.data.synthetic import SyntheticTask
from fedpop.errors import TrainingError
from fedpop.evaluation.subspace import principal_angle
from fedpop.message import Tensors
from fedpop.methods.fedsouk import FedSOUK
from fedpop.priors import Normal
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, record, values
from fedpop.server.robust import Krum, Median, Robust, TrimmedMean
from research.experiment import Asked, Experiment, Job
from research.seeds import middle_of

NAME = "hostile"
CLIENTS, EXAMPLES, ROUNDS = 50, 20, 60
KINDS = ("scaled", "flipped", "constant", "colluding")
SHARES = (0.1, 0.3)
CASES = ((0.0, "none"), *((share, kind) for share in SHARES for kind in KINDS))


@dataclass(frozen=True)
class Sum(Robust):
    """The mean, as a sum has it."""

    def centre(self, vectors: Tensors) -> Tensors:
        return {n: v.mean(0) for n, v in vectors.items()}


RULES: dict[str, Robust] = {
    "sum": Sum(),
    "TrimmedMean(0.35)": TrimmedMean(0.35),
    "Median()": Median(),
    "Krum(0.35)": Krum(0.35),
}


@dataclass(frozen=True)
class Attacked(Robust):
    """A centre of messages of which the first few are hostile."""

    rule: Robust
    share: float
    kind: str

    def centre(self, vectors: Tensors) -> Tensors:
        return self.rule.centre({n: attacked(v, self.share, self.kind) for n, v in vectors.items()})


def attacked(v: Tensor, share: float, kind: str) -> Tensor:
    """Rows ``[S, D]``, of which the first share is hostile."""
    hostile = round(share * len(v))
    if not hostile:
        return v
    honest, out = v[hostile:], v.clone()
    out[:hostile] = {
        "scaled": 100 * v[:hostile],
        "flipped": -v[:hostile],
        "constant": 10 * honest.abs().mean(0).expand(hostile, -1),
        "colluding": (honest.mean(0) - 1.5 * honest.std(0)).expand(hostile, -1),
    }[kind]
    return out


def setting_of(share: float, kind: str) -> dict[str, Any]:
    about = {"clients": CLIENTS, "examples": EXAMPLES, "rounds": ROUNDS}
    return about | {"hostile": share, "send": kind}


def job(share: float, kind: str, seed: int) -> list[Record]:
    """All rules on one draw of the task."""
    task = SyntheticTask(b=CLIENTS, share_small=1.0, n_small=EXAMPLES, held_out=2)
    data, out = task.make(seed), []
    for name, rule in RULES.items():
        method = FedSOUK(task.model(seed), start="random", prior=Normal(scale=1.0), guard=None)
        angle = 1.0  # of a run that broke down
        cost: dict[str, float] = {}
        try:
            population = method.fit(
                data.clients, rounds=ROUNDS, seed=seed, aggregate=Attacked(rule, share, kind), progress=False
            )
            phi = as_matrix(population.published["phi"], data.phi)
            if bool(torch.isfinite(phi).all()):
                angle = principal_angle(data.phi, phi)
            cost = population.totals | {"rounds": population.rounds}
        except TrainingError:
            pass
        setting = setting_of(share, kind)
        out.append(record(NAME, setting, name, seed, {"angle": angle}, cost, method.describe()))
    return out


def jobs(asked: Asked) -> list[Job]:
    return [
        Job(job, (share, kind, seed), f"{100 * share:.0f} % {kind}, seed {seed}", setting_of(share, kind),
            seed, tuple(RULES))
        for seed in range(asked.seeds)
        for share, kind in CASES
    ]  # fmt: skip


# --- the report ----------------------------------------------------------------------------------


def angles(results: Results) -> Sheet:
    """Medians over seeds."""
    rows = []
    for share, kind in CASES:
        found = {name: values(results.of(setting_of(share, kind), name), "angle") for name in RULES}
        if found["sum"]:
            who = f"{100 * share:.0f} %" if share else "none"
            cells = (f"{middle_of(v):.2f}" if v else "-" for v in found.values())
            rows.append((who, kind if share else "", *cells))
    return Sheet(("hostile", "what they send", *RULES), rows)


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Sine of the angle to the true subspace": angles(results)}


def page(results: Results) -> Page:
    shown = {
        f"{100 * share:.0f} %\n{kind}" if share else "none": {
            name: values(results.of(setting_of(share, kind), name), "angle") for name in RULES
        }
        for share, kind in CASES
    }
    drawn = plots.curves(
        {name: [(float(i), middle_of(v[name])) for i, v in enumerate(shown.values()) if v[name]]
         for name in RULES},
        "case, in the order of the table", "principal angle to the truth",
    )  # fmt: skip
    lead = (
        f"{CLIENTS} clients of {EXAMPLES} examples, {ROUNDS} rounds of FedSOUK from a random start, everyone "
        "in every round, no guard; medians over seeds."
    )
    figures = [Figure(drawn, "Distance of the learned subspace to the truth.")]
    return Page("fedpop: clients who mean harm", lead, [Section("Angles", "", angles(results), figures)])


EXPERIMENT = Experiment(name=NAME, seeds=3, jobs=jobs, sheets=sheets, page=page)
