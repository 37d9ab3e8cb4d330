"""``fedpop compare``: methods of a settings file under one protocol."""

from __future__ import annotations

from pathlib import Path

from fedpop.experiments.comparison import REPORT
from fedpop.experiments.comparison.run import compare_all
from fedpop.experiments.comparison.terms import seeds_of
from fedpop.experiments.config import read_config
from fedpop.experiments.runner import workers
from fedpop.extras import require_report


def compare_file(
    path: Path,
    out: Path | None = None,
    data: Path | None = None,
    seeds: int | None = None,
    processes: int | None = None,
) -> None:
    """Run what is missing and tell of all; settings that are given here count instead of the file's."""
    require_report()
    many = workers(processes)
    config = read_config(path, data)
    folder = out or Path("runs") / config.name
    chosen = config.seeds if seeds is None else seeds_of(seeds)
    results = compare_all(
        config.task, config.entries, config.terms, chosen, folder, resume=True, processes=many
    )
    REPORT.tell(results)
