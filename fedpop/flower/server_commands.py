"""The server's commands: make a federation's folder, admit sites, run it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedpop.errors import SettingsError
from fedpop.files import digest_of_bytes, read_bytes, writable_folder, write_bytes, write_json
from fedpop.flower import certificates
from fedpop.flower.certificates import check_name
from fedpop.flower.logs import LogLine
from fedpop.flower.metrics import of_run, serving_metrics
from fedpop.flower.processes import (
    INSECURE,
    LogTail,
    Supervised,
    alone,
    environment,
    make_private,
    require_flower,
    require_free,
)
from fedpop.flower.server_folder import FIT, FORMULA_FILE, LAYOUT, PRINTED, ServerFolder
from fedpop.flower.status import NewRounds, read_state, round_words, standing
from fedpop.flower.stock import make_signature
from fedpop.version import __version__

Say = Callable[[str], None]
RUN_TRIES = 3
"""Times that a run is begun again without a round in between."""
CONNECTION = "fedpop"
FIT_LETTERS = 40
"""Letters of a formula in the name of its folder."""

PROJECT = """# An app of Flower's: `flwr run` takes it as it is. The code is fedpop's.
[project]
name = "{name}"
version = "1.0.0"
description = "A federation of fedpop's"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedpop"

[tool.flwr.app.components]
serverapp = "fedpop.flower.server:app"
clientapp = "fedpop.flower.client:app"

[tool.flwr.app.config]
folder = {folder}
sites = ""
"""

SETTINGS = """name = "{name}"

# What sites' data look like: columns of a table. (Images: size = [3, 32, 32] and classes = [...].)
[data]
x = ["x1", "x2"]       # columns in
y = "y"                # column out
categories = []        # those of x that hold names, not numbers
# range = {{x1 = [0, 120]}} # checked at each site
# unit = {{x1 = "years"}}   # each site states that its column is in it
# missing = "drop"        # rows in which something is missing are left out; else they are an error
# group = "patient"    # a column whose values are units at a site
# split = "split"      # a column that says train, validation or test

# A model, or a function of the number of inputs that makes one: module:name, a file beside this one.
[model]
entry = "model:model"

[method]
name = "FedSOUL"

[run]
rounds = 50
seed = 0

# Rounds begin with so many sites and close on a quorum, or after so many seconds.
[sites]
sites = {sites}              # while fewer can be asked the server waits
# begin = 4            # the first round waits for more of them
quorum = 1.0           # the share of those asked whose replies close a round
# grace = 30.0         # seconds that it then still waits for the others
timeout = 600.0
# unheard = 10         # rounds after which one waits for a site that was not heard

[server]
address = "{address}"  # under which sites reach it
# listen = "0.0.0.0:8000" # where it listens, if not there: behind a router, say
{privacy}"""

FORMULA_SETTINGS = """name = "{name}"

# A mixed model: the words of fedpop.mixed_model (formula, family, method, weights, levels, min_count, ...).
[model]
{model}
[run]
seed = 0

# All sites must answer; the search begins when so many are there.
[sites]
sites = {sites}
timeout = 600.0

[server]
address = "{address}"  # under which sites reach it
# listen = "0.0.0.0:8000" # where it listens, if not there: behind a router, say
{privacy}"""

SECURE_BY_DEFAULT = 4
"""Sites from which a new federation's sums are secure: the fewest that can lose one."""
SECURE_SUMS = """
# Nobody sees what one site sends, only sums over at least three sites.
[privacy]
{line}
"""

MODEL = '''"""The model of this federation: the same at every site."""

from torch import nn

import fedpop as fp


def model(inputs: int) -> fp.Composition:
    """A linear model whose coefficients differ between sites."""
    return fp.Composition(None, nn.Linear(inputs, 1), fp.likelihoods.Normal())
'''


def _checks() -> Any:
    """What looks at methods and models, and needs torch."""
    return import_module("fedpop.flower.checks")


