"""Secure sums between real processes on loopback."""

from __future__ import annotations

import sys
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


def test_a_server_that_is_killed_and_four_sites_find_the_simulators_theta(tmp_path: Path) -> None:
    """To the bit, whenever the server died; nobody but loopback is spoken to."""
    g, tables = generator(0), dict[str, str]()
    for name, rows in zip(("east", "north", "south", "west"), (5, 6, 4, 7), strict=True):
        values = torch.randn(rows, 4, generator=g).tolist()
        tables[name] = "a,b,c,y\n" + "".join(",".join(f"{v:.4f}" for v in row) + "\n" for row in values)
    with Cluster(tmp_path, tables, FEDAVG, rounds=5) as cluster:
        settings = cluster.server / "app" / "federation.toml"
        settings.write_text(f"{settings.read_text()}[privacy]\nsecure = true\n")
        cluster.start_server()
        for name in tables:
            cluster.start_site(name)
        said = "its operator compares fingerprints and runs fedpop site trust"
        cluster.until(lambda: said in cluster.output("east"), 120, "nobody refused")
        for name in tables:
            confirm(tmp_path / name, list_of_sites(cluster.server / "sites"))
        cluster.until(lambda: len(cluster.rounds()) >= 2, 240, "no rounds")
        cluster.kill(cluster.server)
        assert cluster.finish(400) == 0, cluster.output("server")
        assert cluster.strangers == set()
        each = {name: [name] for name in tables}
        method = fp.FedAvg(model(), local=fp.LocalSGD(epochs=2, rate=0.05, batch=2))
        found = method.fit(
            read(cluster), rounds=5, sites=each, secure=True, precision="float32", progress=False
        )
        same_bits(learned(cluster), found.published)
