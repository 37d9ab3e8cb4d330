"""``python -m research``: run the paper's experiments by name, and make their pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from fedpop import cli
from fedpop.cli_data import DataDir
from fedpop.errors import SettingsError
from research import EXPERIMENTS, experiment_named, listed

ABOUT = (
    f"Run an experiment: {', '.join(EXPERIMENTS)}; what is there already is not run again. Without a name, "
    "list them with what they show; report FOLDER makes the page of a folder of records again."
)


def run(
    name: Annotated[str, Positional, arg(metavar="NAME")],
    out: Annotated[Path | None, arg(metavar="PATH")] = None,
    seeds: Annotated[int | None, arg(metavar="INT")] = None,
    passes: Annotated[int | None, arg(metavar="INT")] = None,
    only: Annotated[str, arg(metavar="TEXT")] = "",
    data_dir: DataDir = None,
    again: Annotated[bool, FlagCreatePairsOff] = False,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
    method: Annotated[Path | None, arg(metavar="PATH")] = None,
) -> None:
    """Run an experiment by its name.

    Args:
        name: Which one.
        out: Folder for results.json, results.md and report.html; the experiment's own by default.
        seeds: How many seeds; the experiment's own number by default.
        passes: Backbone passes that every method may spend, in place of the experiment's own budget.
        only: Run only jobs with this text in their label, such as "main" or "seed 0".
        data_dir: Folder in which data are looked for first, for an experiment that needs them.
        again: Make anew what another version of fedpop made.
        processes: Worker processes; one per core by default.
        method: A file with a method of your own, which joins the leaderboard.
    """
    if name not in EXPERIMENTS:
        raise SettingsError(f"there is no experiment {name!r}; there are\n{listed()}")
    experiment_named(name).run(
        out=out,
        seeds=seeds,
        passes=passes,
        data=data_dir,
        processes=processes,
        only=only,
        again=again,
        method=method,
    )


def report(folder: Positional[Path]) -> None:
    """Write results.md and report.html again from the records of a folder.

    Args:
        folder: A folder that holds results.json.
    """
    from fedpop.report.results import Results

    kinds = {r["experiment"] for r in Results.open(folder).records}
    if len(kinds) == 1 and kinds <= set(EXPERIMENTS):
        experiment_named(kinds.pop()).tell_of(folder)
    else:  # a search of settings, say, which the package knows how to tell of
        cli.report(folder)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m research``."""

    def answer(given: list[str]) -> None:
        if not given:
            sys.stdout.write(f"python -m research NAME runs one of\n{listed()}\n")
        elif given[0] == "report":
            tyro.cli(report, prog="python -m research report", args=given[1:])
        else:
            tyro.cli(run, prog="python -m research", description=ABOUT, args=given)

    cli.answered(answer, sys.argv[1:] if arguments is None else arguments, "research")


if __name__ == "__main__":
    main()
