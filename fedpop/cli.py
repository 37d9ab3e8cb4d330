"""The command line. Each command imports only what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import (
    OmitArgPrefixes,
    OmitSubcommandPrefixes,
    Positional,
    arg,
    configure,
    subcommand,
)
from tyro.extras import SubcommandApp

from fedpop.cli_data import DataDir, Get, Listing, Show
from fedpop.errors import CheckpointError, FedpopError, SettingsError, plain_warnings
from fedpop.extras import require_flower
from fedpop.version import __version__

if TYPE_CHECKING:
    from fedpop.report.records import Report
    from fedpop.report.results import Results

app = SubcommandApp()
REPORTS = {"compare": "fedpop.comparison", "demo": "fedpop.comparison.demo", "tune": "fedpop.comparison.tune"}
"""By what records say under "experiment": where the ``REPORT`` of them is."""


def _report_of(results: Results) -> Report:
    """What reports on these records."""
    kinds = {r["experiment"] for r in results.records}
    if len(kinds) != 1 or not kinds <= set(REPORTS):
        raise CheckpointError(
            f"{results.folder / 'results.json'} holds records of {', '.join(sorted(kinds)) or 'nothing'}; "
            f"there are reports of {', '.join(REPORTS)}, and in a checkout python -m research report FOLDER "
            "makes those of the paper's experiments"
        )
    found: Report = import_module(REPORTS[kinds.pop()]).REPORT
    return found


@app.command
def demo(out: Path = Path("runs/demo"), seed: int = 0) -> None:
    """Run the paper's synthetic task, print a table and write a report to look at.

    Args:
        out: Folder for the report and the results.
        seed: Which data to draw.
    """
    from fedpop.comparison.demo import run_demo

    run_demo(out, seed)


@app.command
def compare(
    config: Positional[Path],
    out: Annotated[Path | None, arg(metavar="PATH")] = None,
    data_dir: DataDir = None,
    seeds: Annotated[int | None, arg(metavar="INT")] = None,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """Methods under one protocol: a table, results.json, results.md, report.html; goes on where it stopped.

    Args:
        config: A TOML file with a task, the terms and methods; see examples/.
        out: Folder for the results; runs/NAME of the file by default.
        data_dir: Folder that is searched for images first, in place of what the file says.
        seeds: How many seeds, in place of what the file says.
        processes: Worker processes; one per core by default.
    """
    from fedpop.comparison.config import compare_file

    compare_file(config, out, data_dir, seeds, processes)


@app.command
def tune(
    config: Positional[Path],
    out: Annotated[Path | None, arg(metavar="PATH")] = None,
    data_dir: DataDir = None,
    processes: Annotated[int | None, arg(metavar="INT")] = None,
) -> None:
    """Search methods' settings at random on validation examples; writes tuned.toml for fedpop compare.

    Args:
        config: A TOML file as for fedpop compare, with [method.search] tables.
        out: Folder for the trials; runs/NAME-tune of the file by default.
        data_dir: Folder that is searched for images first, in place of what the file says.
        processes: Worker processes; one per core by default.
    """
    from fedpop.comparison.tune import tune_file

    tune_file(config, out, data_dir, processes)


@app.command
@configure(OmitSubcommandPrefixes, OmitArgPrefixes)
def data(
    do: Annotated[Get, subcommand("get")]
    | Annotated[Listing, subcommand("list")]
    | Annotated[Show, subcommand("show")],
) -> None:
    """Sets of images: fetch them, list them, or see who has what when they are dealt to clients."""
    do.run()


@app.command
def fit(
    data: Annotated[Path, Positional, arg(metavar="DATA")],
    formula: Annotated[str, Positional, arg(metavar="FORMULA")],
    family: Annotated[str, arg(metavar="F")] = "gaussian",
    method: Annotated[str, arg(metavar="M")] = "ML",
    weights: Annotated[str | None, arg(metavar="COLUMN")] = None,
    sites: Annotated[str | None, arg(metavar="COLUMN")] = None,
    json: Annotated[Path | None, arg(metavar="FILE")] = None,
    seed: Annotated[int, arg(metavar="N")] = 0,
    engine: Annotated[str, arg(metavar="E")] = "auto",
    rounds: Annotated[int | None, arg(metavar="N")] = None,
    min_count: Annotated[int, arg(metavar="N")] = 5,
    levels: Annotated[tuple[str, ...], arg(metavar="COLUMN=LEVEL,LEVEL")] = (),
    contrasts: Annotated[tuple[str, ...], arg(metavar="COLUMN=CODING")] = (),
    na: Annotated[tuple[str, ...], arg(metavar="WORD")] = ("NA",),
) -> None:
    """Fit a mixed model by lme4's formula; each group is a client, and its rows stay with it.

    Args:
        data: A CSV or Parquet file.
        formula: As in lme4: "y ~ x + (x | group)".
        family: gaussian, bernoulli, binomial, poisson, negative-binomial, gamma or beta-binomial, with a
            link where it is not the usual one: "binomial(probit)".
        method: ML, or REML for gaussian models.
        weights: A column of weights.
        sites: A column that says at which site a row is, where sites hold many groups.
        json: Write estimates and groups' posteriors to this file.
        seed: Of chains and of intervals.
        engine: exact, sampled, or auto for whichever applies.
        rounds: Rounds of the sampled engine; by default, until it has converged.
        min_count: The smallest cell of a predictor's level that is not suppressed.
        levels: The order of a predictor's levels, the baseline first: arm=placebo,drug.
        contrasts: How a predictor is coded: arm=sum; treatment, sum, helmert or poly.
        na: Words that stand for missing values, beside empty fields.
    """
    from fedpop.mixed.model import fit_file, pairs

    orders = {n: text.split(",") for n, text in pairs("levels", levels).items()}
    coded = pairs("contrasts", contrasts)
    settings = {"method": method, "weights": weights, "sites": sites, "engine": engine, "rounds": rounds}
    beside = {"levels": orders, "contrasts": coded, "na": na, "seed": seed, "min_count": min_count}
    sys.stdout.write(fit_file(data, formula, family, json, **settings, **beside))


@app.command
def methods() -> None:
    """List every method with what it supports, a live client's memory, and its reference."""
    from fedpop.report.features import show

    show()


