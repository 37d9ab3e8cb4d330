"""The paper's figure on small clients: 100 of them with some classes of CIFAR each, most with few images.

A share of the clients has 5 or 10 images (or 2, as in the supplement) and the rest 25, ten take part in a
round, and every method may spend the same number of backbone passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedpop.data.image_task import ImageTask
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, values
from research.experiment import Asked, Experiment, Job
from research.figures import spread
from research.images import (
    COLUMNS,
    LEGEND,
    Cell,
    Run,
    after_title,
    budgets_of,
    in_search,
    in_words,
    jobs_of,
    methods,
    rows,
    settings_of,
)
from research.seeds import interval95

NAME = "small-data"
PASSES = 60_000
CLIENTS = 100
RIVAL = "FedRep"
FIRST_METHODS = ("FedSOUL", RIVAL, "APFL", "FedAvg-FT")
METHODS = methods("small_data")
GROUPS = (("cifar10", 5), ("cifar10", 2), ("cifar100", 20))
"""Images, and how many classes a client has."""
SHARES, SIZES = (10, 50, 90), (5, 10)
"""Of the clients with few images, and how many these have."""
FEWEST = (("cifar10", 5), 2)
"""A group that has this size, too, as in the paper's supplement."""
TASKS = tuple(
    ImageTask(*group, small=share, n_small=n, large=CLIENTS - share, n_large=25, validation=0)
    for group in GROUPS
    for n in (*[few for g, few in [FEWEST] if g == group], *SIZES)
    for share in SHARES
)


def setting_of(task: ImageTask, passes: int | None = None) -> dict[str, Any]:
    return {
        "dataset": task.images,
        "classes_per_client": task.classes,
        "b": task.small + task.large,
        "share_small": task.small / (task.small + task.large),
        "n_small": task.n_small,
        "n_large": task.n_large,
        "passes": PASSES if passes is None else passes,
    }


def group_of(setting: dict[str, Any]) -> str:
    return f"{setting['dataset']} S={setting['classes_per_client']}"


def name_of(setting: dict[str, Any]) -> str:
    return f"{100 * setting['share_small']:.0f} % with {setting['n_small']}"


def job(run: Run) -> list[Record]:
    """The record of one method on one task and seed."""
    task = run.cell.task
    return run.measured(METHODS[run.cell.method](task.model(run.seed)), task.make(run.data, run.seed))


def jobs(asked: Asked) -> list[Job]:
    """The first stage for all seeds; then its tasks with the other methods; then the other tasks, those with
    the fewest images first."""

    def cell(task: ImageTask, name: str) -> Cell:
        setting = setting_of(task, asked.passes)
        return Cell(task, setting, name, f"{group_of(setting)}, {name_of(setting)}")

    def first(task: ImageTask) -> bool:
        return group_of(setting_of(task)) == group_of(setting_of(TASKS[0])) and task.n_small in SIZES

    stages = (
        [cell(task, name) for task in TASKS if first(task) for name in FIRST_METHODS],
        [cell(task, name) for task in TASKS if first(task) for name in METHODS if name not in FIRST_METHODS],
        [cell(task, name) for task in TASKS if not first(task) for name in METHODS],
    )
    return [j for cells in stages for j in jobs_of(NAME, asked, job, cells, METHODS)]


# --- the report ----------------------------------------------------------------------------------


Settings = Sequence[dict[str, Any]]


def budgets(results: Results) -> list[int]:
    return budgets_of(results, [PASSES])


def groups(results: Results) -> dict[str, Settings]:
    """The settings of each set of images and number of classes, and of each budget where it is another."""
    out: dict[str, list[dict[str, Any]]] = {}
    for passes in budgets(results):
        for setting in (setting_of(task, passes) for task in TASKS):
            title = group_of(setting) + after_title(passes, PASSES)
            out.setdefault(title, []).append(setting)
    return dict(out)


def everything(results: Results, settings: Settings) -> Sheet:
    """One row for each share, size and method that has been run, and one for the others."""
    out = []
    for s in settings:
        ran = [name for name in METHODS if results.of(s, name)]
        out += [(name_of(s), *row) for row in rows(results, s, ran)]
        if rest := [name for name in METHODS if name not in ran]:
            out.append((name_of(s), f"not run: {', '.join(rest)}", "0", *["-"] * (len(COLUMNS) - 2)))
    return Sheet(("clients", *COLUMNS), out, frozenset(i for i, r in enumerate(out) if r[1] == "FedSOUL"))


