"""What an experiment is: jobs that make records, and tables and a page that are made of these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedpop.comparison import runner
from fedpop.comparison.runner import run_jobs, workers
from fedpop.data.images import prepare
from fedpop.errors import CheckpointError, DataError, SettingsError, warn_user
from fedpop.extras import require_report
from fedpop.files import reading, writable_folder, write_bytes
from fedpop.report.records import Report
from fedpop.report.results import Record, Results
from fedpop.version import __version__

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job(runner.Job):
    """A job that says which images it reads, and may do again what another version of fedpop did."""

    needs: tuple[tuple[str, str], ...] = ()
    """Sets of images, with the split: ("cifar10", "train")."""
    again: bool = False
    """Records count only if this version made them."""
    smaller: tuple[dict[str, Any], ...] = ()
    """Settings with smaller budgets, whose records it makes, too."""

    def done(self, results: Results) -> bool:
        records = [r for r in results.records if not self.again or r["version"] == __version__]
        found = Results(results.folder, records)
        return super().done(found) and all(own.done(found) for own in self._each())

    def overrules(self, r: Record) -> bool:
        return super().overrules(r) or any(own.overrules(r) for own in self._each())

    def _each(self) -> list[Job]:
        return [replace(self, setting=setting, smaller=()) for setting in self.smaller]


def hours(jobs: Sequence[Job], results: Results) -> float | None:
    """Of one core, by the seconds that a backbone pass of the same method took in the records, on the same
    images where there are such, and of any where there are none; None where nothing is known of them."""
    paces: dict[tuple[str, ...], list[float]] = {}
    for r in results.records:
        passes, seconds = (r["cost"].get(name) for name in ("backbone_passes", "seconds"))
        if passes and seconds:
            for key in ((r["method"], r["setting"].get("dataset", "")), (r["method"],), ()):
                paces.setdefault(key, []).append(seconds / passes)
    if () not in paces or not all("passes" in job.setting for job in jobs):
        return None

    def seconds_of(job: Job) -> float:
        (method,), images = job.methods, job.setting.get("dataset", "")
        known = next(paces[key] for key in ((method, images), (method,), ()) if key in paces)
        return float(job.setting["passes"]) * median(known)

    return sum(map(seconds_of, jobs)) / 3600


def ahead(jobs: Sequence[Job], every: int, results: Results) -> str:
    """What is said before the first of them begins."""
    many = f"{len(jobs)} of {every} runs are to be made"
    found = hours(jobs, results)
    return many if found is None else f"{many}: about {found:.1f} hours of one core, as runs took before"


@dataclass(frozen=True)
class Asked:
    """What the jobs of an experiment depend on."""

    folder: Path
    """Where the records go."""
    seeds: int = 0
    data: Path | None = None
    """The folder in which data are looked for first."""
    passes: int | None = None
    """A budget of backbone passes in place of the experiment's own."""
    method: Path | None = None
    """A file with methods of one's own, for a leaderboard."""


