"""What the command line runs: the demo, and experiments with their tables and reports."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from fedpop.experiments.results import Results
from fedpop.report.html import Table
from fedpop.runtime.files import writable_folder, write_bytes

DEMO_METHODS = ("FedSOUL", "FedRep-spectral", "FedRep", "FedAvg")


def show(console: Console, table: Table, title: str) -> None:
    """A table on the terminal."""
    out = RichTable(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for i, column in enumerate(table.columns):
        out.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for i, row in enumerate(table.rows):
        out.add_row(*row, style="bold" if i in table.highlight else "")
    console.print(out)


def run_demo(out: Path, seed: int) -> None:
    """``fedpop demo``: the paper's synthetic task, FedSOUL beside its limits and the exact optimum."""
    import torch

    from fedpop.data.synthetic import SyntheticTask
    from fedpop.experiments.synthetic import run_task
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
    path = demo_report(folder / "report.html", outcomes, task.make(seed))
    console.print(f"The report is in [bold]{path}[/bold]; open it in a browser.")


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


def run_report_command(folder: Path) -> None:
    """``fedpop report``: from records or from a run's metrics, whichever the folder holds."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    if (folder / "results.json").exists():
        from fedpop.report.synthetic import experiment_report, markdown, summary_table

        results = Results.open(folder)
        if {r["experiment"] for r in results.records} == {"clusters"}:
            from fedpop.report.clusters import report_clusters

            report_clusters(results, folder, lambda t, title: show(console, t, title))
            console.print(f"The report is in [bold]{folder / 'report.html'}[/bold].")
            return
        table = summary_table(results)
        show(console, table, "Medians over seeds")
        write_bytes(folder / "results.md", markdown(table).encode())
        path = experiment_report(results, folder / "report.html")
    else:
        from fedpop.report.run import run_report

        path = run_report(folder)
    console.print(f"The report is in [bold]{path}[/bold].")
