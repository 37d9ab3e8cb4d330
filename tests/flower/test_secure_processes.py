"""Secure sums between real processes on loopback."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop.flower.admission import list_of_sites
from fedpop.flower.secure_site import confirm
from tests.flower.cluster import Cluster
from tests.flower.sites import same_bits
from tests.flower.test_processes import FEDAVG, learned, model, read
from tests.helpers import generator

pytest.importorskip("Crypto")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.flower,
]


NAMES = ("east", "north", "south", "west")


def tables_of(*sizes: int) -> dict[str, str]:
    g, tables = generator(0), dict[str, str]()
    for name, rows in zip(NAMES, sizes, strict=True):
        values = torch.randn(rows, 4, generator=g).tolist()
        tables[name] = "a,b,c,y\n" + "".join(",".join(f"{v:.4f}" for v in row) + "\n" for row in values)
    return tables


def begun(cluster: Cluster, root: Path) -> None:
    """Server and sites are there, and somebody has confirmed the list at each."""
    settings = cluster.server / "app" / "federation.toml"
    settings.write_text(f"{settings.read_text()}[privacy]\nsecure = true\n")
    cluster.start_server()
    for name in NAMES:
        cluster.start_site(name)
    said = "its operator compares fingerprints and runs fedpop site trust"
    cluster.until(lambda: said in cluster.output("east"), 120, "nobody refused")
    for name in NAMES:
        confirm(root / name, list_of_sites(cluster.server / "sites"))


def test_a_site_that_is_killed_in_a_round_is_missed_and_nothing_else(tmp_path: Path) -> None:
    """kill -9 of a site that has masked messages, whatever it is at: of four three will do, rounds without
    it are those of three, and it is back once it is started again."""
    waits = "sites = 4\nquorum = 0.75\ntimeout = 20.0"
    with Cluster(tmp_path, tables_of(5, 6, 4, 7), FEDAVG, rounds=30, sites=waits) as cluster:
        begun(cluster, tmp_path)
        cluster.until(lambda: len(cluster.rounds()) >= 2, 240, "no rounds")
        assert list((tmp_path / "west").glob("experiments/*/secure/memory"))
        os.killpg(cluster.children["west"].pid, signal.SIGKILL)
        for pid in cluster.of(tmp_path / "west"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed = len(cluster.rounds())
        cluster.until(lambda: len(cluster.rounds()) >= killed + 4, 240, "no rounds without it")
        cluster.start_site("west")
        assert cluster.finish(600) == 0, cluster.output("server")
        heard = [set(m["heard"]) for m in cluster.rounds()]
        assert set(NAMES) in heard[: killed + 1]
        assert any(each == set(NAMES) - {"west"} for each in heard[killed:])
        assert all(len(each) in (0, 3, 4) for each in heard)  # a sum of two is never opened
        assert all(bool(torch.isfinite(t).all()) for t in learned(cluster).values() if t.is_floating_point())


def test_a_server_that_is_killed_and_four_sites_find_the_simulators_theta(tmp_path: Path) -> None:
    """To the bit, whenever the server died; nobody but loopback is spoken to."""
    with Cluster(tmp_path, tables_of(5, 6, 4, 7), FEDAVG, rounds=5) as cluster:
        begun(cluster, tmp_path)
        cluster.until(lambda: len(cluster.rounds()) >= 2, 240, "no rounds")
        cluster.kill(cluster.server)
        assert cluster.finish(400) == 0, cluster.output("server")
        assert cluster.strangers == set()
        each = {name: [name] for name in NAMES}
        method = fp.FedAvg(model(), local=fp.LocalSGD(epochs=2, rate=0.05, batch=2))
        found = method.fit(
            read(cluster), rounds=5, sites=each, secure=True, precision="float32", progress=False
        )
        same_bits(learned(cluster), found.published)