@dataclass(frozen=True, kw_only=True)
class Experiment(Report):
    """A report, and the jobs that make its records; all experiments are run with the same words."""

    jobs: Callable[[Asked], Sequence[Job]]
    seeds: int | None
    """How many by default; None where the experiment has seeds of its own."""
    data: str = ""
    """Which data it needs, where it does not draw its own."""
    budgets: Callable[[Results], Sequence[int]] | None = None
    """Budgets of backbone passes that records are distinguished by, its own where there are none; None where
    rounds are counted instead."""
    pictures: Callable[[Results], Mapping[str, str]] | None = None
    """SVG files beside the page, by name, for texts that show them."""
    per_seed: Callable[[Record], bool] = lambda r: True
    """Which records there is one of for each seed; others count splits, say, by their own number."""

    @property
    def folder(self) -> Path:
        """Where its records are by default."""
        return HERE / self.name.replace("-", "_") / "results"

    def asked(
        self,
        out: Path | None = None,
        seeds: int | None = None,
        data: Path | None = None,
        passes: int | None = None,
        method: Path | None = None,
    ) -> Asked:
        """The words, checked, with this experiment's defaults."""
        if self.seeds is None and seeds is not None:
            raise SettingsError(f"{self.name} knows its seeds by itself: leave out --seeds")
        if seeds is not None and seeds < 1:
            raise SettingsError(f"--seeds must be at least 1, not {seeds}")
        if data is not None and not self.data:
            raise SettingsError(f"{self.name} draws its own data: leave out --data-dir")
        if passes is not None and self.budgets is None:
            raise SettingsError(f"{self.name} counts rounds, not backbone passes: leave out --passes")
        if passes is not None and passes < 1:
            raise SettingsError(f"--passes must be at least 1, not {passes}")
        if method is not None and self.name != "leaderboard":
            raise SettingsError(f"{self.name} has its own methods: --method is for leaderboard")
        if method is not None and not method.is_file():
            raise SettingsError(f"--method {method}: there is no such file")
        chosen = (self.seeds or 0) if seeds is None else seeds
        return Asked(out or self.folder, chosen, data, passes, method)

    def run(
        self,
        *,
        out: Path | None = None,
        seeds: int | None = None,
        passes: int | None = None,
        data: Path | None = None,
        processes: int | None = None,
        only: str = "",
        again: bool = False,
        method: Path | None = None,
    ) -> Path:
        """Run the jobs that are missing, those whose label has ``only`` in it, and write the report.

        With ``again``, what another version of fedpop made is made anew.
        """
        require_report()
        asked = self.asked(out, seeds, data, passes, method)
        many = workers(processes)
        jobs = self.jobs(asked)
        chosen = [replace(job, again=again) for job in jobs if only in job.label]
        if not chosen:
            raise SettingsError(
                f"--only {only}: no job of {self.name} is called so; the first is {jobs[0].label!r}"
            )
        results = Results.open(writable_folder(asked.folder))
        others = sorted({r["experiment"] for r in results.records} - {self.name})
        if others:
            raise CheckpointError(
                f"{asked.folder / 'results.json'} holds records of {', '.join(others)}; use another --out"
            )
        old = [r for r in results.records if any(job.overrules(r) for job in chosen)]
        if old:
            of = ", ".join(sorted({r["method"] for r in old}))
            warn_user(f"{len(old)} records of {of} were made with other settings and give way to new ones")
            results.records = [r for r in results.records if r not in old]
        missing = [job for job in chosen if not job.done(results)]
        prepare_all(missing, data)
        if missing:
            sys.stderr.write(f"{ahead(missing, len(chosen), results)}\n")
        torch.set_num_threads(1)  # as workers have: numbers do not depend on how many there are
        run_jobs(chosen, results, many, self.name)
        return self.tell(results)

    def tell_of(self, folder: Path) -> Path:
        """The report again, from a folder's records."""
        results = Results.open(folder)
        with reading(folder / "results.json", "an experiment's results"):
            return self.tell(results)

    def write(self, results: Results) -> Path:
        path = super().write(results)
        for name, drawn in (self.pictures(results) if self.pictures else {}).items():
            write_bytes(results.folder / f"{name}.svg", drawn.encode())
        return path

    def made(self, results: Results) -> str:
        command = self.command(results)
        told = f"{super().made(results)} {self.outdated(results)}".rstrip()
        return told + (f" The command is: {command}" if command else "")

    def outdated(self, results: Results) -> str:
        """Whose records were made with other settings than theirs now, if anybody's."""
        budgets: Sequence[int | None] = [None]
        if self.budgets is not None:
            budgets = [None, *sorted({*self.budgets(results)} - {*self.budgets(Results(HERE))})]
        asked = [Asked(results.folder, int(self.seeds is not None), passes=passes) for passes in budgets]
        jobs = [job for one in asked for job in self.jobs(one)]
        old = [r["method"] for r in results.records if any(job.overrules(r) for job in jobs)]
        many = [f"{name} ({old.count(name)})" for name in dict.fromkeys(old)]
        if not many:
            return ""
        return f"Made with other settings than they have now, and anew by the command: {', '.join(many)}."

    def command(self, results: Results) -> str:
        """What one types for these records, where one command makes them all."""
        there = 1 + max((r["seed"] for r in results.records if self.per_seed(r)), default=-1)
        words = f" --seeds {there}" if self.seeds is not None and there > self.seeds else ""
        if self.budgets is not None and (passes := self.budgets(results)) != self.budgets(Results(HERE)):
            if len(passes) > 1:
                return ""
            words += f" --passes {passes[0]}"
        return f"python -m research {self.name}{words}"


def prepare_all(jobs: Sequence[Job], folder: Path | None) -> None:
    """Find or fetch and decode what these jobs read: missing files are reported before hours of work."""
    for images, split in sorted({need for job in jobs for need in job.needs}):
        try:
            prepare(images, folder, (split,))
        except DataError as error:
            without = next((job.label for job in jobs if images not in {name for name, _ in job.needs}), None)
            hint = f". Jobs that do without {images} can be run with --only, such as {without!r}"
            raise DataError(f"{error}{hint if without else ''}") from error
