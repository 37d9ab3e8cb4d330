"""Secure sums over the Grid in this process: the simulator's quantised sums, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RoundTerms
from tests.flower.local_grid import LocalGrid
from tests.flower.secured import run_over, same_theta, simulated

pytest.importorskip("Crypto")


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "SCAFFOLD", "FedRep", "QLSD"])
def test_a_secure_run_is_the_simulators_to_the_bit(name: str, tmp_path: Path) -> None:
    found, _ = run_over(tmp_path, name)
    same_theta(found, simulated(name))


def test_so_is_the_exact_engine_whose_rounds_need_everyone(tmp_path: Path) -> None:
    found, _ = run_over(tmp_path, "FedSOUL", classes=False)
    same_theta(found, simulated("FedSOUL", classes=False))


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
