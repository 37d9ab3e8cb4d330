"""Clients that keep nothing between rounds: FedSOUL with and without the state of its chains.

A stateful client goes on from where its chain stood; a stateless one starts anew each time it takes part: at
the mode of its posterior, which costs a search, or from a draw of the prior, which is the paper's rule. What
that costs depends on the steps of a round, M, and on how often a client is seen.
"""

from __future__ import annotations

from typing import Any

from fedpop.client.final import Final
from fedpop.client.sampler import Chain
from fedpop.data.image_task import ImageTask
from fedpop.methods.fedsoul import FedSOUL
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, values
from research import small_data
from research.experiment import Asked, Experiment, Job
from research.figures import points
from research.images import Cell, Run, after_title, average, budgets_of, in_words, jobs_of, missing

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


def setting_of(steps: int, share: float, passes: int | None = None) -> dict[str, Any]:
    whole = small_data.setting_of(TASK, PASSES if passes is None else passes)
    return whole | {"local_steps": steps, "participation": share}


def job(run: Run) -> list[Record]:
    """The record of one way to start chains, for one M, participation and seed."""
    task, (steps, share) = run.cell.task, (run.cell.setting[n] for n in ("local_steps", "participation"))
    federation = task.make(run.data, run.seed)
    chain = METHODS[run.cell.method]
    method = FedSOUL(task.model(run.seed), local_steps=steps, chain=chain, final=FINAL)
    return run.measured(method, federation, active=max(1, round(share * len(federation))))


def jobs(asked: Asked) -> list[Job]:
    cells = [
        Cell(TASK, setting_of(steps, share, asked.passes), name, f"M={steps}, participation {share:g}")
        for steps, share in grid()
        for name in METHODS
    ]
    return jobs_of(NAME, asked, job, cells)


# --- the report ----------------------------------------------------------------------------------

COLUMNS = (
    "M", "participation", "chains", "seeds", "accuracy", "worst tenth", "NLL", "ECE", "prior sd", "rounds",
    "head steps", "sec.",
)  # fmt: skip
LEGEND = (
    "M: steps of a chain in a round; participation: the share of clients in a round; accuracy: mean over "
    "clients, and over the worst tenth of them; prior sd: of z in the population, as it was learned; head "
    "steps: example-steps of chains, searches of the mode included. "
)


def budgets(results: Results) -> list[int]:
    return budgets_of(results, [PASSES])


def table(results: Results, passes: int) -> Sheet:
    """A row for every M, participation and start, empty where it has not been run."""
    rows: list[tuple[str, ...]] = []
    for steps, share in sorted(grid()):
        for name in METHODS:
            found = results.of(setting_of(steps, share, passes), name)
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


def figures(results: Results, passes: int) -> list[Figure]:
    """Accuracy and log-score against participation, one of each for each M."""
    scores = (("accuracy", 100.0, "test accuracy, %"), ("nll", 1.0, "NLL"))
    return [f for score in scores for f in _against_participation(results, passes, *score)]


def _against_participation(
    results: Results, passes: int, score: str, scale: float, label: str
) -> list[Figure]:
    out = []
    for steps in sorted(STEPS):
        groups = {
            name: {
                share: [scale * v for v in values(results.of(setting_of(steps, share, passes), name), score)]
                for share in sorted(SHARES)
            }
            for name in METHODS
        }
        there = {name: {x: v for x, v in group.items() if v} for name, group in groups.items()}
        if any(there.values()):
            drawn = points(there, {}, "participation", label, log_y=False, joined=True)
            out.append(Figure(drawn, f"M = {steps}. Small dots are seeds, large ones their median."))
    return out


def sheets(results: Results) -> dict[str, Sheet]:
    return {f"Stateful and stateless{after_title(n, PASSES)}": table(results, n) for n in budgets(results)}


def page(results: Results) -> Page:
    setting, many = small_data.setting_of(TASK), budgets(results)
    lead = (
        f"{setting['dataset']}, {setting['b']} clients with {setting['classes_per_client']} classes each, "
        f"half of them with {setting['n_small']} images and half with {setting['n_large']}; {in_words(many)} "
        "backbone passes, so that fewer clients a round means more rounds. 'Stateless' looks for the mode of "
        "its posterior each time, 'from the prior' starts at a draw of the prior. Everything else is "
        "FedSOUL's default."
    )
    sections = []
    for n in many:
        more = after_title(n, PASSES)
        sections += [
            Section(f"Against participation{more}", figures=figures(results, n)),
            Section(f"All numbers{more}", LEGEND, table(results, n)),
        ]
    return Page("fedpop: clients without a memory", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=1, data="cifar10", jobs=jobs, budgets=budgets, sheets=sheets, page=page
)
