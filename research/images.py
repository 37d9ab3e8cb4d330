"""What the experiments on images share: methods from files, runs on a budget of passes, scores, tables.

Every method sees the same clients, networks, augmentation and draws of active clients, and may spend the
same number of backbone example-passes. Nothing is chosen on test images: a run ends where its budget does. A
run is kept in a folder while it lasts, so that an experiment that was stopped goes on in its midst.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpop.comparison.budget import rounds_within
from fedpop.comparison.run import checkpoints_every, taken_up
from fedpop.comparison.terms import Entry, entry_from, in_line
from fedpop.data.image_task import PictureTask
from fedpop.errors import TrainingError
from fedpop.evaluation.scores import Evaluation
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Everyone, Uniform
from fedpop.methods.base import Algorithm, Paced, role_of
from fedpop.models.base import Model
from fedpop.population import Population, evaluate
from fedpop.report.html import Sheet
from fedpop.report.results import Record, Results, mean, record, values
from fedpop.run.simulate import fit
from fedpop.server.optimisers import Constant
from research.experiment import HERE, Asked, Job

ACTIVE = 10
"""Clients of a round, as in the paper."""

# --- methods ---------------------------------------------------------------------------------

Build = Callable[[Model], Algorithm]


LONG = "long"
"""The table, in a method's, of what it has otherwise in long runs."""


def entries(folder: str, long: bool = False) -> dict[str, Entry]:
    """The rows of an experiment's ``methods.toml`` by their labels, as they are in ``long`` runs or in
    others. Nothing there was chosen on test images: ``fedpop tune`` chooses on others."""
    path = HERE / folder / "methods.toml"
    out = {}
    for table in tomllib.loads(path.read_text("utf-8"))["method"]:
        other = table.pop(LONG, {})
        entry = entry_from(table | (other if long else {}), f"{folder}/{path.name}")
        out[entry.label] = entry
    return out


def methods(folder: str, long: bool = False) -> dict[str, Build]:
    """What makes each of them on a model.

    >>> "FedSOUL" in methods("small_data")
    True
    """
    return {label: entry.build for label, entry in entries(folder, long).items()}


def settings_of(folder: str) -> Sheet:
    """What each of them has that is not its default."""
    rows, long = [], entries(folder, long=True)
    for label, entry in entries(folder).items():
        rows.append((label, in_line(entry.settings) or "as they are"))
        if other := {k: v for k, v in long[label].settings.items() if entry.settings.get(k) != v}:
            rows.append((f"{label}, long runs", f"the same, but for {in_line(other)}"))
    return Sheet(("method", "settings"), rows)


def searched(folder: str) -> dict[str, int]:
    """How many settings of a method were tried on validation images, the one as written among them.

    >>> searched("small_data")["FedRep"]
    8
    """
    tried: dict[str, int] = {}
    for place in ("tuning", "tuning-own"):
        for r in Results.open(HERE / folder / place).records:
            tried[r["method"]] = tried.get(r["method"], 0) + 1
    return tried


def in_search(folder: str, names: Iterable[str]) -> str:
    """A sentence: whose settings were searched for, and whose were not."""
    tried = searched(folder)
    found = [n for n in names if tried.get(n, 0) > 1]
    rest = [n for n in names if n not in found and not n.startswith("FedSOUL")]
    many = min((tried[n] for n in found), default=0)
    told = f"Settings of {', '.join(found)} are the best of {many} each on images held out" if found else ""
    others = f"nobody searched for those of {', '.join(rest)}" if rest else ""
    return "; ".join(part for part in (told, others) if part) + "."


# --- runs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell of an experiment's tables: a method on a task, which is run once for each seed."""

    task: PictureTask
    setting: dict[str, Any]
    """What its records say of the task; the budget of passes is among it."""
    method: str
    label: str
    also: tuple[tuple[str, str], ...] = ()
    """Splits of images that are read beside the task's own."""
    smaller: tuple[dict[str, Any], ...] = ()
    """Settings with smaller budgets, in order, whose records the same run makes on its way."""


