"""Clients that keep nothing between rounds: FedSOUL with and without the state of its chains.

A stateful client goes on from where its chain stood; a stateless one starts anew each time it takes part: at
the mode of its posterior, which costs a search, or from a draw of the prior, which is the paper's rule. What
that costs depends on the steps of a round, M, and on how often a client is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedpop.client.final import Final
from fedpop.client.sampler import Chain
from fedpop.data.image_task import ImageTask
from fedpop.experiments import small_data
from fedpop.experiments.experiment import Asked, Experiment
from fedpop.experiments.image_runs import average, jobs_of, measured, missing
from fedpop.experiments.runner import Job
from fedpop.methods.fedsoul import FedSOUL
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, values

NAME = "stateless"
PASSES = 15_000
"""A thousand rounds where one client takes part: a minute or two."""
TASK = ImageTask("cifar10", 5, validation=0)
FINAL = Final()
STEPS = (10, 1, 50)
"""M, the default first."""
SHARES = (0.1, 0.01, 0.05, 0.5)
"""Of the clients that take part in a round, the paper's first."""
METHODS = {
    "stateful": Chain(),
    "stateless": Chain(stateful=False),
    "stateless, from the prior": Chain(stateful=False, follow=False),
}


def grid() -> list[tuple[int, float]]:
    return [(steps, share) for steps in STEPS for share in SHARES]


def setting_of(steps: int, share: float) -> dict[str, Any]:
    own = {"passes": PASSES, "local_steps": steps, "participation": share}
    return small_data.setting_of(TASK) | own


def job(index: int, name: str, seed: int, data: str | None, folder: str) -> list[Record]:
    """The record of one way to start chains, for one M, participation and seed."""
    torch.set_num_threads(1)
    steps, share = grid()[index]
    federation = TASK.make(data, seed)
    method = FedSOUL(TASK.model(seed), local_steps=steps, chain=METHODS[name], final=FINAL)
    active = max(1, round(share * len(federation)))
    setting = setting_of(steps, share)
    return measured(NAME, setting, name, method, federation, seed, Path(folder), active=active)


def jobs(asked: Asked) -> list[Job]:
    cells = [(t, name) for t in range(len(grid())) for name in METHODS]
    labels = [f"M={steps}, participation {share:g}" for steps, share in grid()]
    told = [setting_of(steps, share) for steps, share in grid()]
    return jobs_of(asked, job, [TASK] * len(told), labels, told, cells)


# --- what is told of it ----------------------------------------------------------------------

COLUMNS = (
    "M", "participation", "chains", "seeds", "accuracy", "worst tenth", "NLL", "ECE", "prior sd", "rounds",
    "head steps", "sec.",
)  # fmt: skip
LEGEND = (
    "M: steps of a chain in a round; participation: the share of clients in a round; accuracy: mean over "
    "clients, and over the worst tenth of them; prior sd: of z in the population, as it was learned; head "
    "steps: example-steps of chains, searches of the mode included. "
)


def table(results: Results) -> Sheet:
    """A row for every M, participation and start, empty where it has not been run."""
    rows: list[tuple[str, ...]] = []
    for steps, share in sorted(grid()):
        for name in METHODS:
            found = results.of(setting_of(steps, share), name)
            label = (str(steps), f"{share:g}", name, str(len(found)))
            if none := missing(found, len(COLUMNS) - 4):
                rows.append((*label, *none))
                continue
            rows.append(
                (
                    *label,
                    f"{average(found, 'accuracy', scale=100):.1f} %",
                    f"{average(found, 'accuracy_worst_decile', scale=100):.1f} %",
                    *[f"{average(found, m):.3f}" for m in ("nll", "ece", "prior_sd")],
                    f"{average(found, 'rounds', 'cost'):.0f}",
                    f"{average(found, 'head_steps', 'cost'):,.0f}",
                    f"{average(found, 'seconds', 'cost'):.0f}",
                )
            )
    return Sheet(COLUMNS, rows, frozenset(i for i, r in enumerate(rows) if r[2] == "stateful"))


def figures(results: Results, score: str, scale: float, label: str) -> list[Figure]:
    """One for each M: the score against participation."""
    out = []
    for steps in sorted(STEPS):
        groups = {
            name: {
                share: [scale * v for v in values(results.of(setting_of(steps, share), name), score)]
                for share in sorted(SHARES)
            }
            for name in METHODS
        }
        there = {name: {x: v for x, v in group.items() if v} for name, group in groups.items()}
        if any(there.values()):
            drawn = plots.points(there, {}, "participation", label, log_y=False, joined=True)
            out.append(Figure(drawn, f"M = {steps}. Small dots are seeds, large ones their median."))
    return out


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Stateful and stateless": table(results)}


def page(results: Results) -> Page:
    setting = small_data.setting_of(TASK)
    lead = (
        f"{setting['dataset']}, {setting['b']} clients with {setting['classes_per_client']} classes each, "
        f"half of them with {setting['n_small']} images and half with {setting['n_large']}; {PASSES:,} "
        "backbone passes, so that fewer clients a round means more rounds. 'Stateless' looks for the mode of "
        "its posterior each time, 'from the prior' starts at a draw of the prior. Everything else is "
        "FedSOUL's default."
    )
    drawn = [*figures(results, "accuracy", 100.0, "test accuracy, %"), *figures(results, "nll", 1.0, "NLL")]
    sections = [
        Section("Against participation", figures=drawn),
        Section("All numbers", LEGEND, table(results)),
    ]
    return Page("fedpop: clients without a memory", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=1, data="cifar10", jobs=jobs, sheets=sheets, page=page)
