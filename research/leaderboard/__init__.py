"""All methods on the same clients, in one table, which a method of one's own joins with one file.

A hundred clients of CIFAR-10 with five classes each, half of them with 5 images and half with 25, ten active
per round, and twenty more who come afterwards with nothing and with 5 images. Every row is made by the
command that stands in it. The hundred are one setting of small-data, whose records stand here until a method
has been run with the newcomers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpop.data.image_task import ImageTask
from fedpop.entries import module_named
from fedpop.errors import SettingsError
from fedpop.methods.base import Algorithm
from fedpop.population import Population, evaluate_few
from fedpop.report import terminal
from fedpop.report.html import Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, values
from research import small_data
from research.experiment import Asked, Experiment, Job
from research.images import (
    BROKE,
    Build,
    Cell,
    Run,
    after_title,
    average,
    budgets_of,
    in_search,
    in_words,
    jobs_of,
    methods,
    scores_of,
    settings_of,
    shown,
)
from research.small_data import setting_of as clients_of

NAME = "leaderboard"
PASSES = 60_000
TASK = ImageTask("cifar10", 5, validation=0)
NEW = 20
"""Clients who come when training is over."""
EXAMPLES = (0, 5)
"""Labelled images that they come with."""
METHODS = methods("small_data") | methods("leaderboard")


def setting_of(passes: int | None = None) -> dict[str, Any]:
    return clients_of(TASK, PASSES if passes is None else passes) | {"new": NEW}


# --- runs ----------------------------------------------------------------------------------------


def own_methods(file: Path) -> dict[str, Build]:
    """The methods that a file of one's own defines, by their names, with their defaults."""
    module = module_named(file.stem, file.parent)
    found = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Algorithm)]
    own = {c.name: c for c in found if c.__module__ == module.__name__ and hasattr(c, "name")}
    if not own:
        raise SettingsError(
            f"{file} defines no method: write a subclass of fedpop.methods.Algorithm, or of one of fedpop's, "
            "with a name of its own (docs/extending.md has one)"
        )
    if taken := sorted(set(own) & set(METHODS)):
        raise SettingsError(f"{file}: {taken[0]} is the name of a method that is there already; take another")
    return dict(own)


def job(run: Run) -> list[Record]:
    """The record of one method and seed, new clients included."""
    return _measured(run, METHODS[run.cell.method])


def own_job(run: Run, file: Path) -> list[Record]:
    """The same of a method from a file."""
    return _measured(run, own_methods(file)[run.cell.method])


def _measured(run: Run, build: Build) -> list[Record]:
    task = run.cell.task
    federation, newcomers = task.split(run.data, run.seed, NEW)

    def more(population: Population) -> dict[str, float]:
        out: dict[str, float] = {}
        for n in EXAMPLES:
            found = evaluate_few(population, newcomers, n)
            if found is not None:
                out |= {f"new_{n}_{k}": v for k, v in scores_of(found).items() if not k.startswith("bin")}
        return out

    return run.measured(build(task.model(run.seed)), federation, more)


@dataclass(frozen=True)
class Own(Job):
    """A run of this experiment's, which small-data's record of the same clients does not replace."""

    def done(self, results: Results) -> bool:
        return super().done(Results(results.folder, [r for r in results.records if not is_taken(r)]))


@dataclass(frozen=True)
class Taken(Job):
    """A record of small-data's, taken again where it has changed there, as long as there is none of ours."""

    def done(self, results: Results) -> bool:
        (made,) = taken(*self.arguments)
        there = [r for r in results.of(self.setting, self.methods[0]) if r["seed"] == self.seed]
        return made in there or any(not is_taken(r) for r in there)


def taken(found: Record) -> list[Record]:
    """The same record under this experiment's name; it tells nothing of newcomers."""
    return [found | {"experiment": NAME, "setting": found["setting"] | {"new": NEW}}]


def is_taken(r: Record) -> bool:
    return r["metrics"].get("accuracy") is not None and not any(n.startswith("new_") for n in r["metrics"])


def beside(folder: Path) -> Path:
    """Where small-data has its records: its own folder, or that of its name beside another than ours."""
    ours = folder == EXPERIMENT.folder
    return small_data.EXPERIMENT.folder if ours else folder.parent / small_data.NAME


def jobs(asked: Asked) -> list[Job]:
    def cells(names: Sequence[str]) -> list[Cell]:
        return [Cell(TASK, setting_of(asked.passes), name, "leaderboard") for name in names]

    if asked.method is not None:
        own = own_methods(asked.method)
        made = jobs_of(NAME, asked, job, cells(list(own)), own)
        return [replace(j, call=own_job, arguments=(*j.arguments, asked.method.resolve())) for j in made]
    theirs, setting = Results.open(beside(asked.folder)), setting_of(asked.passes)
    there = [
        Taken(taken, (r,), f"from small-data, {name}, seed {r['seed']}", setting, r["seed"], (name,))
        for name in METHODS
        for r in theirs.of(clients_of(TASK, setting["passes"]), name)
        if r["seed"] < asked.seeds
    ]
    runs = jobs_of(NAME, asked, job, cells(list(METHODS)), METHODS)
    return [*there, *(Own(**vars(j)) for j in runs)]


# --- the report ----------------------------------------------------------------------------------

