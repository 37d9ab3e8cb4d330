"""Federations of real processes on loopback, with TLS and keys."""

from __future__ import annotations

import os
import re
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

import fedpop as fp
from fedpop.federation.reading import read_data
from fedpop.files import read_json, read_tensors
from fedpop.flower import site_commands
from fedpop.flower.certificates import split_address
from fedpop.flower.processes import environment, free_port, healthy, program
from tests.flower.cluster import MODEL, Cluster, memory_of
from tests.flower.sites import here, same_bits
from tests.helpers import generator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

FORM = {"x": ["a", "b", "c"], "y": "y", "standardise": False}
FEDAVG = 'name = "FedAvg"\nlocal = {epochs = 2, rate = 0.05, batch = 2}'
SCAFFOLD = FEDAVG.replace("FedAvg", "SCAFFOLD")
FEDSOUL = (
    'name = "FedSOUL"\nengine = "sampled"\nlocal_steps = 3\nfinal = {chains = 2, draws = 20, burn_in = 20}'
)


def tables(*sizes: int) -> dict[str, str]:
    g = generator(0)
    out = {}
    for name, n in zip(("north", "south", "east"), sizes, strict=False):
        rows = torch.randn(n, 4, generator=g).tolist()
        out[name] = "a,b,c,y\n" + "".join(",".join(f"{v:.4f}" for v in row) + "\n" for row in rows)
    return out


def read(cluster: Cluster) -> dict[str, Any]:
    names = sorted(p.stem for p in cluster.root.glob("*.csv"))
    federations = {n: read_data(str(cluster.root / f"{n}.csv"), FORM, n) for n in names}
    return {n: (f.train.x, f.train.y) for n, f in federations.items()}


def model() -> Any:
    space: dict[str, Any] = {}
    exec(MODEL, space)
    return space["model"](3)


def simulated(cluster: Cluster, method: Any, rounds: int) -> fp.Population:
    """The same on one machine, from the same files."""
    return here(method(model()), read(cluster), rounds=rounds)  # type: ignore[no-any-return]


def learned(cluster: Cluster) -> dict[str, torch.Tensor]:
    return read_tensors(cluster.server / "run" / "theta" / "theta.safetensors")


def fedavg(model: Any) -> fp.FedAvg:
    return fp.FedAvg(model, local=fp.LocalSGD(epochs=2, rate=0.05, batch=2))


def scaffold(model: Any) -> fp.SCAFFOLD:
    return fp.SCAFFOLD(model, local=fp.LocalSGD(epochs=2, rate=0.05, batch=2))


def fedsoul(model: Any) -> fp.FedSOUL:
    return fp.FedSOUL(model, engine="sampled", local_steps=3, final=fp.chains.Final(2, 20, 20))


def test_a_site_with_tls_and_keys(tmp_path: Path) -> None:
    """Enrolled, admitted, run, stopped; theta is the simulator's to the bit. A stranger who has the CA file
    and reaches the port finds nothing that answers, and a site whose key is not admitted is told so."""
    with Cluster(tmp_path, tables(6), FEDAVG, rounds=2) as cluster:
        cluster.enrol("rogue", str(tmp_path / "north.csv"))
        cluster.start_site("rogue")  # who comes before the server waits for it
        cluster.start_server("the door is open")
        answers = asked_by_a_stranger(cluster)
        assert len(answers) > 50
        assert set(answers.values()) == {403}
        cluster.until(lambda: "(not admitted)" in cluster.output("rogue"), 120, "nobody refused")
        waiting = cluster.of(tmp_path / "rogue") | {cluster.children["rogue"].pid}
        assert sum(memory_of(pid) for pid in waiting) < 350
        cluster.start_site("north")
        assert cluster.finish(300) == 0, cluster.output("server")
        assert not (tmp_path / "rogue" / "experiments").exists()
        assert cluster.strangers == set()
        same_bits(learned(cluster), simulated(cluster, fedavg, 2).published)
        for folder in (cluster.server, tmp_path / "north"):
            every = [p for p in [folder, *folder.rglob("*")] if p.stat().st_mode & 0o077]
            assert not every


def asked_by_a_stranger(cluster: Cluster) -> dict[str, int]:
    """What everything that Flower's SuperLink would answer beside its nodes answers, all at a time."""
    context = ssl.create_default_context(cafile=str(cluster.server / "tls" / "ca.crt"))
    own = [path for _, path in PROTOBUF_REQUEST_TYPES if not path.startswith("/v1/fleet/")]
    headers = {"content-type": "application/x-protobuf"}
    with httpx.Client(base_url=f"https://{cluster.address}", verify=context, trust_env=False) as client:

        def ask(path: str) -> int:
            return client.post(path, content=b"", headers=headers, timeout=60).status_code

        with ThreadPoolExecutor(20) as many:
            paths = [*own, "/docs", "/openapi.json"]
            return dict(zip(paths, many.map(ask, paths), strict=True))


