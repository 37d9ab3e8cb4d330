"""``fedpop server ...`` and ``fedpop site ...``."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

from fedpop.flower.processes import Stopped, stop_on_signals

server, site = SubcommandApp(), SubcommandApp()
Text = Annotated[str | None, arg(metavar="TEXT")]
LOG = "fedpop.log"
File = Annotated[Path | None, arg(metavar="PATH")]

OTHERS_MASK = 0o077
"""What other users may not do with the files of a server or a site: anything."""


def run_command(who: str, arguments: list[str]) -> None:
    """One of the server's or a site's commands; files that it makes are its user's alone."""
    os.umask(OTHERS_MASK)
    {"server": server, "site": site}[who].cli(prog=f"fedpop {who}", args=arguments)


def _of(module: str) -> Any:
    """A module of this package, imported by the command that needs it: most need no torch."""
    return import_module(f"fedpop.flower.{module}")


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _formula(
    formula: str | None, family: str | None, method: str | None, weights: str | None
) -> dict[str, str] | None:
    """The words of ``[model]`` that were given."""
    given = {"formula": formula, "family": family, "method": method, "weights": weights}
    about = {name: value for name, value in given.items() if value is not None}
    return about or None


# --- the server's ------------------------------------------------------------------------------


@server.command
def init(
    folder: Positional[Path],
    name: str = "federation",
    address: str = "127.0.0.1:8000",
    hosts: tuple[str, ...] = (),
    insecure: bool = False,
    formula: Text = None,
    family: Text = None,
    method: Text = None,
    weights: Text = None,
    sites: int = 0,
) -> None:
    """Make a federation's folder: an app of Flower's, settings, an authority and the server's certificate.

    Args:
        folder: Where to make it.
        name: What the federation is called.
        address: host:port under which sites reach the server.
        hosts: Further names or addresses of the server, for its certificate.
        insecure: Neither TLS nor keys; for trials on one machine.
        formula: Of a mixed model that is to be fitted, as lme4 writes it; by default a model and a method.
        family: Of its response, as in fedpop fit.
        method: ML or REML.
        weights: A column, or an expression of columns.
        sites: How many there will be; with four or more their sums are secure.
    """
    about = _formula(formula, family, method, weights)
    _of("server_commands").init(folder, name, address, list(hosts), insecure, _say, about, sites)


@server.command
def admit(
    folder: Positional[Path], name: Positional[str], key: Positional[Path], replace: bool = False
) -> None:
    """Let a site take part, from now on.

    Args:
        folder: The federation's folder.
        name: What the site is called.
        key: Its public key, node.pub.
        replace: End the key that it was admitted with before.
    """
    _of("admission").admit(folder, name, key, _say, replace)


@server.command
def revoke(folder: Positional[Path], name: Positional[str]) -> None:
    """Let a site take part no longer, from now on.

    Args:
        folder: The federation's folder.
        name: What the site is called.
    """
    _of("admission").revoke(folder, name, _say)


@server.command(name="list")
def listed(folder: Positional[Path]) -> None:
    """Who is admitted, and who no longer is.

    Args:
        folder: The federation's folder.
    """
    _of("admission").listed(folder, _say)


@server.command
def run(
    folder: Positional[Path], insecure: bool = False, stock: bool = False, log_json: bool = False
) -> None:
    """Run the federation, or go on with it; ends when the run is over.

    Args:
        folder: The federation's folder.
        insecure: Neither TLS nor keys.
        stock: Send the app, signed, to sites that run Flower's stock node.
        log_json: Lines of the log, logs/fedpop.log, and of the terminal are JSON objects.
    """
    stop_on_signals()
    _ = _of("server_folder").ServerFolder(folder).settings  # nothing is made in a folder that is none
    with _of("logs").command_log(folder / "logs" / LOG, log_json) as say:
        try:
            _of("server_commands").run(folder, insecure, say, stock)
        except Stopped:
            say("stopped; fedpop server run goes on from the last round")
            raise SystemExit(130) from None


