"""Secure sums over the Grid in this process: the simulator's quantised sums, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RoundTerms
from tests.flower.local_grid import LocalGrid
from tests.flower.secured import planned, run_over, same_theta, secured, simulated, sites
from tests.flower.sites import transport_on

pytest.importorskip("Crypto")


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "SCAFFOLD", "FedRep", "QLSD"])
def test_a_secure_run_is_the_simulators_to_the_bit(name: str, tmp_path: Path) -> None:
    found, _ = run_over(tmp_path, name)
    same_theta(found, simulated(name))


def test_so_is_the_exact_engine_whose_rounds_need_everyone(tmp_path: Path) -> None:
    found, grid = run_over(tmp_path, "FedSOUL", classes=False)
    same_theta(found, simulated("FedSOUL", classes=False))
    rounds = [r for r in (request_from_record(m.content) for _, m, _ in grid.traffic) if r.kind == "train"]
    assert {r.header["secure"]["attempt"]["mode"] for r in rounds} == {"everyone"}


def lost(round: int, site: str) -> bool:
    return (round, site) in {(0, "s1"), (2, "s3")}


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg"])
def test_with_drop_outs_too(name: str, tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        def fault(site, request, reply):
            read = request_from_record(request.content)
            gone = read.kind == "train" and lost(int(read.header["round"]), site)
            return None if gone else [reply]

        grid.fault = fault

    terms = RoundTerms(sites=5, quorum=0.8, timeout=20.0)
    found, _ = run_over(tmp_path, name, prepare=prepare, waits=terms)
    same_theta(found, simulated(name, lost=lost))


def test_whoever_joins_waits_outside_until_there_are_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """QLSD asks whoever comes later what it asked first: three at a time, or a sum were one of few."""
    names = [f"s{i}" for i in range(8)]
    grid, terms, folders = secured(tmp_path / "sites", sites(8))
    late = {1: names[5:6], 3: names[6:]}
    for name in names[5:]:
        node = next(n for n, known in grid.names.items() if known == name)
        del grid.nodes[node], grid.names[node]
    there = []

    def fault(site: str, request: Any, reply: Any) -> Any:
        read = request_from_record(request.content)
        if read.kind == "train":
            there.append((int(read.header["round"]), site))
            for name in late.pop(int(read.header["round"]), ()):
                grid.first += 100  # another node
                grid.join(name, folders[name])
        return [reply]

    grid.fault = fault
    waits = RoundTerms(sites=5, timeout=5.0)
    caplog.set_level("INFO", "fedpop")
    found = run_deployment(planned("QLSD", 8, terms, waits), transport_on(grid))
    assert found.rounds == 8
    heard = {k: {site for number, site in there if number == k} for k in range(8)}
    assert all(heard[k] == set(names[:5]) for k in range(4))
    assert heard[7] == set(names)
    assert "s5 wait(s) outside: secure sums take sites in by 3 or more" in caplog.text
    asked = [
        (site, request_from_record(m.content).header) for site, m, _ in grid.traffic
        if request_from_record(m.content).kind == "ask"
    ]  # fmt: skip
    cohorts = {tuple(o[0] for o in h["secure"]["attempt"]["offers"]) for site, h in asked if site > "s4"}
    assert cohorts == {("s5", "s6", "s7")}
