"""The command line. Each command imports only what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

from fedpop.errors import FedpopError

app = SubcommandApp()
experiment = SubcommandApp()
app.command(experiment, name="experiment", help="Run one of the paper's experiments.")


@app.command
def demo(out: Path = Path("runs/demo"), seed: int = 0) -> None:
    """Run the paper's synthetic task, print a table and write a report to look at.

    Args:
        out: Folder for the report and the results.
        seed: Which data to draw.
    """
    from fedpop.experiments.commands import run_demo

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
    from fedpop.experiments.commands import run_compare

    run_compare(config, out, data, seeds, processes)


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
    from fedpop.experiments.commands import run_tune

    run_tune(config, out, data, processes)


@experiment.command
def synthetic(
    out: Path = Path("results/synthetic"),
    seeds: int = 10,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
    main_only: bool = False,
) -> None:
    """All the paper's synthetic settings over seeds; what is there already is not run again.

    Args:
        out: Folder for results.json, results.md and report.html.
        seeds: How many seeds per setting.
        processes: Worker processes; one per core unless told.
        main_only: Only the six (b, d, k), without the variants of shares and sizes.
    """
    from fedpop.experiments.commands import run_synthetic

    run_synthetic(out, seeds, processes, main_only)


@experiment.command
def defaults(
    data: Positional[Path],
    out: Path = Path("results/defaults"),
    seeds: int = 3,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """Why the defaults for networks are what they are: small image clients, one setting changed at a time.

    Args:
        data: Folder with cifar10/ (Parquet) and mnist/ (IDX).
        out: Folder for results.json, results.md and report.html.
        seeds: How many seeds per variant.
        processes: Worker processes; one per core unless told.
    """
    from fedpop.experiments.commands import run_defaults

    run_defaults(data, out, seeds, processes)


@experiment.command
def theory(
    out: Path = Path("results/theory"),
    seeds: int = 10,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """The paper's theorem, measured: bias in gamma, noise of participation and compression, local steps.

    Args:
        out: Folder for results.json, results.md and report.html.
        seeds: How many seeds per setting.
        processes: Worker processes; one per core unless told.
    """
    from fedpop.experiments.commands import run_theory

    run_theory(out, seeds, processes)


@experiment.command
def drift(
    out: Path = Path("results/drift"),
    seeds: int = 3,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """Where theta settles with local epochs on phi, against the exact optimum and the plain round.

    Args:
        out: Folder for results.json, results.md and report.html.
        seeds: How many draws of the task.
        processes: Worker processes; one per core unless told.
    """
    from fedpop.experiments.commands import run_drift

    run_drift(out, seeds, processes)


@experiment.command
def restarts(
    out: Path = Path("results/restarts"),
    synthetic: Path = Path("results/synthetic"),
    restarts: int = 3,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """The synthetic experiment's seeds that ended in a local optimum, run again with restarts.

    Args:
        out: Folder for results.json, results.md and report.html.
        synthetic: Folder with the synthetic experiment's results.
        restarts: Further runs from random starts.
        processes: Worker processes; one per core unless told.
    """
    from fedpop.experiments.commands import run_restarts

    run_restarts(out, synthetic, restarts, processes)


@experiment.command
def clusters(
    out: Path = Path("results/clusters"),
    seeds: int = 10,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """A population with two clusters: Normal, mixture and energy priors on clients never seen.

    Args:
        out: Folder for results.json, results.md, report.html and the learned populations.
        seeds: How many seeds.
        processes: Worker processes; one per core unless told.
    """
    from fedpop.experiments.commands import run_clusters

    run_clusters(out, seeds, processes)


@app.command
def methods() -> None:
    """List every method with what it supports, a live client's memory, and its reference."""
    from fedpop.experiments.commands import run_methods

    run_methods()


@app.command
def report(folder: Positional[Path]) -> None:
    """Write report.html into a run folder or an experiment's results folder.

    Args:
        folder: A folder that holds metrics.jsonl or results.json.
    """
    from fedpop.experiments.commands import run_report_command

    run_report_command(folder)


@app.command
def version() -> None:
    """Print the version."""
    import fedpop

    sys.stdout.write(f"fedpop {fedpop.__version__}\n")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``fedpop``."""
    try:
        app.cli(
            prog="fedpop",
            description="Personalised federated learning that knows what it does not know.",
            args=arguments,
        )
    except FedpopError as error:
        sys.stderr.write(f"fedpop: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("fedpop: interrupted; what was finished is saved\n")
        raise SystemExit(130) from None
