"""A progress bar with the numbers that matter."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fedpop.evaluation.verdict import Verdict


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(2_500_000)
    '2.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def privacy_words(metrics: Mapping[str, Any]) -> str:
    """Both ledgers in a line.

    >>> privacy_words({"epsilon": 1.23, "epsilon_end": 4.0, "epsilon_server": "none: it sees each message"})
    'epsilon 1.23 of 4 (server: none: it sees each message)'
    """
    server = metrics.get("epsilon_server")
    server = f"{server:.3g}" if isinstance(server, float) else server
    end = metrics.get("epsilon_end")
    return f"epsilon {metrics['epsilon']:.3g}{'' if end is None else f' of {end:.3g}'} (server: {server})"


class Bar:
    """One line per run."""

    def __init__(self, progress: Progress | None, task: Any) -> None:
        self._progress, self._task = progress, task

    def say(self, verdict: Verdict | None) -> None:
        """The last word, where there is one."""
        if self._progress is not None and verdict is not None:
            self._progress.console.print(f"theta: {verdict.words}", highlight=False)

    def update(self, round: int, rounds: int, metrics: dict[str, Any]) -> None:
        if self._progress is None:
            return
        parts = [f"active {metrics['active']}"]
        if metrics.get("loss") is not None:
            parts.insert(0, f"loss {metrics['loss']:.3f}")
        if metrics.get("acceptance") is not None:
            parts.append(f"accept {metrics['acceptance']:.2f}")
        if metrics.get("epsilon") is not None:
            parts.append(privacy_words(metrics))
        parts.append(human_bytes(metrics["bytes_up"] + metrics["bytes_down"]))
        self._progress.update(self._task, completed=round, total=rounds, numbers="  ".join(parts))


@contextmanager
def progress_bar(label: str, rounds: int, start: int, show: bool | None, engine: str = "") -> Iterator[Bar]:
    """A bar on standard error, below the engine and why it is that; ``show`` None: on a terminal only."""
    if not (sys.stderr.isatty() if show is None else show):
        yield Bar(None, None)
        return
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=8) as progress:
        if engine:
            progress.console.print(f"{label}, {engine}", highlight=False)
        task = progress.add_task(label, total=rounds, completed=start, numbers="")
        yield Bar(progress, task)
