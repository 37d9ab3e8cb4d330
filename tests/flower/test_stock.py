"""Flower's stock node, for sites that ask for it: it runs the app that the federation signed, no others."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from flwr.common.config import get_fab_config, get_metadata_from_config
from flwr.supernode.start_client_internal import _verify_fab

from fedpop.flower.link import FleetGrid
from fedpop.flower.stock import TRUSTED, make_signature, signed
from tests.flower.cluster import Cluster
from tests.flower.commands import Made
from tests.flower.sites import same_bits
from tests.flower.test_processes import FEDAVG, fedavg, learned, simulated, tables


def trusted(tls: Path) -> dict[str, str]:
    who, key = (tls / TRUSTED).read_text().split(": ")
    return {who: key.strip().strip("'")}


def test_the_app_goes_by_its_own_name_and_is_the_federations(tmp_path: Path) -> None:
    made = Made(tmp_path)
    tls = made.server / "tls"
    app = signed(made.server / "app", tls)
    link = FleetGrid(made.address, tls, made.server / "sites", app)
    run = link.run
    assert (run.fab_id, run.fab_version) == get_metadata_from_config(get_fab_config(app.content))
    assert (run.fab_id, run.fab_hash) == ("fedpop/clinics", app.hash_str)
    assert _verify_fab(app, trusted(tls))
    other = tmp_path / "other"
    other.mkdir()
    make_signature(other)
    assert not _verify_fab(app, trusted(other))


@pytest.mark.flower
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_stock_node_beside_ours(tmp_path: Path) -> None:
    """theta is the simulator's; a stock node that trusts somebody else runs nothing."""
    with Cluster(tmp_path, tables(6, 4, 5), FEDAVG, rounds=2, sites="sites = 2") as cluster:
        shutil.copyfile(cluster.server / "tls" / TRUSTED, tmp_path / "north" / TRUSTED)
        make_signature(tmp_path / "east")  # whoever that is, the federation's key is another one
        cluster.start("north", "site", "join", str(tmp_path / "north"), "--stock")
        cluster.start("east", "site", "join", str(tmp_path / "east"), "--stock")
        cluster.start_site("south")
        cluster.start("server", "server", "run", str(cluster.server), "--stock")
        assert cluster.finish(900) == 0, cluster.output("server")
        assert all(set(m["heard"]) == {"north", "south"} for m in cluster.rounds())
        assert not (tmp_path / "east" / "experiments").exists()
        assert "could not verify" in (tmp_path / "east" / "logs" / "node.log").read_text().replace("\n", " ")
        lines = list(cluster.processes().values())
        assert not [line for line in lines if "BEGIN" in line]
        (tmp_path / "east.csv").unlink()  # who was not heard is not in the simulator either
        same_bits(learned(cluster), simulated(cluster, fedavg, 2).published)
