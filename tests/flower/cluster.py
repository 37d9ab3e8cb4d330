"""A federation of real processes on loopback, by the commands that people type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fedpop
from fedpop.flower import admission, server_commands, site_commands
from fedpop.flower.processes import free_port
from fedpop.flower.site_folder import SECRET

ROOT = Path(fedpop.__file__).parent.parent
WATCH = """import os, sys


def watch(event, given):
    if event == "socket.connect" and isinstance(given[1], tuple):
        with open(os.environ["FEDPOP_TEST_CLUSTER"] + "/contacts.txt", "a") as file:
            file.write(f"{given[1][0]}\\n")


sys.addaudithook(watch)
"""
"""Every Python that is started writes down whom it connects to."""
LOOPBACK = ("127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1")
MODEL = """import torch
from torch import nn

import fedpop as fp


def model(inputs: int) -> fp.Composition:
    body, head = nn.Linear(inputs, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        body.weight.copy_(torch.linspace(-1, 1, 2 * inputs).reshape(2, inputs))
        head.weight.copy_(torch.tensor([[0.5, -0.25]]))
    return fp.Composition(body, head, fp.likelihoods.Normal(0.5))
"""


def memory_of(pid: int) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def settings_of(method: str, rounds: int, sites: str, address: str) -> str:
    return f'''name = "test"
[data]
x = ["a", "b", "c"]
y = "y"
standardise = false
[method]
{method}
[run]
rounds = {rounds}
afterwards = []
[sites]
{sites}
[server]
address = "{address}"
'''


class Cluster:
    """A server's folder and sites' folders below one; all processes are stopped at the end."""

    def __init__(
        self, root: Path, tables: Mapping[str, str], method: str, rounds: int, sites: str = ""
    ) -> None:
        self.root, self.lines = root, list[str]()
        self.address = f"127.0.0.1:{free_port()}"
        self.server = root / "server"
        server_commands.init(self.server, "test", self.address, [], False, self.lines.append)
        text = settings_of(method, rounds, sites or f"sites = {len(tables)}", self.address)
        (self.server / "app" / "federation.toml").write_text(text)
        (self.server / "app" / "model.py").write_text(MODEL)
        for name, table in tables.items():
            (root / f"{name}.csv").write_text(table)
            self.enrol(name)
            admission.admit(self.server, name, root / name / "node.pub", self.lines.append)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        (root / "watch").mkdir()
        (root / "watch" / "sitecustomize.py").write_text(WATCH)
        self._seen: set[str] = set()
        self._looked = 0.0

    def enrol(self, name: str, data: str = "") -> Path:
        folder = self.root / name
        where = data or str(self.root / f"{name}.csv")
        site_commands.enrol(
            folder, name, self.address, where, self.server / "tls" / "ca.crt", False, self.lines.append
        )
        (folder / SECRET).write_text("0\n")  # that of the simulator's clients
        with (folder / "site.toml").open("a") as file:
            file.write("spectral_rows = 2\n")
        return folder

    def start(self, name: str, *arguments: str) -> None:
        """One of fedpop's commands."""
        self.start_program(name, sys.executable, "-c", "from fedpop.cli import main; main()", *arguments)

    def start_program(self, name: str, *arguments: str, **more: str) -> None:
        out = (self.root / f"{name}.out").open("ab")
        env = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self.root / 'watch'}",
            "OMP_NUM_THREADS": "1",
            "FEDPOP_TEST_CLUSTER": str(self.root),
        }
        self.children[name] = subprocess.Popen(
            arguments,
            env=env | more,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        out.close()

    def start_server(self, words: str = "the door is open") -> None:
        """Returns once it has printed so."""
        before = self.output("server").count(words)
        self.start("server", "server", "run", str(self.server))
        self.until(lambda: self.output("server").count(words) > before, 300, "the server did not start")

    def start_site(self, name: str) -> None:
        self.start(name, "site", "join", str(self.root / name))

    def output(self, name: str) -> str:
        file = self.root / f"{name}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def rounds(self) -> list[dict[str, Any]]:
        file = self.server / "run" / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > self._looked + 2:
                self._look_out()
            if time.monotonic() > end:
                log = self.server / "logs" / "server.log"
                tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                raise TimeoutError(f"{what}\n{self.output('server')}\n{tail}")
            time.sleep(0.5)  # who looks more often takes from those who work

    def finish(self, seconds: float) -> int:
        """The exit code of the server's command."""
        self.until(lambda: self.children["server"].poll() is not None, seconds, "the run did not end")
        return int(self.children["server"].wait())

    # --- processes ---------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """All that were started below, by their command lines."""
        mark, found = f"FEDPOP_TEST_CLUSTER={self.root}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(folder.name)] = line
            except OSError:
                continue
        return found

    def of(self, home: Path, word: str = "") -> set[int]:
        """Flower's processes of a site's or the server's folder whose command lines hold this word."""
        mark, found = f"FLWR_HOME={home / 'flower'}".encode(), set()
        for pid, line in self.processes().items():
            try:
                if word in line and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.add(pid)
            except OSError:
                continue
        return found

    def kill(self, home: Path, word: str = "") -> None:
        """kill -9 of Flower's processes of a folder."""
        killed = self.of(home, word)
        assert killed, (word, self.processes())
        for pid in killed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    @property
    def strangers(self) -> set[str]:
        """Addresses beside loopback that any process was connected to, or Python connected to."""
        found = set((self.root / "contacts.txt").read_text().split())
        assert found & set(LOOPBACK), "nobody watches"
        return (found | self._seen) - set(LOOPBACK)

    def _look_out(self) -> None:
        """Connections of our processes to anything but loopback, whoever made them."""
        self._looked = time.monotonic()
        sockets = set()
        for pid in self.processes():
            for link in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    target = os.readlink(link)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            table = Path(f"/proc/net/{kind}")
            for line in table.read_text().splitlines()[1:] if table.exists() else ():
                fields = line.split()
                remote = fields[2].split(":")[0]
                if fields[9] in sockets and remote.strip("0") not in ("", "1", "100007F", "FFFF00000100007F"):
                    self._seen.add(remote)

    def stop(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)  # a shell's children, too
        for child in self.children.values():
            try:
                child.wait(120)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        end = time.monotonic() + 60
        while self.processes() and time.monotonic() < end:
            time.sleep(0.2)
        left = self.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, left

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
