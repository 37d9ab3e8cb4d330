"""The server's commands: make a federation's folder, admit sites, run it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedpop.errors import SettingsError
from fedpop.files import digest_of_bytes, writable_folder, write_bytes, write_json
from fedpop.flower import certificates
from fedpop.flower.checks import check_deployment
from fedpop.flower.processes import LogTail, Supervised, environment, healthy, program, require_free
from fedpop.flower.server_folder import LAYOUT, ServerFolder
from fedpop.flower.site_folder import check_name
from fedpop.flower.site_state import is_locked
from fedpop.flower.status import read_rounds, read_state, round_words
from fedpop.version import __version__

Say = Callable[[str], None]
RUN_TRIES = 3
"""Times that a run is begun again without a round in between."""
COMMAND_SECONDS = 600
"""Seconds that a command of Flower's may take."""
SILENT_SECONDS = 60.0
"""Seconds after which Flower is asked what became of a run that has written nothing yet."""
CONNECTION = "fedpop"

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
sites = 2              # while fewer can be asked the server waits
# begin = 4            # the first round waits for more of them
quorum = 1.0           # the share of those asked whose replies close a round
# grace = 30.0         # seconds that it then still waits for the others
timeout = 600.0
# unheard = 10         # rounds after which one waits for a site that was not heard

[server]
address = "{address}"  # under which sites reach it
# listen = "0.0.0.0:8000" # where it listens, if not there: behind a router, say
"""

MODEL = '''"""The model of this federation: the same at every site."""

from torch import nn

import fedpop as fp


def model(inputs: int) -> fp.Composition:
    """A linear model whose coefficients differ between sites."""
    return fp.Composition(None, nn.Linear(inputs, 1), fp.likelihoods.Normal())
'''


def init(root: Path, name: str, address: str, hosts: list[str], insecure: bool, say: Say) -> None:
    """Make a federation's folder; nothing in it is ever overwritten."""
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
    write_bytes(folder.app / "pyproject.toml", PROJECT.format(name=name.lower(), folder=path).encode())
    write_bytes(folder.app / "federation.toml", SETTINGS.format(name=name, address=address).encode())
    write_bytes(folder.app / "model.py", MODEL.encode())
    if insecure:
        say(INSECURE)
    else:
        writable_folder(folder.tls).chmod(0o700)
        certificates.make_authority(folder.tls, name)
        certificates.make_server_certificate(folder.tls, [host, *hosts])
    write_json(folder.root / "version.json", {"version": __version__, "layout": LAYOUT})
    _connect(folder, None if insecure else folder.tls / "ca.crt")
    say(f"{root} holds a federation. Next:")
    say(f"  1. edit {folder.app / 'federation.toml'} and {folder.app / 'model.py'}")
    ca = "" if insecure else f" and {folder.tls / 'ca.crt'}"
    say(f"  2. give the address {address}{ca} to the sites; each one runs")
    more = "--insecure" if insecure else "--ca ca.crt"
    say(f"       fedpop site enrol SITE --name NAME --server {address} {more} --data PATH")
    if not insecure:
        say(f"  3. admit each site: fedpop server admit {root} NAME node.pub")
    say(f"  {3 if insecure else 4}. fedpop server run {root}")


INSECURE = (
    "warning: without TLS and keys anybody on the network can read all messages, and take part as any site. "
    "Use it on one machine only."
)


def certificate(root: Path, hosts: list[str], days: int, say: Say) -> None:
    """A new server certificate, from the same authority: sites need nothing new."""
    folder = ServerFolder(root)
    host, _ = certificates.split_address(folder.address)
    certificates.make_server_certificate(folder.tls, [host, *hosts], days)
    say(f"{folder.tls / 'server.crt'} is new; start the server again")


def admit(root: Path, name: str, key: Path, say: Say) -> None:
    """Take a site's public key among those that may take part; a running server registers it."""
    check_name(name)
    folder = ServerFolder(root)
    _ = folder.settings
    certificates.check_public_key(key)
    place = folder.admitted / f"{name}.pub"
    if place.exists() and place.read_bytes() != key.read_bytes():
        raise SettingsError(f"a site {name!r} was admitted with another key; remove {place} first")
    write_bytes(writable_folder(folder.admitted) / place.name, key.read_bytes())
    say(f"site {name} is admitted")


# --- run ---------------------------------------------------------------------------------------


def run(root: Path, insecure: bool, say: Say) -> None:
    """Start the SuperLink and the run, and keep both going until the run is over."""
    folder = ServerFolder(root.absolute())
    admitted = sorted(key.stem for key in folder.admitted.glob("*.pub"))
    check_deployment(folder.deployment(), folder.app, admitted)  # what is wrong is an error now
    certificates.split_address(folder.address)
    host, port = certificates.split_address(folder.listen)
    if folder.insecure and not insecure:
        raise SettingsError(
            f"{folder.tls} has no certificate: make the folder without --insecure, or ask for it"
        )
    if insecure:
        say(INSECURE)
    else:
        certificates.check_server_certificate(folder.tls)
    require_free(host, port)
    for sub in (folder.logs, folder.flower, folder.run):
        writable_folder(sub)
    ca = None if insecure else folder.tls / "ca.crt"
    _connect(folder, ca)
    link = Supervised(
        lambda: _superlink(folder, host, port, insecure),
        environment(folder.flower),
        folder.logs / "superlink.log",
        lambda words: say(f"SuperLink: {words}"),
    )
    with link:
        _RunWatch(folder, link, ca, say).to_the_end()


