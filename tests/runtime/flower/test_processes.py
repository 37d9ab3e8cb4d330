"""Federations of real processes on loopback, with TLS and keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.federation.reading import read_data
from fedpop.files import read_tensors
from tests.helpers import generator
from tests.runtime.flower.cluster import MODEL, Cluster
from tests.runtime.flower.sites import here, same_bits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

FORM = {"x": ["a", "b", "c"], "y": "y", "standardise": False}
FEDAVG = 'name = "FedAvg"\nlocal = {epochs = 2, rate = 0.05, batch = 2}'
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


def simulated(cluster: Cluster, method: Any, rounds: int) -> fp.Population:
    """The same on one machine, from the same files."""
    names = sorted(p.stem for p in cluster.root.glob("*.csv"))
    federations = {n: read_data(str(cluster.root / f"{n}.csv"), FORM, n) for n in names}
    data = {n: (f.train.x, f.train.y) for n, f in federations.items()}
    space: dict[str, Any] = {}
    exec(MODEL, space)
    return here(method(space["model"](3)), data, rounds=rounds)  # type: ignore[no-any-return]


def learned(cluster: Cluster) -> dict[str, torch.Tensor]:
    return read_tensors(cluster.server / "run" / "theta" / "theta.safetensors")


def fedavg(model: Any) -> fp.FedAvg:
    return fp.FedAvg(model, local=fp.LocalSGD(epochs=2, rate=0.05, batch=2))


def fedsoul(model: Any) -> fp.FedSOUL:
    return fp.FedSOUL(model, engine="sampled", local_steps=3, final=fp.chains.Final(2, 20, 20))


def test_a_site_with_tls_and_keys(tmp_path: Path) -> None:
    """Enrolled, admitted, run, stopped; theta is the simulator's to the bit. One site and one round, as every
    message starts a process: more of both, and what goes wrong, is for ``make test-flower``."""
    with Cluster(tmp_path, tables(6), FEDAVG, rounds=1) as cluster:
        cluster.start_server("site north may take part")
        cluster.start_site("north")
        assert cluster.finish(300) == 0, cluster.heard("server")
        assert cluster.strangers == set()
        same_bits(learned(cluster), simulated(cluster, fedavg, 1).published)
        assert (tmp_path / "north" / "experiments").exists()


@pytest.mark.flower
def test_ten_rounds_of_fedsoul_to_the_bit(tmp_path: Path) -> None:
    """And who has no admitted key, or speaks plain HTTP, is not heard."""
    with Cluster(tmp_path, tables(6, 4, 5), FEDSOUL, rounds=10) as cluster:
        rogue = tmp_path / "north.csv"
        cluster.enrol("rogue", str(rogue))
        cluster.start_server()
        for name in ("north", "south", "east", "rogue"):
            cluster.start_site(name)
        cluster.start("plain", "site", "join", str(_plain(cluster)), "--insecure")
        assert cluster.finish(900) == 0, cluster.heard("server")
        assert all(set(m["heard"]) == {"north", "south", "east"} for m in cluster.rounds())
        assert "does not know this site's key" in cluster.heard("rogue")
        assert cluster.strangers == set()
        same_bits(learned(cluster), simulated(cluster, fedsoul, 10).published)


def _plain(cluster: Cluster) -> Path:
    from fedpop.runtime.flower import joining

    folder = cluster.root / "plain"
    joining.enrol(folder, "plain", cluster.address, str(cluster.root / "north.csv"), None, True, print)
    return folder


@pytest.mark.flower
@pytest.mark.parametrize("victim", ["flwr-serverapp", "flower-superlink"])
def test_a_killed_server_goes_on(victim: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, tables(6, 4), FEDAVG, rounds=5) as cluster:
        cluster.start_server()
        for name in ("north", "south"):
            cluster.start_site(name)
        cluster.until(lambda: len(cluster.rounds()) >= 2, 300, "two rounds")
        cluster.kill(victim)
        assert cluster.finish(900) == 0, cluster.heard("server")
        assert [m["round"] for m in cluster.rounds()] == [1, 2, 3, 4, 5]
        same_bits(learned(cluster), simulated(cluster, fedavg, 5).published)


@pytest.mark.flower
def test_the_whole_server_is_killed_and_started_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, tables(6, 4), FEDAVG, rounds=4) as cluster:
        cluster.start_server()
        for name in ("north", "south"):
            cluster.start_site(name)
        cluster.until(lambda: len(cluster.rounds()) >= 2, 300, "two rounds")
        cluster.children["server"].kill()
        cluster.children["server"].wait()
        own = str(cluster.server)
        cluster.until(lambda: not any(own in line for line in cluster.processes().values()), 60, "orphans")
        cluster.start_server()
        assert cluster.finish(900) == 0, cluster.heard("server")
        same_bits(learned(cluster), simulated(cluster, fedavg, 4).published)


@pytest.mark.flower
def test_a_site_is_killed_in_a_round(tmp_path: Path) -> None:
    """The others go on; it is started again and takes part again with its chain."""
    with Cluster(tmp_path, tables(6, 4, 5), FEDAVG, rounds=8, more="timeout = 30.0") as cluster:
        cluster.start_server()
        for name in ("north", "south", "east"):
            cluster.start_site(name)
        cluster.until(lambda: len(cluster.rounds()) >= 1, 300, "a round")
        cluster.kill("flower-supernode", str(tmp_path / "east"))
        assert cluster.finish(900) == 0, cluster.heard("server")
        assert "it is started again" in cluster.heard("east")
        heard = ["east" in m["heard"] for m in cluster.rounds()]
        assert heard[0]
        assert all({"north", "south"} <= set(m["heard"]) for m in cluster.rounds())