COLUMNS = (
    "method", "seeds", "accuracy", "worst tenth", "NLL", "ECE", "new, 0 images", "their ECE", "new, 5 images",
    "their ECE", "passes", "MB up", "sec.", "command",
)  # fmt: skip
LEGEND = (
    "Accuracy: mean over clients, and over the worst tenth of them; NLL and ECE (15 bins) over all test "
    f"images; new: {NEW} clients who took no part, with no labelled image and with 5 ('no model': a method "
    "that has nothing to offer without data; 'not run': the row is small-data's, of the same clients, seeds "
    "and budget, without newcomers); passes: backbone example-passes in training (a forward alone is a "
    "third); sec.: of one core, of whatever machine a run was made on. The best accuracy comes first."
)
OWN = (
    "A method of your own joins with one file and one command: define a subclass of "
    "fedpop.methods.Algorithm (docs/extending.md) in mine.py, then python -m research leaderboard --method "
    "mine.py. It is run with its defaults on the same clients, networks, shifts and draws of active clients."
)


def budgets(results: Results) -> list[int]:
    return budgets_of(results, [PASSES])


def command_of(found: Sequence[Record], name: str, passes: int) -> str:
    """What one types for a row."""
    seeds = 1 + max(r["seed"] for r in found)
    if all(map(is_taken, found)) and name in METHODS:
        label = f"{small_data.group_of(clients_of(TASK))}, {small_data.name_of(clients_of(TASK))}"
        return f'python -m research small-data --only "{label}, {name}"'
    words = f' --only "{name}, seed"' if name in METHODS else " --method FILE"
    words += "" if seeds == EXPERIMENT.seeds else f" --seeds {seeds}"
    return f"python -m research {NAME}{words}" + ("" if passes == PASSES else f" --passes {passes}")


def row(results: Results, name: str, passes: int) -> tuple[str, ...]:
    found = results.of(setting_of(passes), name)
    command = command_of(found, name, passes)
    if not values(found, "accuracy"):
        return (name, str(len(found)), BROKE, *["-"] * (len(COLUMNS) - 4), command)
    new: list[str] = []
    for n in EXAMPLES:
        served = values(found, f"new_{n}_accuracy")
        none = "not run" if all(map(is_taken, found)) else "no model"
        new += [f"{100 * mean(served):.1f} %" if served else none, shown(found, f"new_{n}_ece")]
    return (
        name,
        str(len(found)),
        *[f"{average(found, score, scale=100):.1f} %" for score in ("accuracy", "accuracy_worst_decile")],
        shown(found, "nll"),
        shown(found, "ece"),
        *new,
        f"{average(found, 'backbone_passes', 'cost'):,.0f}",
        f"{average(found, 'bytes_up', 'cost', 1e-6):,.0f}",
        f"{average(found, 'seconds', 'cost'):.0f}",
        command,
    )


def ranked(results: Results, passes: int) -> list[str]:
    """Methods with a record, the most accurate first; those that broke down last."""
    there = {r["method"] for r in results.of(setting_of(passes))}

    def worth(name: str) -> tuple[float, str]:
        scores = values(results.of(setting_of(passes), name), "accuracy")
        return (-mean(scores) if scores else 0.0, name)

    return sorted(there, key=worth)


def table(results: Results, passes: int) -> Sheet:
    names = ranked(results, passes)
    ours = frozenset(i for i, name in enumerate(names) if name == "FedSOUL")
    found = [row(results, name, passes) for name in names]
    if rest := unrun(names):
        command = f"python -m research {NAME}" + ("" if passes == PASSES else f" --passes {passes}")
        found.append((f"not run: {', '.join(rest)}", "0", *["-"] * (len(COLUMNS) - 3), command))
    return Sheet(COLUMNS, found, ours)


def unrun(names: Sequence[str]) -> list[str]:
    return [name for name in METHODS if name not in names]


def show(results: Results, console: Console) -> None:
    """Without commands and settings, for which a terminal has no room: they are in the files."""
    for passes in budgets(results):
        names = ranked(results, passes)
        ours = frozenset(i for i, name in enumerate(names) if name == "FedSOUL")
        brief = Sheet(COLUMNS[:-1], [row(results, name, passes)[:-1] for name in names], ours)
        terminal.show(brief, f"Leaderboard{after_title(passes, PASSES)}", console)
        if rest := unrun(names):
            console.print(f"Not run yet: {', '.join(rest)}.")


def sheets(results: Results) -> dict[str, Sheet]:
    return {f"Leaderboard{after_title(n, PASSES)}": table(results, n) for n in budgets(results)} | {
        "Settings of the others": settings()
    }


def settings() -> Sheet:
    """Those of small-data, which were searched for where its tune.toml has them, and those that were not."""
    searched, rest = settings_of("small_data"), settings_of("leaderboard")
    return Sheet(searched.columns, [*searched.rows, *rest.rows])


def page(results: Results) -> Page:
    lead = (
        f"{TASK.small} clients with {TASK.n_small} images of CIFAR-10 and {TASK.large} with {TASK.n_large}, "
        "five classes each; ten are active per round, and every method may spend "
        f"{in_words(budgets(results))} backbone passes. FedSOUL has its defaults. "
        f"{in_search('small_data', METHODS)}"
    )
    sections = [
        Section(f"Leaderboard{after_title(n, PASSES)}", LEGEND, table(results, n), wide=True)
        for n in budgets(results)
    ]
    sections += [Section("Join", OWN), Section("Settings of the others", sheet=settings())]
    return Page("fedpop: all methods on the same clients", lead, sections)


EXPERIMENT = Experiment(
    name=NAME, seeds=3, data="cifar10", jobs=jobs, budgets=budgets, sheets=sheets, show=show, page=page
)
