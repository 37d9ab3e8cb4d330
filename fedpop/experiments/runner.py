"""Jobs of an experiment over worker processes, resumable: what is in the results file is not run again."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedpop.errors import SettingsError
from fedpop.files import writable_folder
from fedpop.report.results import Record, Results
from fedpop.runtime.lock import held


@dataclass(frozen=True)
class Job:
    """One call of a module-level function, and how to tell that its records are there already."""

    call: Callable[..., list[Record]]
    arguments: tuple[Any, ...]
    label: str
    setting: dict[str, Any]
    seed: int
    methods: tuple[str, ...]
    config: dict[str, Any] | None = None
    """Records of another configuration are not those asked for."""

    def done(self, results: Results) -> bool:
        there = {
            r["method"]
            for r in results.records
            if r["setting"] == self.setting and r["seed"] == self.seed and self.config in (None, r["config"])
        }
        return set(self.methods) <= there


def workers(processes: int | None) -> int | None:
    """What ``--processes`` asks of ``run_jobs``: one process is this one.

    >>> workers(None), workers(1), workers(4)
    (None, 0, 4)
    """
    if processes is not None and processes < 1:
        raise SettingsError(f"--processes must be at least 1, not {processes}")
    return 0 if processes == 1 else processes


def _end_with_parent() -> None:
    """A worker whose parent is killed stops at once, instead of finishing its job for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_jobs(
    jobs: Sequence[Job], results: Results, processes: int | None, title: str, show: bool = True
) -> None:
    """Run the jobs that are missing; records are written as they arrive, so a stop loses one job at most.

    ``processes`` None is one per core; 0 runs them in this process, one after the other.
    """
    todo = [job for job in jobs if not job.done(results)]
    many = max(1, min(processes or os.cpu_count() or 1, len(todo) or 1))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with (
        held(writable_folder(results.folder)),
        Progress(*columns, console=Console(stderr=True), disable=not show) as progress,
    ):
        task = progress.add_task(title, total=len(jobs), completed=len(jobs) - len(todo), last="")
        if not todo:
            return
        if processes == 0:
            for job in todo:
                progress.update(task, last=job.label)
                results.add(job.call(*job.arguments))
                progress.update(task, advance=1)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(many, mp_context=context, initializer=_end_with_parent) as pool:
            futures = {pool.submit(job.call, *job.arguments): job for job in todo}
            try:
                for future in as_completed(futures):
                    results.add(future.result())
                    progress.update(task, advance=1, last=futures[future].label)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