@dataclass(frozen=True)
class Run:
    """A cell with a seed, where data are looked for, and where records go: all that a worker is given."""

    experiment: str
    cell: Cell
    seed: int
    data: Path | None
    folder: Path

    @property
    def kept(self) -> Path:
        """Where it is kept while it lasts."""
        where = "-".join(str(v) for v in self.cell.setting.values())
        return self.folder / "runs" / f"{where}-{self.cell.method}-{self.seed}"

    def record(
        self,
        metrics: Mapping[str, float | None],
        cost: Mapping[str, float],
        config: dict[str, Any],
        setting: dict[str, Any] | None = None,
    ) -> Record:
        """Of the cell's own setting, unless another one is given."""
        cell = self.cell
        return record(self.experiment, setting or cell.setting, cell.method, self.seed, metrics, cost, config)

    def measured(
        self,
        method: Algorithm,
        federation: Federation,
        more: Callable[[Population], Mapping[str, float]] | None = None,
        active: int = ACTIVE,
    ) -> list[Record]:
        """The records of this run, one for each budget, which have ``more`` scores than the usual ones where
        given; its folder goes once they are there. A run that broke down has records without scores."""
        out = list[Record]()
        for setting in (*self.cell.smaller, self.cell.setting):
            try:
                population = trained(method, federation, setting["passes"], self.seed, self.kept, active)
            except TrainingError:
                out.append(self.record({"accuracy": None}, {}, method.describe(), setting))
                continue
            scores = scores_of(evaluate(population, "test", widths=False))
            scores |= more(population) if more else {}
            last: Mapping[str, Any] = population.history[-1]
            scores |= {n: last[n] for n in ("loss", "prior_sd") if last.get(n) is not None}
            cost = population.totals | {"rounds": population.rounds}
            out.append(self.record(scores, cost, population.algorithm.describe(), setting))
        shutil.rmtree(self.kept, ignore_errors=True)
        return out


def constant(method: Algorithm) -> bool:
    """Whether a longer run begins with the rounds of a shorter one, to the bit: no rate falls over the
    rounds, so that both may be one.

    >>> import fedpop as fp
    >>> from torch import nn
    >>> model = fp.Composition(None, nn.Linear(1, 1), "normal")
    >>> constant(fp.FedAvg(model)), constant(fp.FedAvg(model, schedule=fp.steps.Cosine()))
    (True, False)
    """
    paced = role_of(method, Paced)
    return paced is not None and isinstance(paced.schedule, Constant)


def jobs_of(
    experiment: str,
    asked: Asked,
    call: Callable[[Run], list[Record]],
    cells: Sequence[Cell],
    methods: Mapping[str, Build] | None = None,
    known: dict[tuple[str, str], dict[str, Any]] | None = None,
) -> list[Job]:
    """A job for each seed and each cell, in this order; with ``methods``, what was run with other settings
    than theirs is run again. ``known`` settings of these, by images and method, are not looked up again."""
    config = {} if known is None else known
    for cell in cells:
        key = (cell.task.images, cell.method)
        if methods is not None and cell.method in methods and key not in config:
            config[key] = settings_in(methods[cell.method](cell.task.model(0)))
    return [
        Job(
            call,
            (Run(experiment, cell, seed, asked.data, asked.folder),),
            f"{cell.label}, {cell.method}, seed {seed}",
            cell.setting,
            seed,
            (cell.method,),
            config.get((cell.task.images, cell.method)),
            needs=((cell.task.images, "train"), (cell.task.images, "test"), *cell.also),
            smaller=cell.smaller,
        )
        for seed in range(asked.seeds)
        for cell in cells
    ]


def settings_in(method: Algorithm) -> dict[str, Any]:
    """What a record tells of the method before it has run: not which engine ran."""
    settings: dict[str, Any] = json.loads(json.dumps(method.describe()))
    return {k: v for k, v in settings.items() if k != "engine"}


def trained(
    method: Algorithm, federation: Federation, passes: float, seed: int, out: Path, active: int = ACTIVE
) -> Population:
    """A run of as many rounds as the budget pays for; some methods need everybody in each."""
    rule = Everyone() if method.participation == "full" else Uniform(min(active, len(federation)))
    rounds = rounds_within(method, federation, passes, seed, rule)

    def go_on() -> Population:
        return fit(
            method,
            federation,
            rounds=rounds,
            seed=seed,
            participation=rule,
            out=out,
            resume=True,
            checkpoint_every=checkpoints_every(rounds),
            progress=False,
        )

    return taken_up(go_on, out)