def init(
    root: Path,
    name: str,
    address: str,
    hosts: list[str],
    insecure: bool,
    say: Say,
    about: Mapping[str, str] | None = None,
    sites: int = 0,
) -> None:
    """Make a federation's folder, where ``about`` has one for a formula; nothing in it is ever overwritten.
    With four sites or more its sums are secure."""
    if about is not None:
        _checks().check_formula(about, name)  # what is wrong with it is an error now
    check_name(name)
    host, _ = certificates.split_address(address)
    for other in hosts:
        certificates.named_host(other)
    if (root / "version.json").exists():
        raise SettingsError(f"{root} is a federation's folder already; choose another one")
    folder = ServerFolder(writable_folder(root).absolute())
    for sub in (folder.app, folder.admitted, folder.logs, folder.flower):
        writable_folder(sub)
    path = json.dumps(str(folder.root))
    secure = sites >= SECURE_BY_DEFAULT and not insecure
    private = SECURE_SUMS.format(line="secure = true" if secure else "# secure = true")
    write_bytes(folder.app / "pyproject.toml", PROJECT.format(name=name.lower(), folder=path).encode())
    if about is None:
        text = SETTINGS.format(name=name, address=address, sites=sites or 2, privacy=private)
        write_bytes(folder.app / "model.py", MODEL.encode())
    else:
        text = FORMULA_SETTINGS.format(
            name=name, address=address, model=toml_of(about), sites=sites or 2, privacy=private
        )
    write_bytes(folder.app / "federation.toml", text.encode())
    if insecure:
        say(INSECURE)
    else:
        writable_folder(folder.tls).chmod(0o700)
        certificates.make_authority(folder.tls, name)
        certificates.make_server_certificate(folder.tls, [host, *hosts])
        make_signature(folder.tls)
    write_json(folder.root / "version.json", {"version": __version__, "layout": LAYOUT})
    _connect(folder, None if insecure else folder.tls / "ca.crt")
    make_private(folder.root, lambda words: None)
    say(f"{root} holds a federation. Next:")
    edited = folder.app / "federation.toml"
    say(f"  1. edit {edited} and {folder.app / 'model.py'}" if about is None else f"  1. look at {edited}")
    ca = "" if insecure else f" and {folder.tls / 'ca.crt'}"
    say(f"  2. give the address {address}{ca} to the sites; each one runs")
    more = "--insecure" if insecure else "--ca ca.crt"
    say(f"       fedpop site enrol SITE --name NAME --server {address} {more} --data PATH")
    if not insecure:
        say(f"  3. admit each site: fedpop server admit {root} NAME node.pub")
    say(f"  {3 if insecure else 4}. fedpop server run {root}")
    if secure:
        say("sums are secure: the server sees no site's messages. Its first greeting has the list of sites;")
        say(f"  each compares its fingerprint, fedpop server check {root}, and runs fedpop site trust SITE")
    elif sites == SECURE_BY_DEFAULT - 1 and not insecure:
        say(f"secure = true in {edited} hides each site's messages from the server; with three a lost site")
        say("  then stops the run until it is back")


def _connect(folder: ServerFolder, ca: Path | None) -> None:
    """For Flower's own command line, where somebody wants that."""
    how = "insecure = true" if ca is None else f"root-certificates = {json.dumps(str(ca))}"
    named = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
    simulated = '[superlink.local]\naddress = ":local:"\n'
    text = f'{named}address = "{folder.nearby}"\n{how}\n\n{simulated}'
    write_bytes(folder.flower / "config.toml", text.encode())


def certificate(root: Path, hosts: list[str], days: int, say: Say) -> None:
    """A new server certificate, from the same authority: sites need nothing new."""
    folder = ServerFolder(root)
    host, _ = certificates.split_address(folder.address)
    certificates.make_server_certificate(folder.tls, [host, *hosts], days)
    say(f"{folder.tls / 'server.crt'} is new; start the server again")


# --- run ---------------------------------------------------------------------------------------