def _superlink(folder: ServerFolder, host: str, port: int, insecure: bool) -> list[str]:
    database = str(folder.flower / "superlink.db")
    begin = [program("flower-superlink"), "--host", host, "--port", str(port), "--database", database]
    if insecure:
        return [*begin, "--insecure"]
    files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
    named = [part for flag, file in files.items() for part in (flag, str(folder.tls / file))]
    return [*begin, *named, "--enable-supernode-auth"]


def _connect(folder: ServerFolder, ca: Path | None) -> None:
    how = "insecure = true" if ca is None else f"root-certificates = {json.dumps(str(ca))}"
    named = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
    simulated = '[superlink.local]\naddress = ":local:"\n'
    text = f'{named}address = "{folder.nearby}"\n{how}\n\n{simulated}'
    write_bytes(folder.flower / "config.toml", text.encode())


class _RunWatch:
    """A run that goes on, whichever of its processes ends."""

    def __init__(self, folder: ServerFolder, link: Supervised, ca: Path | None, say: Say) -> None:
        self._folder, self._link, self._ca, self._say = folder, link, ca, say
        self._registered: set[tuple[str, str]] = set()
        """Names and digests of keys."""
        self._again: dict[str, float] = {}
        """When a key that could not be registered is tried again."""
        self._printed = len(read_rounds(folder))
        self._log = LogTail(folder.run / "server.log", ("INFO", "WARNING"))  # errors end it

    def to_the_end(self) -> None:
        in_vain = 0
        while in_vain < RUN_TRIES:
            self._until_healthy()
            self._register()
            starts, before = self._link.starts, self._printed
            run = self._submit(starts)
            if run is not None and self._finished(run, starts):
                self._say(f"finished; theta is in {self._folder.run / 'population'}")
                return
            in_vain = 0 if self._printed > before or self._link.starts > starts else in_vain + 1
            self._say(f"the run ended before its time{self._why()}; it goes on from its last round")
        log = self._folder.run / "server.log"
        raise SettingsError(f"the run broke {RUN_TRIES} times without a round{self._why()}; {log} says more")

    def _why(self) -> str:
        status = read_state(self._folder) or {}
        return f" ({status['why']})" if status.get("state") == "broken" else ""

    def _until_healthy(self, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not (self._link.check() and healthy(self._folder.nearby, self._ca)):
            if time.monotonic() > end:
                raise SettingsError(f"the SuperLink does not answer:\n{self._link.log_end(1500)}")
            time.sleep(0.2)

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Flower's command line; it ends well even where it failed."""
        try:
            done = subprocess.run(
                [program("flwr"), *arguments, "--format", "json"],
                env=environment(self._folder.flower, certificates.split_address(self._folder.nearby)[0]),
                cwd=self._folder.root,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=COMMAND_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {
                "success": False,
                "error-message": f"flwr {arguments[0]} took more than {COMMAND_SECONDS} s",
            }
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            found = {"success": False, "error-message": (done.stderr or done.stdout)[-800:]}
        return found

    def _register(self) -> None:
        """Tell the SuperLink of keys that were admitted since."""
        if self._ca is None:
            return
        for key in sorted(self._folder.admitted.glob("*.pub")):
            known = (key.stem, digest_of_bytes(key.read_bytes()))
            if known in self._registered or self._again.get(key.stem, 0.0) > time.monotonic():
                continue
            found = self._flwr("supernode", "register", str(key), CONNECTION, "--name", key.stem)
            failure = str(found.get("error-message", ""))
            if not found.get("success") and "already" not in failure.lower():
                self._say(f"site {key.stem} could not be registered: {failure.strip()}")
                self._again[key.stem] = time.monotonic() + 60
                continue
            self._registered.add(known)
            self._say(f"site {key.stem} may take part")

    def _submit(self, starts: int) -> str | None:
        """The number of the run that has begun; None where the SuperLink went away before it could."""
        (self._folder.run / "status.json").unlink(missing_ok=True)
        here = f"folder={json.dumps(str(self._folder.root))}"  # it may have been moved since it was made
        found = self._flwr("run", str(self._folder.app), CONNECTION, "--run-config", here)
        if not found.get("success"):
            if not self._link.check() or self._link.starts != starts:
                return None
            raise SettingsError(f"Flower did not take the run: {found.get('error-message', found)}")
        self._say(f"run {found.get('run-id')} has begun")
        return str(found.get("run-id"))

    def _over(self, run: str) -> bool:
        """Whether Flower has ended a run that wrote nothing."""
        found = self._flwr("ls", CONNECTION, "--run-id", run)
        return any(str(r.get("status", "")).startswith("finished") for r in found.get("runs", []))

    def _finished(self, run: str, starts: int) -> bool:
        """Whether it came to its end; False where a process of it ended first."""
        asked = time.monotonic()
        while True:
            time.sleep(0.5)
            self._print_new()
            self._register()
            status = read_state(self._folder)
            if status is None:
                if time.monotonic() - asked > SILENT_SECONDS:
                    if self._over(run):
                        return False
                    asked = time.monotonic()  # its process starts slowly
            elif status["state"] == "finished":
                return True
            elif status["state"] == "broken":
                return False
            elif status["state"] == "failed":
                raise SettingsError(f"the run failed: {status['why']}")
            elif not is_locked(self._folder.run / "run"):
                return False
            if not self._link.check() or self._link.starts != starts:
                return False

    def _print_new(self) -> None:
        for words in self._log.new():
            self._say(words)
        lines = read_rounds(self._folder)
        for line in lines[self._printed :]:
            self._say(round_words(line))
        self._printed = max(self._printed, len(lines))