def scores_of(found: Evaluation) -> dict[str, float]:
    """The scores that records of images have: accuracy over clients, the others over all test images."""
    summary = found.summary()
    out = {
        "accuracy": summary["accuracy"],
        "accuracy_std": summary["accuracy_sd"],
        "accuracy_worst_decile": summary["accuracy_worst"],
        **{name: found.pooled[name] for name in ("nll", "brier", "ece")},
        "ece_per_client": summary["ece"],
    }
    for i, b in enumerate(found.reliability):
        out |= {f"bin{i}_confidence": b.confidence, f"bin{i}_accuracy": b.accuracy, f"bin{i}_count": b.count}
    return out


# --- the report ----------------------------------------------------------------------------------

NOT_RUN, BROKE = "not run", "broke down"
COLUMNS = (
    "method",
    "seeds",
    "accuracy",
    "over clients",
    "worst tenth",
    "NLL",
    "Brier",
    "ECE",
    "rounds",
    "passes",
    "MB up",
    "sec.",
)
LEGEND = (
    "accuracy: mean over clients of the share of their test images that is right, with its standard "
    "deviation over clients and the mean of the worst tenth of them; NLL, Brier, ECE (15 bins): over all "
    "test images; passes: backbone example-passes in training (a forward alone is a third); sec.: of one "
    "core, of whatever machine a run was made on."
)


def budgets_of(results: Results, own: Sequence[int]) -> list[int]:
    """The budgets of passes that records are distinguished by: an experiment's own, unless there are others.

    >>> budgets_of(Results(Path()), [60_000])
    [60000]
    """
    found = {r["setting"]["passes"] for r in results.records}
    return sorted(set(own) if found <= set(own) else found)


def in_words(budgets: Sequence[int]) -> str:
    """
    >>> in_words([500, 60_000])
    '500 or 60,000'
    """
    return " or ".join(f"{passes:,}" for passes in budgets)


def after_title(passes: int, own: int) -> str:
    """What a title says of a budget that is not the experiment's own."""
    return "" if passes == own else f", {passes:,} passes"


def missing(found: Sequence[Record], cells: int, score: str = "accuracy") -> tuple[str, ...]:
    """The last so many cells of a row whose runs have no such score; none where there is one.

    >>> missing([], 3)
    ('not run', '-', '-')
    """
    return () if values(found, score) else (BROKE if found else NOT_RUN, *["-"] * (cells - 1))


def rows(results: Results, setting: dict[str, Any], names: Iterable[str]) -> list[tuple[str, ...]]:
    """A row for every method, empty where it has not been run."""
    out = []
    for name in names:
        found = results.of(setting, name)
        if none := missing(found, len(COLUMNS) - 2):
            out.append((name, str(len(found)), *none))
            continue
        out.append(
            (
                name,
                str(len(found)),
                f"{average(found, 'accuracy', scale=100):.1f} %",
                f"{average(found, 'accuracy_std', scale=100):.1f}",
                f"{average(found, 'accuracy_worst_decile', scale=100):.1f} %",
                *[shown(found, score) for score in ("nll", "brier", "ece")],
                f"{average(found, 'rounds', 'cost'):.0f}",
                f"{average(found, 'backbone_passes', 'cost'):,.0f}",
                f"{average(found, 'bytes_up', 'cost', 1e-6):,.0f}",
                f"{average(found, 'seconds', 'cost'):.0f}",
            )
        )
    return out


def shown(found: Sequence[Record], score: str) -> str:
    """The mean as it is to be read; a stroke where no record has it."""
    return f"{average(found, score):.3f}" if values(found, score) else "-"


def average(found: Sequence[Record], name: str, of: str = "metrics", scale: float = 1.0) -> float:
    """Over the records that have this number."""
    numbers = values(found, name, of)
    return scale * mean(numbers) if numbers else float("nan")
