"""The command line. Each command imports only what it needs."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

from fedpop.errors import CheckpointError, FedpopError, SettingsError
from fedpop.experiments.names import EXPERIMENTS, FROM_FILES, listed
from fedpop.version import __version__

if TYPE_CHECKING:
    from fedpop.report.records import Report
    from fedpop.report.results import Results

app = SubcommandApp()
ABOUT_EXPERIMENTS = (
    f"Run an experiment: {', '.join(EXPERIMENTS)}; what is there already is not run again. Without a name, "
    "list them with what they show."
)


def _module(name: str) -> Any:
    """A module of the experiments; all of them together would take long to import."""
    return import_module(f"fedpop.experiments.{name}")


def _report_of(results: Results) -> Report:
    """What tells of these records."""
    kinds = {r["experiment"] for r in results.records}
    known = (*EXPERIMENTS, *FROM_FILES)
    if len(kinds) != 1 or not kinds <= set(known):
        raise CheckpointError(
            f"{results.folder / 'results.json'} holds records of {', '.join(sorted(kinds)) or 'nothing'}; "
            f"there are reports of {', '.join(known)}"
        )
    kind = kinds.pop()
    found: Report = _module(kind).EXPERIMENT if kind in EXPERIMENTS else _module(FROM_FILES[kind]).REPORT
    return found


@app.command
def demo(out: Path = Path("runs/demo"), seed: int = 0) -> None:
    """Run the paper's synthetic task, print a table and write a report to look at.

    Args:
        out: Folder for the report and the results.
        seed: Which data to draw.
    """
    from fedpop.experiments.demo import run_demo

    run_demo(out, seed)


@app.command
def compare(
    config: Positional[Path],
    out: Annotated[Path | None, arg(metavar="PATH")] = None,
    data: Annotated[Path | None, arg(metavar="PATH")] = None,
    seeds: Annotated[int | None, arg(metavar="INT")] = None,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """Methods under one protocol: a table, results.json, results.md, report.html; goes on where it stopped.

    Args:
        config: A TOML file with a task, the terms and methods; see examples/.
        out: Folder for the results; runs/NAME of the file unless told.
        data: Folder with the images, in place of what the file says.
        seeds: How many seeds, in place of what the file says.
        processes: Worker processes; one per core unless told.
    """
    from fedpop.experiments.comparison.command import compare_file

    compare_file(config, out, data, seeds, processes)


@app.command
def tune(
    config: Positional[Path],
    out: Annotated[Path | None, arg(metavar="PATH")] = None,
    data: Annotated[Path | None, arg(metavar="PATH")] = None,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """Search methods' settings at random on validation examples; writes tuned.toml for fedpop compare.

    Args:
        config: A TOML file as for fedpop compare, with [method.search] tables.
        out: Folder for the trials; runs/NAME-tune of the file unless told.
        data: Folder with the images, in place of what the file says.
        processes: Worker processes; one per core unless told.
    """
    from fedpop.experiments.tune import tune_file

    tune_file(config, out, data, processes)


@app.command(help=ABOUT_EXPERIMENTS)
def experiment(
    name: Annotated[str, Positional, arg(metavar="NAME")] = "",
    out: Annotated[Path | None, arg(metavar="PATH")] = None,
    seeds: Annotated[int | None, arg(metavar="INT")] = None,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
    data: Annotated[Path | None, arg(metavar="PATH")] = None,
    only: Annotated[str, arg(metavar="TEXT")] = "",
) -> None:
    """Run an experiment by its name.

    Args:
        name: Which one.
        out: Folder for results.json, results.md and report.html; results/NAME unless told.
        seeds: How many seeds; the experiment's own number unless told.
        processes: Worker processes; one per core unless told.
        data: Folder with the data, for an experiment that needs it.
        only: Run only jobs with this text in their label, such as "main" or "seed 0".
    """
    if not name:
        sys.stdout.write(f"fedpop experiment NAME runs one of\n{listed()}\n")
        return
    if name not in EXPERIMENTS:
        raise SettingsError(f"there is no experiment {name!r}; there are\n{listed()}")
    _module(name).EXPERIMENT.run(out, seeds, processes, data, only)


@app.command
def methods() -> None:
    """List every method with what it supports, a live client's memory, and its reference."""
    from fedpop.experiments.features import show

    show()


@app.command
def report(folder: Positional[Path]) -> None:
    """Write report.html into a run folder or an experiment's results folder.

    Args:
        folder: A folder that holds metrics.jsonl or results.json.
    """
    from fedpop.report.results import Results
    from fedpop.report.run import tell_run

    if (folder / "results.json").exists():
        results = Results.open(folder)
        _report_of(results).tell(results)
    else:
        tell_run(folder)


@app.command
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"fedpop {__version__}\n")


@app.command
def server() -> None:
    """A federation's server, on Flower: init, admit, run, status, certificate."""
    _federated("server", ["--help"])


@app.command
def site() -> None:
    """A site of a federation: enrol, join, predict, personalise."""
    _federated("site", ["--help"])


def _federated(who: str, arguments: list[str]) -> None:
    """The commands of a server or a site, which have options of their own."""
    commands: SubcommandApp = getattr(import_module("fedpop.runtime.flower.commands"), who)
    commands.cli(prog=f"fedpop {who}", args=arguments)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``fedpop``."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] in (["server"], ["site"]):
            _federated(given[0], given[1:] or ["--help"])
            return
        app.cli(
            prog="fedpop",
            description="Personalised federated learning that knows what it does not know.",
            args=arguments,
        )
    except FedpopError as error:
        sys.stderr.write(f"fedpop: {error}\n")
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:
        if error.name not in ("flwr", "cryptography"):
            raise
        sys.stderr.write(f"fedpop: {error.name} is not installed: pip install 'fedpop[flower]'\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("fedpop: interrupted; what was finished is saved\n")
        raise SystemExit(130) from None