def toml_of(about: Mapping[str, str | int]) -> str:
    """Texts and numbers as lines of TOML."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in about.items())


def fit(root: Path, about: Mapping[str, str | int], insecure: bool, say: Say) -> None:
    """Fit a further formula on the same sites, or go on; its folder goes by what it is."""
    folder = ServerFolder(root.absolute())
    _ = folder.settings  # nothing is made in a folder that is none
    _checks().check_formula(about, "check")
    text = toml_of(about)
    words = re.sub("[^a-z0-9]+", "-", str(about["formula"]).lower()).strip("-")[:FIT_LETTERS]
    name = f"{words}-{digest_of_bytes(text.encode())[:6]}"
    file = writable_folder(folder.fits / name) / FORMULA_FILE
    if not file.exists():
        write_bytes(file, text.encode())
    done = ServerFolder(folder.root, name)
    if (read_state(done) or {}).get("state") != "finished":
        run(root, insecure, say, fit=name)
    say(f"\n{read_bytes(done.run / PRINTED).decode()}")


def run(root: Path, insecure: bool, say: Say, stock: bool = False, fit: str = "") -> None:
    """Start the server's process, and keep it going until the run is over."""
    require_flower()
    folder = ServerFolder(root.absolute(), fit)
    _checks().check_folder(folder)  # what is wrong is an error now
    certificates.split_address(folder.address)
    host, port = certificates.split_address(folder.listen)
    if folder.insecure and not insecure:
        raise SettingsError(
            f"{folder.tls} has no certificate: make the folder without --insecure, or ask for it"
        )
    if insecure:
        say(LogLine(INSECURE))
    else:
        certificates.check_server_certificate(folder.tls)
    with alone(folder.root / "server", f"another process runs {folder.root} already"):
        require_free(host, port)
        for sub in (folder.logs, folder.flower, folder.run):
            writable_folder(sub)
        make_private(folder.root, say)
        flags = [flag for flag, given in {"--insecure": insecure, "--stock": stock}.items() if given]
        flags += ["--fit", fit] if fit else []
        child = Supervised(
            lambda: [sys.executable, "-m", "fedpop.flower.server", str(folder.root), *flags],
            environment(folder.flower),
            folder.logs / "server.log",
            lambda words: None,
        )
        numbers = lambda: of_run(standing(ServerFolder(folder.root)))  # noqa: E731
        with serving_metrics(folder.metrics, numbers, say):
            _RunWatch(folder, child, say).to_the_end()


class _RunWatch:
    """A run that goes on, however its process ends."""

    def __init__(self, folder: ServerFolder, child: Supervised, say: Say) -> None:
        self._folder, self._child, self._say = folder, child, say
        self._rounds = NewRounds(folder)
        self._rounds()  # what there was before
        self._log = LogTail(folder.run / "server.log", ("INFO", "WARNING"))  # errors end it

    def to_the_end(self) -> None:
        (self._folder.run / "status.json").unlink(missing_ok=True)
        in_vain, before = 0, self._rounds.seen
        with self._child as child:
            starts, paused = child.starts, False
            while True:
                time.sleep(0.2)
                runs = child.check()
                self._print_new()
                if runs:
                    starts, paused = child.starts, False
                    continue
                if paused and child.starts == starts:
                    continue
                paused = True
                state = read_state(self._folder) or {}
                if state.get("state") == "finished":
                    formula = (self._folder.run / PRINTED).exists()
                    where = self._folder.run / (FIT if formula else "population")
                    self._say(f"finished; {'the fit' if formula else 'theta'} is in {where}")
                    return
                why = state.get("why", "")
                if state.get("state") == "failed":
                    raise SettingsError(f"the run failed: {why}")
                in_vain = 0 if self._rounds.seen > before else in_vain + 1
                before, why = self._rounds.seen, f" ({why})" if why else ""
                if in_vain >= RUN_TRIES:
                    logs = f"{self._folder.run / 'server.log'} and {self._folder.logs / 'server.log'}"
                    raise SettingsError(
                        f"the run broke {RUN_TRIES} times without a round{why}; {logs} say more"
                    )
                self._say(LogLine(f"the run ended before its time{why}; it goes on from its last round"))

    def _print_new(self) -> None:
        for words in self._log.new():
            self._say(words)
        for line in self._rounds():
            self._say(round_words(line))