def gains(results: Results, settings: Settings) -> Sheet:
    """FedSOUL's accuracy less each rival's, paired by seed."""
    columns = ("clients", "rival", "seeds", "points", "95 % interval", "ECE over the rival's")
    out = []
    for setting in settings:
        ours = _scores(results, setting, "FedSOUL")
        for rival in METHODS:
            theirs = _scores(results, setting, rival)
            seeds = sorted(ours.keys() & theirs.keys())
            if rival == "FedSOUL" or not seeds:
                continue
            points = [100 * (ours[s]["accuracy"] - theirs[s]["accuracy"]) for s in seeds]
            eces = [ours[s]["ece"] / theirs[s]["ece"] for s in seeds]
            centre, low, high = interval95(points)
            reach = f"{low:+.1f} to {high:+.1f}" if len(points) > 1 else "-"
            ratio = sum(eces) / len(eces)
            out.append((name_of(setting), rival, str(len(seeds)), f"{centre:+.1f}", reach, f"{ratio:.2f}"))
    return Sheet(columns, out)


def _scores(results: Results, setting: dict[str, Any], name: str) -> dict[int, dict[str, float]]:
    """By seed, of the runs that did not break down."""
    found = {r["seed"]: r["metrics"] for r in results.of(setting, name)}
    return {seed: m for seed, m in found.items() if m.get("accuracy") is not None}


def sheets(results: Results) -> dict[str, Sheet]:
    out = {}
    for group, settings in groups(results).items():
        out[f"{group}: FedSOUL less the others"] = gains(results, settings)
        out[f"{group}: all numbers"] = everything(results, settings)
    return out


def drawn(results: Results, settings: Settings, score: str, scale: float, label: str) -> str | None:
    """A score by share and size of the small clients, of the methods that have been run; None without any."""
    shown = {
        name_of(s).replace(" with ", "\nN = "): {
            m: [scale * v for v in values(results.of(s, m), score)] for m in METHODS
        }
        for s in settings
    }
    there = {group: found for group, found in shown.items() if any(found.values())}
    if not there:
        return None
    return spread(there, "share and size of the small clients", label, log_y=False)


ACCURACY, ECE = ("accuracy", 100.0, "test accuracy, %"), ("ece", 1.0, "ECE")


def figures(results: Results, settings: Settings) -> list[Figure]:
    made = [drawn(results, settings, *score) for score in (ACCURACY, ECE)]
    return [Figure(svg, "Every dot is a seed.") for svg in made if svg is not None]


def pictures(results: Results) -> dict[str, str]:
    """Accuracy in each group with the experiment's own budget."""
    own = {g: s for g, s in groups(results).items() if s[0]["passes"] == PASSES}
    made = {g.replace(" S=", "-"): drawn(results, settings, *ACCURACY) for g, settings in own.items()}
    return {name: svg for name, svg in made.items() if svg is not None}


def page(results: Results) -> Page:
    allowed = in_words(budgets(results))
    lead = (
        "CIFAR over 100 clients with the same number of classes (S) each: a share of them has few "
        f"images, the rest 25. Ten are active per round, and every method may spend {allowed} backbone "
        "passes. FedSOUL has its default settings; those of the others stand at the end. "
        f"{in_search('small_data', METHODS)}"
    )
    sections = []
    for group, settings in groups(results).items():
        sections += [
            Section(f"{group}: accuracy and calibration", figures=figures(results, settings), wide=True),
            Section(
                f"{group}: FedSOUL less the others",
                "Differences in points, paired by seed.",
                gains(results, settings),
            ),
            Section(f"{group}: all numbers", LEGEND, everything(results, settings)),
        ]
    sections.append(Section("Settings", sheet=settings_of("small_data")))
    return Page("fedpop: small clients", lead, sections)


EXPERIMENT = Experiment(
    name=NAME,
    seeds=3,
    data="cifar10",
    jobs=jobs,
    budgets=budgets,
    pictures=pictures,
    sheets=sheets,
    page=page,
)
