"""What the command line runs: the demo, and experiments with their tables and reports."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedpop.errors import CheckpointError, DataError
from fedpop.files import writable_folder, write_bytes
from fedpop.report.html import Sheet
from fedpop.report.results import Results

if TYPE_CHECKING:
    from fedpop.data.synthetic import SyntheticTask
    from fedpop.experiments.comparison import Comparison

REPORTS = ("synthetic", "theory", "defaults", "drift", "restarts", "clusters", "compare", "tune")
"""Experiments with a module of the same name in ``fedpop.report``."""
DEMO_METHODS = ("FedSOUL", "FedRep-spectral", "FedRep", "FedAvg")
"""With the exact optimum beside them: how near they come to the truth."""
DEMO_COMPARED: tuple[dict[str, Any], ...] = (
    {"name": "FedSOUL"},
    {"name": "LocalOnly", "local": {"epochs": 2, "rate": 0.01}},
    {"name": "FedAvg", "local": {"epochs": 2, "rate": 0.01}},
    {"name": "FedAvgFT", "local": {"epochs": 2, "rate": 0.01}, "fine_tune": {"epochs": 20, "rate": 0.01}},
    {"name": "SCAFFOLD", "local": {"epochs": 2, "rate": 0.005}},
    {"name": "FedPer", "local": {"epochs": 2, "rate": 0.01}},
    {"name": "FedRep", "head": {"epochs": 5, "rate": 0.01}, "body": {"epochs": 2, "rate": 0.01}},
    {
        "name": "FedRep",
        "label": "FedRep-spectral",
        "start": "spectral",
        "head": {"epochs": 5, "rate": 0.01},
        "body": {"epochs": 2, "rate": 0.01},
    },
    {
        "name": "Ditto",
        "local": {"epochs": 2, "rate": 0.01},
        "personal": {"epochs": 2, "rate": 0.01},
        "lam": 1.0,
    },
)
"""Under the protocol of ``fedpop compare``, in the form of its [[method]] tables."""
DEMO_ROUNDS = 100


def show(console: Console, table: Sheet, title: str) -> None:
    """A table on the terminal."""
    from fedpop.report.terminal import fitted, rich_table

    console.print(rich_table(fitted(table, console.width), title))


def run_demo(out: Path, seed: int) -> None:
    """``fedpop demo``: the paper's synthetic task, FedSOUL beside its limits and the exact optimum."""
    import torch

    from fedpop.data.synthetic import SyntheticTask
    from fedpop.experiments.synthetic import run_task
    from fedpop.report.compare import summary
    from fedpop.report.synthetic import demo_report, demo_table

    console = Console()
    folder = writable_folder(out)
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    task = SyntheticTask()
    console.print(
        f"[bold]fedpop demo[/bold]: {task.b} clients, {round(100 * task.share_small)} % of them with "
        f"{task.n_small} examples, the rest with {task.n_large}; y = x' phi z + noise, {task.k} inputs, "
        f"{task.d} private parameters each."
    )
    outcomes = run_task(task, seed, DEMO_METHODS, progress=True, theta=False)
    Results(folder).add([outcome.record for outcome in outcomes])
    show(console, demo_table(outcomes), "Distance to the truth, and held-out predictions")
    comparison = compare_demo(task, seed)
    show(console, summary(comparison), f"Under one protocol: {DEMO_ROUNDS} rounds each (* plug-in)")
    path = demo_report(folder / "report.html", outcomes, task.make(seed), comparison)
    console.print(f"The report is in [bold]{path}[/bold]; open it in a browser.")


def run_methods() -> None:
    """``fedpop methods``: what each method supports, and who made it."""
    import torch

    from fedpop.report.methods import feature_tables

    torch.set_num_threads(1)
    console = Console()
    if console.width < 150:
        console = Console(width=150)  # a row that is cut tells less than one that wraps
    table, references, note = feature_tables()
    show(console, table, "Methods")
    console.print(note, style="dim")
    console.print()
    show(console, references, "References")


def compare_demo(task: SyntheticTask, seed: int, rounds: int = DEMO_ROUNDS) -> Comparison:
    """The demo's methods under one protocol, on the same task."""
    from tempfile import TemporaryDirectory

    from fedpop.experiments.comparison import Terms, compare_all
    from fedpop.experiments.config import Task
    from fedpop.experiments.methods import entry_from

    source = Task("synthetic", task, {"validation": 0, "new_clients": 10})
    entries = [entry_from(table, "the demo") for table in DEMO_COMPARED]
    terms = Terms(rounds=rounds, every=10)
    with TemporaryDirectory() as held:
        return compare_all(source, entries, terms, [seed], Path(held), resume=False, processes=0)


def run_synthetic(out: Path, seeds: int, processes: int | None, main_only: bool) -> None:
    """``fedpop experiment synthetic``."""
    from fedpop.experiments.runner import Job, run_jobs
    from fedpop.experiments.synthetic import MAIN, METHODS, TASKS, job, setting_of

    results = Results.open(writable_folder(out))
    tasks = range(MAIN if main_only else len(TASKS))
    jobs = [
        Job(
            job,
            (t, seed),
            f"{setting_of(TASKS[t])} seed {seed}",
            setting_of(TASKS[t]),
            seed,
            (*METHODS, "Exact"),
        )
        for part in (tasks[:MAIN], tasks[MAIN:])
        for seed in range(seeds)
        for t in part
    ]
    run_jobs(jobs, results, processes, "synthetic")
    run_report_command(out)


