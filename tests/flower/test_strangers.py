"""Whoever reaches a running server's port: with Flower's tools, with keys that do not count, with noise."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedpop.flower import admission
from fedpop.flower.processes import environment, program
from tests.flower.cluster import Cluster, memory_of
from tests.flower.sites import same_bits
from tests.flower.test_processes import FEDAVG, fedavg, learned, simulated, tables

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

PROJECT = """[project]
name = "theirs"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "theirs:server"
clientapp = "theirs:client"
"""
CODE = """from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    Path({mark!r}).write_text("their code ran")


@client.train()
def train(message, context):
    Path({mark!r}).write_text("their code ran")
"""


class Stranger:
    """Somebody with the federation's CA file, its address, and Flower's command line."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.root = cluster, cluster.root / "stranger"
        home = self.root / "flower"
        home.mkdir(parents=True)
        ca = json.dumps(str(cluster.server / "tls" / "ca.crt"))
        where = f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{cluster.address}"\n'
        (home / "config.toml").write_text(f"{where}root-certificates = {ca}\n")
        self.env = environment(home, "127.0.0.1")
        self.mark = self.root / "ran"

    def flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [program("flwr"), *arguments, "--format", "json"],
            env=self.env,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def app(self) -> str:
        folder = self.root / "theirs"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "theirs.py").write_text(CODE.format(mark=str(self.mark)))
        return str(folder)


def running(cluster: Cluster, *sites: str) -> None:
    """The federation runs, and rounds go by."""
    cluster.start_server()
    for name in sites:
        cluster.start_site(name)
    cluster.until(lambda: len(cluster.rounds()) >= 1, 300, "a round")


def more_rounds(cluster: Cluster, rounds: int = 3) -> list[dict[str, Any]]:
    before = len(cluster.rounds())
    cluster.until(lambda: len(cluster.rounds()) >= before + rounds, 300, "more rounds")
    return cluster.rounds()[before:]


def test_a_stranger_submits_a_run_and_registers_a_key(tmp_path: Path) -> None:
    with Cluster(tmp_path, tables(6, 4), FEDAVG, rounds=3000) as cluster:
        running(cluster, "north", "south")
        them = Stranger(cluster)
        submitted = them.flwr("run", them.app(), "x")
        assert not submitted["success"]
        assert "this port is for sites" in json.dumps(submitted) or "403" in json.dumps(submitted), submitted
        key = cluster.enrol("rogue", str(tmp_path / "north.csv")) / "node.pub"
        assert not them.flwr("supernode", "register", str(key), "x", "--name", "rogue")["success"]
        assert not them.flwr("ls", "x")["success"]
        cluster.start_site("rogue")
        cluster.until(lambda: "(not admitted)" in cluster.output("rogue"), 120, "not refused")
        assert all(set(m["heard"]) == {"north", "south"} for m in more_rounds(cluster))
        assert not them.mark.exists()
        assert not (tmp_path / "rogue" / "experiments").exists()
        lines = list(cluster.processes().values())
        assert not [line for line in lines if "superexec" in line or "token" in line]
        secret = (tmp_path / "rogue" / "node.key").read_text().splitlines()[2]
        text = "".join(p.read_text(errors="replace") for p in tmp_path.rglob("*.log"))
        assert secret not in text


def test_a_revoked_site_and_an_old_key_are_not_heard(tmp_path: Path) -> None:
    with Cluster(tmp_path, tables(6, 4, 5), FEDAVG, 3000, "sites = 1") as cluster:
        running(cluster, "north", "south", "east")
        admission.revoke(cluster.server, "east", print)
        cluster.until(lambda: "(revoked)" in cluster.output("east"), 120, "not told")
        cluster.until(lambda: "east" not in cluster.rounds()[-1]["heard"], 120, "heard")
        assert not [m for m in more_rounds(cluster) if "east" in m["heard"]]
        new = cluster.root / "anew"
        cluster.enrol("anew", str(tmp_path / "south.csv"))
        text = (new / "site.toml").read_text()
        (new / "site.toml").write_text(text.replace('name = "anew"', 'name = "south"'))
        admission.admit(cluster.server, "south", new / "node.pub", print, replace=True)
        cluster.until(lambda: "another key was admitted" in cluster.output("south"), 120, "not told")
        cluster.start_site("anew")
        cluster.until(lambda: "south" in cluster.rounds()[-1]["heard"], 120, "not heard")
        more_rounds(cluster)
        assert (new / "experiments").exists()
        old = {p: p.stat().st_mtime for p in (tmp_path / "south" / "experiments").rglob("*.safetensors")}
        more_rounds(cluster)
        assert old == {p: p.stat().st_mtime for p in old}


def test_noise_does_no_harm(tmp_path: Path) -> None:
    """150 connections that say nothing, or nonsense, and a body of 300 MB."""
    with Cluster(tmp_path, tables(6, 4), FEDAVG, rounds=3000) as cluster:
        running(cluster, "north", "south")
        (pid,) = [p for p, line in cluster.processes().items() if "fedpop.flower.server" in line]
        before = memory_of(pid)
        host, port = cluster.address.split(":")
        many = [socket.create_connection((host, int(port))) for _ in range(150)]
        for k, each in enumerate(many):
            if k % 3:
                each.send(os.urandom(200) if k % 2 else b"GET / HTTP/1.1\r\n")
        assert len(more_rounds(cluster)) >= 3
        context = ssl.create_default_context(cafile=str(cluster.server / "tls" / "ca.crt"))
        with (
            socket.create_connection((host, int(port))) as plain,
            context.wrap_socket(plain, server_hostname=host) as safe,
        ):
            head = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 314572800\r\n\r\n"
            with suppress(OSError):
                safe.sendall(head)
                for _ in range(300):
                    safe.sendall(bytes(2**20))
        assert all(set(m["heard"]) == {"north", "south"} for m in more_rounds(cluster))
        assert memory_of(pid) < before + 100
        end = time.monotonic() + 60
        while sum(_is_open(each) for each in many) and time.monotonic() < end:
            time.sleep(0.5)
        assert not sum(_is_open(each) for each in many)  # the server has closed them all
        for each in many:
            each.close()


def _is_open(each: socket.socket) -> bool:
    each.setblocking(False)
    try:
        return bool(each.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        with suppress(OSError):
            each.setblocking(True)


def test_a_run_after_which_theta_is_the_simulators(tmp_path: Path) -> None:
    """With more sites than cores, all of which were waiting."""
    with Cluster(tmp_path, tables(6, 4, 5), FEDAVG, rounds=5) as cluster:
        for name in ("north", "south", "east"):
            cluster.start_site(name)
        cluster.start_server()
        assert cluster.finish(300) == 0, cluster.output("server")
        assert not any("not admitted" in cluster.output(name) for name in ("north", "south", "east"))
        same_bits(learned(cluster), simulated(cluster, fedavg, 5).published)