@pytest.mark.flower
def test_ten_rounds_of_fedsoul_to_the_bit(tmp_path: Path) -> None:
    """And who has no admitted key, or speaks plain HTTP, is not heard."""
    with Cluster(tmp_path, tables(6, 4, 5), FEDSOUL, rounds=10) as cluster:
        cluster.enrol("rogue", str(tmp_path / "north.csv"))
        cluster.start_server()
        for name in ("north", "south", "east", "rogue"):
            cluster.start_site(name)
        site_commands.enrol(
            tmp_path / "plain", "plain", cluster.address, str(tmp_path / "north.csv"), None, True, print
        )
        cluster.start("plain", "site", "join", str(tmp_path / "plain"), "--insecure")
        _start_plain_node(cluster)
        assert cluster.finish(1800) == 0, cluster.output("server")
        assert all(set(m["heard"]) == {"north", "south", "east"} for m in cluster.rounds())
        assert "the server refuses this site (not admitted)" in cluster.output("rogue")
        assert "speaks TLS" in cluster.output("plain")
        assert cluster.children["plain"].wait() == 2
        assert "Starting insecure channel" in cluster.output("node")
        assert "FileNotFoundError" not in cluster.output("node")  # it had all that it needs to take part
        for outside in ("rogue", "plain"):
            assert not (tmp_path / outside / "experiments").exists()
        assert cluster.strangers == set()
        same_bits(learned(cluster), simulated(cluster, fedsoul, 10).published)


def _start_plain_node(cluster: Cluster) -> None:
    """A node of Flower's that would take part without TLS and a key."""
    where = ("--insecure", "--superlink", cluster.address, "--host", "127.0.0.1", "--port", str(free_port()))
    site = f'site="{cluster.root / "plain"}"'
    flags = (*where, "--max-retries", "3", "--node-config", site)
    env = {
        n: v for n, v in environment(cluster.root / "home").items() if n.startswith("FLWR_") or n == "PATH"
    }
    cluster.start_program("node", program("flower-supernode"), *flags, **env)


@pytest.mark.flower
def test_a_killed_server_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, tables(6, 4), FEDAVG, rounds=4) as cluster:
        cluster.start_server()
        for name in ("north", "south"):
            cluster.start_site(name)
        cluster.until(lambda: len(cluster.rounds()) >= 2, 900, "two rounds")
        cluster.kill(cluster.server, "fedpop.flower.server")
        assert cluster.finish(1800) == 0, cluster.output("server")
        assert "it goes on from its last round" in cluster.output("server")
        assert [m["round"] for m in cluster.rounds()] == [1, 2, 3, 4]
        same_bits(learned(cluster), simulated(cluster, fedavg, 4).published)


@pytest.mark.flower
def test_the_whole_server_is_killed_and_started_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, tables(6, 4), FEDAVG, rounds=4) as cluster:
        cluster.start_server()
        for name in ("north", "south"):
            cluster.start_site(name)
        cluster.until(lambda: len(cluster.rounds()) >= 2, 900, "two rounds")
        cluster.children["server"].kill()
        cluster.children["server"].wait()
        cluster.until(lambda: not cluster.of(cluster.server), 120, "orphans")
        cluster.start_server()
        assert cluster.finish(1800) == 0, cluster.output("server")
        same_bits(learned(cluster), simulated(cluster, fedavg, 4).published)


@pytest.mark.flower
def test_a_site_is_killed_in_a_round(tmp_path: Path) -> None:
    """It is started again, is sent what it had not answered, and theta is what it would have been."""
    with Cluster(tmp_path, tables(6, 4, 5), SCAFFOLD, 60) as cluster:
        cluster.start_server()
        for name in ("north", "south", "east"):
            cluster.start_site(name)
        east = tmp_path / "east"
        for number in (2, 10, 20):
            cluster.until(lambda n=number: len(cluster.rounds()) >= n, 900, "rounds")
            cluster.kill(east, "fedpop.flower.node")
        assert cluster.finish(900) == 0, cluster.output("server")
        assert cluster.output("east").count("it is started again") == 3
        assert "stateless" not in (east / "site.log").read_text()
        assert all(len(m["heard"]) == 3 for m in cluster.rounds())
        same_bits(learned(cluster), simulated(cluster, scaffold, 60).published)


DOCS = Path(__file__).parents[2] / "docs" / "deployment.md"


@pytest.mark.flower
def test_flowers_own_commands_as_documented(tmp_path: Path) -> None:
    """The blocks of the documentation, as they are but for addresses and names."""
    blocks = re.findall(r"^```bash\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    link, run, node = (
        next(b for b in blocks if word in b) for word in ("flower-superlink", "register", "9094")
    )
    with Cluster(tmp_path, tables(6), FEDAVG, rounds=2) as cluster:
        host, port = split_address(cluster.address)
        given = {"DIR": str(cluster.server), "SITE": str(tmp_path / "north"), "HOST": host}
        given["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

        def start(name: str, block: str) -> None:
            env = block.replace("8000", str(port)).replace("city", "north").replace("9094", str(free_port()))
            cluster.start_program(name, "bash", "-ec", env, **given)

        start("link", link)
        ca = cluster.server / "tls" / "ca.crt"
        cluster.until(lambda: healthy(cluster.address, ca), 300, "the SuperLink does not answer")
        start("server", run)
        status = cluster.server / "run" / "status.json"
        cluster.until(status.exists, 600, "the run does not begin")  # its keys are registered by then
        start("north", node)
        cluster.until(lambda: read_json(status)["state"] != "running", 900, "the run does not end")
        assert read_json(status) == {"state": "finished", "rounds": 2}
        assert cluster.strangers == set()
        same_bits(learned(cluster), simulated(cluster, fedavg, 2).published)