def run_defaults(data: Path, out: Path, seeds: int, processes: int | None) -> None:
    """``fedpop experiment defaults``."""
    from fedpop.data.image_task import ImageTask
    from fedpop.data.images import open_images
    from fedpop.experiments.defaults import ALL, IMAGES, job, methods_of, setting_of
    from fedpop.experiments.runner import Job, run_jobs

    for images in IMAGES:
        open_images(images, data)  # missing files are told before hours of work
    results = Results.open(writable_folder(out))
    jobs = [
        Job(
            job,
            (images, name, seed, str(data)),
            f"{images}, {name}, seed {seed}",
            setting_of(ImageTask(images)),
            seed,
            methods_of(name),
        )
        for seed in range(seeds)
        for name in ALL
        for images in IMAGES
    ]
    run_jobs(jobs, results, processes, "defaults")
    run_report_command(out)


def run_theory(out: Path, seeds: int, processes: int | None) -> None:
    """``fedpop experiment theory``."""
    from fedpop.experiments.runner import run_jobs
    from fedpop.experiments.theory import jobs

    run_jobs(jobs(seeds), Results.open(writable_folder(out)), processes, "theory")
    run_report_command(out)


def run_drift(out: Path, seeds: int, processes: int | None) -> None:
    """``fedpop experiment drift``."""
    from fedpop.experiments.drift import jobs
    from fedpop.experiments.runner import run_jobs

    run_jobs(jobs(seeds), Results.open(writable_folder(out)), processes, "drift")
    run_report_command(out)


def run_restarts(out: Path, synthetic: Path, restarts: int, processes: int | None) -> None:
    """``fedpop experiment restarts``."""
    from fedpop.experiments.restarts import jobs
    from fedpop.experiments.runner import run_jobs

    todo = jobs(Results.open(synthetic), restarts)
    if not todo:
        raise DataError(
            f"{synthetic} has no records of a local optimum; run fedpop experiment synthetic first"
        )
    run_jobs(todo, Results.open(writable_folder(out)), processes, "restarts")
    run_report_command(out)


def run_clusters(out: Path, seeds: int, processes: int | None) -> None:
    """``fedpop experiment clusters``."""
    from fedpop.experiments.clusters import NAMES, TASK, job, setting_of
    from fedpop.experiments.runner import Job, run_jobs

    folder = writable_folder(out)
    results = Results.open(folder)
    setting = setting_of(TASK)
    jobs = [Job(job, (seed, folder), f"seed {seed}", setting, seed, NAMES) for seed in range(seeds)]
    run_jobs(jobs, results, processes, "clusters")
    run_report_command(folder)


def run_compare(
    path: Path, out: Path | None, data: Path | None, seeds: int | None, processes: int | None
) -> None:
    """``fedpop compare``."""
    from fedpop.experiments.comparison import compare_all, seeds_of
    from fedpop.experiments.config import read_config

    config = read_config(path, data)
    folder = writable_folder(out or Path("runs") / config.name)
    chosen = config.seeds if seeds is None else seeds_of(seeds)
    workers = 0 if processes == 1 else processes
    compare_all(config.task, config.entries, config.terms, chosen, folder, resume=True, processes=workers)
    run_report_command(folder)


def run_tune(path: Path, out: Path | None, data: Path | None, processes: int | None) -> None:
    """``fedpop tune``."""
    from fedpop.experiments.config import read_config
    from fedpop.experiments.tune import tune

    config = read_config(path, data)
    folder = writable_folder(out or Path("runs") / f"{config.name}-tune")
    tune(config, folder, 0 if processes == 1 else processes)
    run_report_command(folder)
    Console().print(f"The chosen settings: fedpop compare {folder / 'tuned.toml'}", soft_wrap=True)


def report_of(results: Results) -> Any:
    """The module that makes tables and pages of these records."""
    kinds = {r["experiment"] for r in results.records}
    if len(kinds) != 1 or not kinds <= set(REPORTS):
        raise CheckpointError(
            f"{results.folder / 'results.json'} holds records of {', '.join(sorted(kinds)) or 'nothing'}; "
            f"there are reports of {', '.join(REPORTS)}"
        )
    return import_module(f"fedpop.report.{kinds.pop()}")


def run_report_command(folder: Path) -> None:
    """``fedpop report``: from records or from a run's metrics, whichever the folder holds."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    if (folder / "results.json").exists():
        from fedpop.report.html import markdown

        results = Results.open(folder)
        report = report_of(results)
        if hasattr(report, "show_and_write"):
            report.show_and_write(results, console)
            return
        tables = {"Over seeds": report.summary_table(results)}
        if hasattr(report, "further_tables"):
            tables |= report.further_tables(results)
        for title, table in tables.items():
            show(console, table, title)
        write_bytes(folder / "results.md", "\n".join(map(markdown, tables.values())).encode())
        path = report.experiment_report(results, folder / "report.html")
    else:
        from fedpop.report.run import run_report

        path = run_report(folder)
    console.print(f"The report is in [bold]{path}[/bold].")
