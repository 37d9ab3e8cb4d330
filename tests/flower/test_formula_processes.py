"""Formulas over real processes, with TLS and keys: the local fit's numbers, in few messages, whatever is
killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpop as fp
from fedpop.files import read_json
from fedpop.flower.server_commands import toml_of
from fedpop.flower.site_folder import common_key
from tests.flower.cluster import Cluster
from tests.flower.formulas import by_site
from tests.mixed.conftest import alike, simulated, table  # noqa: F401

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")

SLEEP = "Reaction ~ Days + (Days | Subject)"


class FormulaCluster(Cluster):
    """A federation about a formula, whose sites have a common key."""

    def __init__(self, root: Path, frames: Mapping[str, Any], about: Mapping[str, str]) -> None:
        super().__init__(root, {n: f.to_csv(index=False) for n, f in frames.items()}, 'name = "FedAvg"', 1)
        text = f'name = "trial"\n[model]\n{toml_of(about)}[server]\naddress = "{self.address}"\n'
        (self.server / "app" / "federation.toml").write_text(text)
        first, *others = frames
        common_key(root / first, True, None, self.lines.append)
        for name in others:
            common_key(root / name, False, root / first / "common.key", self.lines.append)

    def second(self, formula: str, *arguments: str) -> int:
        """A further formula, by its command."""
        self.start("fit", "server", "fit", str(self.server), formula, *arguments)
        child = self.children["fit"]
        self.until(lambda: child.poll() is not None, 600, "the second formula did not end")
        return int(child.wait())

    def messages(self, site: str, run: str = "") -> int:
        """What left a site for a run."""
        lines = (self.root / site / "ledger.jsonl").read_text().splitlines()
        return sum(json.loads(line)["run"].startswith(run) for line in lines)

    def experiment(self, run: Path) -> str:
        return str(read_json(run / "experiment.json")["experiment"])


def same_numbers(run: Path, here: Any) -> None:
    """The fit that a folder has, and its JSON, have the local fit's numbers."""
    there = fp.load(run)
    alike(there, here, 1e-9)
    np.testing.assert_allclose(there.confint().to_numpy(), here.confint().to_numpy(), rtol=1e-7, atol=1e-8)
    plain, local = read_json(run / "fit.json"), here.plain()
    assert plain.keys() == local.keys()
    for name, row in local["fixed"].items():
        assert plain["fixed"][name] == pytest.approx(row, rel=1e-9)


def test_sleepstudy_over_two_sites_whatever_is_killed(table: Any, tmp_path: Path) -> None:  # noqa: F811
    """The node of a site, the server's process, and the command itself, with kill -9; then a second formula
    on the same sites, and what each site has afterwards."""
    frame = table("sleepstudy")
    frames = {"north": frame[: len(frame) // 2], "south": frame[len(frame) // 2 :]}
    with FormulaCluster(tmp_path, frames, {"formula": SLEEP, "method": "REML"}) as cluster:
        cluster.start_server()
        for name in frames:
            cluster.start_site(name)
        cluster.until(lambda: len(cluster.rounds()) >= 5, 300, "no questions")
        cluster.kill(tmp_path / "north", "fedpop.flower.node")
        cluster.until(lambda: len(cluster.rounds()) >= 8, 300, "it did not go on without its node")
        cluster.kill(cluster.server, "fedpop.flower.server")
        cluster.until(lambda: len(cluster.rounds()) >= 11, 300, "it did not go on")
        cluster.children["server"].kill()
        cluster.until(lambda: not cluster.of(cluster.server), 60, "the server outlived its command")
        cluster.start_server()
        assert cluster.finish(600) == 0, cluster.output("server")
        run = cluster.server / "run"
        same_numbers(run, fp.mixed_model(SLEEP, frame, method="REML"))
        assert "their names were compared under the sites' common key" in (run / "fit.txt").read_text()
        assert cluster.second(SLEEP, "--method", "ML") == 0, cluster.output("fit")
        assert cluster.second("Reaction ~ Days + (1 | Subject)") == 0, cluster.output("fit")
        for fit in (cluster.server / "fits").iterdir():
            formula = read_json(fit / "federation.json")["formula"]
            same_numbers(fit, fp.mixed_model(formula, frame))
            for name in frames:
                assert cluster.messages(name, cluster.experiment(fit)) <= 25
        cluster.start("fits", "server", "fits", str(cluster.server))
        cluster.until(lambda: cluster.children["fits"].poll() is not None, 60, "no comparison")
        assert "Chisq 42.1393 on 2 degrees of freedom" in cluster.output("fits")
        cluster.start("effects", "site", "effects", str(tmp_path / "north"))
        cluster.until(lambda: cluster.children["effects"].poll() is not None, 60, "no effects")
        rows = cluster.output("effects").splitlines()
        assert rows[0] == "Subject,effect,mean,sd,lower,upper"
        assert len(rows) == 1 + 9


def test_counts_over_three_sites(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    """A binomial model and a Poisson one, one after the other."""
    frames = by_site(simulated([14] * 12), "g", 3)
    first, second = "yes ~ w + (1 | g)", "count ~ w + offset(log(t)) + (1 | g)"
    with FormulaCluster(tmp_path, frames, {"formula": first, "family": "bernoulli"}) as cluster:
        for name in frames:
            cluster.start_site(name)
        cluster.start_server()
        assert cluster.finish(600) == 0, cluster.output("server")
        same_numbers(cluster.server / "run", fp.mixed_model(first, frames, "bernoulli"))
        assert cluster.second(second, "--family", "poisson") == 0, cluster.output("fit")
        (fit,) = (cluster.server / "fits").iterdir()
        same_numbers(fit, fp.mixed_model(second, frames, "poisson"))
        for run in (cluster.server / "run", fit):
            for name in frames:
                assert cluster.messages(name, cluster.experiment(run)) <= 25
        assert cluster.strangers == set()
