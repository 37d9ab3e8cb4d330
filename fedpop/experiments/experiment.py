"""What an experiment is: jobs that make records, and a report of them.

One module or package for each, named as it is, with its ``EXPERIMENT``; ``names`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpop.data.images import prepare
from fedpop.errors import CheckpointError, DataError, SettingsError, warn_user
from fedpop.experiments.runner import Job, run_jobs, workers
from fedpop.extras import require_report
from fedpop.files import writable_folder
from fedpop.report.records import Report
from fedpop.report.results import Results


@dataclass(frozen=True)
class Asked:
    """What the jobs of an experiment depend on."""

    folder: Path
    """Where the records go."""
    seeds: int = 0
    data: Path | None = None
    """The folder in which data are looked for first."""


@dataclass(frozen=True, kw_only=True)
class Experiment(Report):
    """A report, and the jobs that make its records; all experiments are run with the same words."""

    jobs: Callable[[Asked], Sequence[Job]]
    seeds: int | None
    """How many unless told; None where the experiment has seeds of its own."""
    data: str = ""
    """Which data it needs, where it does not draw its own."""

    def asked(self, out: Path | None = None, seeds: int | None = None, data: Path | None = None) -> Asked:
        """The words, checked, with this experiment's defaults."""
        if self.seeds is None and seeds is not None:
            raise SettingsError(f"{self.name} knows its seeds by itself: leave out --seeds")
        if seeds is not None and seeds < 1:
            raise SettingsError(f"--seeds must be at least 1, not {seeds}")
        if data is not None and not self.data:
            raise SettingsError(f"{self.name} draws its own data: leave out --data-dir")
        chosen = (self.seeds or 0) if seeds is None else seeds
        return Asked(out or Path("results") / self.name, chosen, data)

    def command(self, results: Results) -> str:
        there = 1 + max((r["seed"] for r in results.records), default=-1)
        seeds = f" --seeds {there}" if self.seeds is not None and there > self.seeds else ""
        return f"fedpop experiment {self.name}{seeds}"

    def run(
        self,
        out: Path | None = None,
        seeds: int | None = None,
        processes: int | None = None,
        data: Path | None = None,
        only: str = "",
        again: bool = False,
    ) -> Path:
        """Run the jobs that are missing, those whose label has ``only`` in it, and write the report.

        With ``again``, what another version of fedpop made is made anew.
        """
        require_report()
        asked = self.asked(out, seeds, data)
        many = workers(processes)
        jobs = self.jobs(asked)
        chosen = [job for job in jobs if only in job.label]
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
        prepare_all([job for job in chosen if not job.done(results, again)], data)
        run_jobs(chosen, results, many, self.name, again=again)
        return self.tell(results)


def prepare_all(jobs: Sequence[Job], folder: Path | None) -> None:
    """Find or fetch and decode what these jobs read: missing files are told before hours of work."""
    for images, split in sorted({need for job in jobs for need in job.needs}):
        try:
            prepare(images, folder, (split,))
        except DataError as error:
            without = next((job.label for job in jobs if images not in {name for name, _ in job.needs}), None)
            hint = f". Jobs that do without {images} can be run with --only, such as {without!r}"
            raise DataError(f"{error}{hint if without else ''}") from error