@app.command
def report(folder: Positional[Path]) -> None:
    """Write report.html into the folder of a run, of a federation or of a comparison.

    Args:
        folder: A folder that holds metrics.jsonl or results.json, or that of a federation's server.
    """
    from fedpop.files import reading
    from fedpop.report.results import Results
    from fedpop.report.run import tell_run

    if (folder / "results.json").exists():
        results = Results.open(folder)
        with reading(folder / "results.json", "a comparison's results"):
            _report_of(results).tell(results)
    else:
        tell_run(folder)


@app.command
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"fedpop {__version__}\n")


@app.command
def server() -> None:
    """A federation's server, on Flower: init, admit, run, fit, status, watch, certificate."""
    _federated("server", ["--help"])


@app.command
def site() -> None:
    """A site of a federation: enrol, join, ledger, predict, effects, residuals, personalise."""
    _federated("site", ["--help"])


def _federated(who: str, arguments: list[str]) -> None:
    """The commands of a server or a site, with their options."""
    require_flower()
    import_module("fedpop.flower.commands").run_command(who, arguments)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``fedpop``."""

    def answer(given: list[str]) -> None:
        if given[:1] in (["server"], ["site"]):
            _federated(given[0], given[1:] or ["--help"])
            return
        app.cli(
            prog="fedpop",
            description="Personalised federated learning that knows what it does not know.",
            args=given,
        )

    given = sys.argv[1:] if arguments is None else arguments
    given = {(): ["--help"], ("--version",): ["version"], ("-V",): ["version"]}.get(tuple(given), given)
    answered(answer, given)


def answered(answer: Callable[[list[str]], None], given: list[str], name: str = "fedpop") -> None:
    """Answer a command line; what went wrong is a line for people, which begins with the command's name."""
    try:
        with plain_warnings():
            if "" in given:  # paths take it for the current folder
                raise SettingsError(
                    f"argument {given.index('') + 1} is empty: is a variable of the shell not set?"
                )
            answer(given)
    except FedpopError as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted; what was finished is saved\n")
        raise SystemExit(130) from None