@server.command
def fit(
    folder: Positional[Path],
    formula: Positional[str],
    family: Text = None,
    method: Text = None,
    weights: Text = None,
    profile: bool = False,
    bootstrap: int = 0,
    insecure: bool = False,
) -> None:
    """Fit a further mixed model over the same sites, or go on with it, and print it.

    Args:
        folder: The federation's folder.
        formula: As lme4 writes it.
        family: Of its response, as in fedpop fit.
        method: ML or REML.
        weights: A column, or an expression of columns.
        profile: Profile intervals, too: some hundred questions to everyone.
        bootstrap: Parametric replicates, too, whose responses sites draw.
        insecure: Neither TLS nor keys.
    """
    stop_on_signals()
    about: dict[str, str | int] = {**(_formula(formula, family, method, weights) or {})}
    about |= {n: v for n, v in {"profile": profile, "bootstrap": bootstrap}.items() if v}
    with _of("logs").command_log(folder / "logs" / LOG, False) as say:
        try:
            _of("server_commands").fit(folder, about, insecure, say)
        except Stopped:
            say("stopped; the same command goes on")
            raise SystemExit(130) from None


@server.command
def fits(folder: Positional[Path]) -> None:
    """Compare the mixed models that were fitted: likelihoods, AIC, BIC, and tests of nested ones.

    Args:
        folder: The federation's folder.
    """
    _of("formulas").compare_fits(folder, _say)


@server.command(name="check")
def check_server(folder: Positional[Path]) -> None:
    """Whether method, model, settings and schema can be used; nobody is asked.

    Args:
        folder: The federation's folder.
    """
    _of("checks").server_check(folder, _say)


@server.command
def status(folder: Positional[Path], json: bool = False) -> None:
    """How a run stands: rounds, sites, who is late, bytes, metrics.

    Args:
        folder: The federation's folder.
        json: As a JSON object.
    """
    _of("status").status(folder, _say, json)


@server.command
def watch(folder: Positional[Path], port: int = 0) -> None:
    """Serve a live page of the run to this machine, until stopped; prints its address.

    Args:
        folder: The federation's folder.
        port: Of this machine; a free one by default.
    """
    stop_on_signals()
    try:
        _of("watch").serve_page(folder, port, _say)
    except Stopped:
        return


@server.command
def certificate(folder: Positional[Path], hosts: tuple[str, ...] = (), days: int = 365) -> None:
    """A new certificate for the server, from the same authority.

    Args:
        folder: The federation's folder.
        hosts: Names or addresses of the server beside that of its settings.
        days: How long it is valid.
    """
    _of("server_commands").certificate(folder, list(hosts), days, _say)


# --- a site's ------------------------------------------------------------------------------------


@site.command
def enrol(
    folder: Positional[Path],
    name: str,
    server: str,
    data: str,
    ca: File = None,
    insecure: bool = False,
) -> None:
    """Make a site's folder: its settings, its secret and its key pair.

    Args:
        folder: Where to make it.
        name: What the site is called.
        server: host:port of the server.
        data: A CSV or Parquet file, a folder of images, or module:function.
        ca: The federation's ca.crt.
        insecure: Neither TLS nor keys; for trials on one machine.
    """
    _of("site_commands").enrol(folder, name, server, data, ca, insecure, _say)


@site.command
def key(folder: Positional[Path], make: bool = False, take: File = None) -> None:
    """The key that sites have in common, by which they find groups that are at two of them; says its
    fingerprint.

    Args:
        folder: The site's folder.
        make: Draw one, for the other sites to take.
        take: The file that another site's operator gave.
    """
    os.umask(OTHERS_MASK)
    _of("site_folder").common_key(folder, make, take, _say)


@site.command
def trust(folder: Positional[Path], fingerprint: Text = None) -> None:
    """The list of sites between which sums are secure, as the server offered it last; this site takes part
    once somebody has confirmed it, and again when it changes.

    Args:
        folder: The site's folder.
        fingerprint: Of the list, as the server's operator or another site says it: confirms the list.
    """
    os.umask(OTHERS_MASK)
    _of("site_commands").trust(folder, fingerprint, _say)


