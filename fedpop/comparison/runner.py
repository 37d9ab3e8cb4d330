"""Jobs over worker processes, resumable: what is in the results file is not run again."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnContext
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from fedpop.errors import ConvergenceWarning, SettingsError, plain_warnings
from fedpop.files import remove_temporary, writable_folder
from fedpop.report.results import Record, Results
from fedpop.run.lock import locked_folder


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
    """Records of a configuration that has not these values are not those asked for."""

    def done(self, results: Results) -> bool:
        """Whether its records are there."""
        there = {
            r["method"]
            for r in results.records
            if r["setting"] == self.setting and r["seed"] == self.seed and self._same(r)
        }
        return set(self.methods) <= there

    def overrules(self, r: Record) -> bool:
        """Whether it is of this setting and method, of any seed, but was configured otherwise: a mean must
        not be over both."""
        return r["method"] in self.methods and r["setting"] == self.setting and not self._same(r)

    def _same(self, r: Record) -> bool:
        return all(r["config"].get(k) == v for k, v in (self.config or {}).items())


def workers(processes: int | None) -> int | None:
    """What ``--processes`` asks of ``run_jobs``: one process is this one.

    >>> workers(None), workers(1), workers(4)
    (None, 0, 4)
    """
    if processes is not None and processes < 1:
        raise SettingsError(f"--processes must be at least 1, not {processes}")
    return 0 if processes == 1 else processes


Tell = Callable[[float, str], None]
_report: ContextVar[Tell | None] = ContextVar("report", default=None)
_line: Any = None
"""In a worker process: the way to the bar, if there is one."""


def tell(share: float, doing: str) -> None:
    """How much of the present job is done, 0 to 1, and what it is doing now: for the bar, if there is one."""
    report = _report.get()
    if report is not None:
        report(share, doing)


class Board:
    """A bar over all jobs, which moves while they are under way."""

    def __init__(self, jobs: Sequence[Job], total: int, title: str, show: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[runs]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        self.jobs, self.total, self.before = jobs, total, total - len(jobs)
        self.progress = Progress(*columns, console=Console(stderr=True), disable=not show)
        self.shares = [0.0] * len(jobs)
        self.task = self.progress.add_task(
            title, total=total, completed=self.before, runs=f"{self.before}/{total}", last=""
        )

    def at(self, job: int, share: float, doing: str) -> None:
        if self.shares[job] == 1.0 > share:  # news of two processes may cross
            return
        self.shares[job] = max(self.shares[job], min(share, 1.0))
        done = self.before + sum(s == 1.0 for s in self.shares)
        last = f"{self.jobs[job].label}{': ' * bool(doing)}{doing}"
        completed = self.before + sum(self.shares)
        self.progress.update(self.task, completed=completed, runs=f"{done}/{self.total}", last=last)

    @contextmanager
    def line(self, context: SpawnContext) -> Iterator[Any]:
        """Through which workers tell how far they are; read by a thread as long as any of them may write."""
        if self.progress.disable:
            yield None
            return
        line = context.SimpleQueue()

        def read() -> None:
            for job, share, doing in iter(line.get, None):
                self.at(job, share, doing)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield line
        finally:
            # A worker that was killed in the midst of a word holds the line for good: nothing waits for it.
            threading.Thread(target=line.put, args=(None,), daemon=True).start()
            reader.join(1.0)


def _begin(line: Any) -> None:
    """In a worker, before its first job: it is one of several, so one thread will do. One whose parent is
    killed stops at once, instead of finishing its job for nobody."""
    global _line
    _line = line
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_worker(number: int, call: Callable[..., list[Record]], arguments: tuple[Any, ...]) -> list[Record]:
    line, last = _line, 0.0

    def report(share: float, doing: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 0.2:  # a screen need not change more often
            last = time.monotonic()
            line.put((number, min(share, 0.999), doing))  # the end is the parent's to say

    _report.set(None if line is None else report)
    with plain_warnings():
        return _called(call, arguments)


def _called(call: Callable[..., list[Record]], arguments: tuple[Any, ...]) -> list[Record]:
    """Rounds were chosen by whoever asked, and where they end is what is measured: no advice on them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return call(*arguments)


def run_jobs(
    jobs: Sequence[Job],
    results: Results,
    processes: int | None,
    title: str,
    show: bool = True,
) -> None:
    """Run the jobs that are missing; records are written as they arrive, so a stop loses one job at most.

    ``processes`` None is one per core; 0 runs them in this process, one after the other.
    """
    todo = [job for job in jobs if not job.done(results)]
    many = max(1, min(processes or os.cpu_count() or 1, len(todo) or 1))
    board = Board(todo, len(jobs), title, show)
    with locked_folder(writable_folder(results.folder)), board.progress:
        remove_temporary(results.folder)
        if not todo:
            return
        if processes == 0:
            for number, job in enumerate(todo):
                board.at(number, 0.0, "")
                before = _report.set(partial(board.at, number))
                try:
                    results.add(_called(job.call, job.arguments))
                finally:
                    _report.reset(before)
                board.at(number, 1.0, "done")
            return
        context = multiprocessing.get_context("spawn")
        with (
            board.line(context) as line,
            ProcessPoolExecutor(many, mp_context=context, initializer=_begin, initargs=(line,)) as pool,
        ):
            futures = {
                pool.submit(_in_worker, number, job.call, job.arguments): number
                for number, job in enumerate(todo)
            }
            try:
                for future in as_completed(futures):
                    results.add(future.result())
                    board.at(futures[future], 1.0, "done")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
