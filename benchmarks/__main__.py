"""Run all benchmarks, print their tables and write ``results/bench/results.json``."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from benchmarks import compressors, kernels, local_training, round, rounds_per_second, scale, small_rounds
from fedpop.report.results import Record, Results

FOLDER = Path("results/bench")
BENCHMARKS = (small_rounds, rounds_per_second, compressors, scale, kernels, round, local_training)


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    records: list[Record] = []
    with Progress(*columns, console=console) as progress:
        for benchmark in BENCHMARKS:
            task = progress.add_task(benchmark.NAME, total=1.0)
            new = benchmark.measure(lambda share, t=task: progress.update(t, completed=share))
            progress.update(task, completed=1.0)
            for table in benchmark.tables(new):
                console.print(table)
            records += new
    Results(FOLDER).add(records)
    console.print(f"Written to {FOLDER / 'results.json'}")


if __name__ == "__main__":
    main()
