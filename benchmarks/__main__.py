"""Run all benchmarks, or those named, print their tables and write ``results/results.json`` beside them.

``python -m benchmarks "small rounds" kernels`` runs two of them; the others' records stay.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from benchmarks import (
    compressors,
    federation,
    images,
    kernels,
    local_training,
    mixed,
    round,
    rounds_per_second,
    scale,
    secure_sums,
    small_rounds,
)
from fedpop.report.results import Results

FOLDER = Path(__file__).parent / "results"
BENCHMARKS = (
    small_rounds,
    rounds_per_second,
    compressors,
    scale,
    kernels,
    round,
    local_training,
    images,
    mixed,
    federation,
    secure_sums,
)


def main(names: list[str]) -> None:
    known = {benchmark.NAME: benchmark for benchmark in BENCHMARKS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    console = Console()
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    results = Results.open(FOLDER)
    with Progress(*columns, console=console) as progress:
        for benchmark in [known[name] for name in names] or BENCHMARKS:
            task = progress.add_task(benchmark.NAME, total=1.0)
            new = benchmark.measure(lambda share, t=task: progress.update(t, completed=share))
            progress.update(task, completed=1.0)
            for table in benchmark.tables(new):
                console.print(table)
            others = {name for name in known if name != benchmark.NAME}
            results.records = [r for r in results.records if r["setting"].get("benchmark") in others]
            results.add(new)  # at once: the next one may take long, or fail
    console.print(f"Written to {FOLDER / 'results.json'}")


if __name__ == "__main__":
    main(sys.argv[1:])