@site.command(name="check")
def check_site(folder: Positional[Path], federation: File = None) -> None:
    """Whether this site's data fit the federation, and what would be sent; nothing is.

    Args:
        folder: The site's folder.
        federation: The federation's settings, federation.toml with its model beside it; by default what the
            server said when it last greeted this site.
    """
    _of("checks").site_check(folder, federation, _say)


@site.command
def join(
    folder: Positional[Path],
    data: Text = None,
    insecure: bool = False,
    stock: bool = False,
    log_json: bool = False,
) -> None:
    """Take part until stopped; the site's node is started again whatever ends it.

    Args:
        folder: The site's folder.
        data: In place of what the site was enrolled with.
        insecure: Neither TLS nor keys.
        stock: Flower's stock node, which runs the app that the server sends, if the federation signed it.
        log_json: Lines of the log, logs/fedpop.log, and of the terminal are JSON objects.
    """
    stop_on_signals()
    settings = _of("site_folder").read_site(folder)
    with (
        _of("logs").command_log(folder / "logs" / LOG, log_json) as say,
        _of("metrics").serving_ledger(folder, settings.metrics, say),
    ):
        try:
            _of("site_commands").join(folder, data, insecure, say, stock=stock)
        except Stopped:
            say("stopped; fedpop site join goes on")


@site.command
def ledger(
    folder: Positional[Path],
    json: bool = False,
    verify: bool = False,
    head: Text = None,
    last: Annotated[int | None, arg(metavar="N")] = None,
) -> None:
    """What left this site: time, run, round or question, vectors with their sizes, bytes.

    Args:
        folder: The site's folder.
        json: An entry is a JSON object, with the digests of what was sent.
        verify: Only check that nothing was changed or is missing, and print the last digest.
        head: A digest that was noted earlier; it must be there.
        last: How many entries to print; all by default.
    """
    _of("ledger_command").show(folder, json, verify, head, last, _say)


@site.command
def predict(
    folder: Positional[Path], data: str, out: File = None, level: float = 0.9, experiment: Text = None
) -> None:
    """Predictions with credible intervals from the site's personal models; nothing is sent.

    Args:
        folder: The site's folder.
        data: Rows to predict for: the columns of x, and the group where there is one.
        out: A CSV file; the terminal by default.
        level: Of the intervals.
        experiment: Which one; the last by default.
    """
    _of("offline").predict(folder, data, out, level, experiment, _say)


@site.command
def effects(
    folder: Positional[Path],
    out: File = None,
    plot: File = None,
    level: float = 0.95,
    experiment: Text = None,
) -> None:
    """Posteriors of this site's groups in a mixed model, as a table; nothing is sent.

    Args:
        folder: The site's folder.
        out: A CSV file; the terminal by default.
        plot: A picture of them, such as effects.png.
        level: Of the intervals.
        experiment: Which one; the last by default.
    """
    _of("offline").effects(folder, out, plot, level, experiment, _say)


@site.command
def residuals(
    folder: Positional[Path], out: File = None, plot: File = None, kind: Text = None, experiment: Text = None
) -> None:
    """Fitted values and residuals of this site's rows in a mixed model; nothing is sent.

    Args:
        folder: The site's folder.
        out: A CSV file; the terminal by default.
        plot: A picture of them, such as residuals.png.
        kind: response, pearson or deviance; by default as R has it for the family.
        experiment: Which one; the last by default.
    """
    _of("offline").residuals(folder, out, plot, kind, experiment, _say)


@site.command
def personalise(
    folder: Positional[Path], theta: Path, data: str, at: Text = None, out: File = None, level: float = 0.9
) -> None:
    """A model for a brand-new site from theta and its data; nothing is sent.

    Args:
        folder: The site's folder; made where there is none.
        theta: The folder run/theta of the federation's server.
        data: The site's data.
        at: Rows to predict for.
        out: A CSV file for the predictions; the terminal by default.
        level: Of the intervals.
    """
    _of("offline").personalise(folder, theta, data, at, out, level, _say)
