"""Sites that differ, leave, come and are waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Message

import fedpop as fp
from fedpop.errors import EstimateError, SettingsError
from fedpop.flower.client import app
from fedpop.flower.deployment import enrolled_members, run_deployment
from fedpop.flower.records import (
    request_from_record,
)
from fedpop.flower.remote import RoundTerms
from fedpop.keys import Key
from tests.flower.faulty import TERMS, run, train
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, here, same_bits, transport_on
from tests.methods.conformance import four, made

# --- who is there ----------------------------------------------------------------------------------


def test_a_dead_site_is_not_picked_and_a_new_one_takes_part(tmp_path: Path) -> None:
    data = four("softmax")

    def prepare(grid: LocalGrid) -> None:
        newcomer = enrol(tmp_path / "new", {"eva": data["ada"]})

        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            if train(site, request) == 1 and site == "dag":
                grid.offline.add("bea")
            if train(site, request) == 3 and site == "dag":
                grid.offline.clear()
                grid.join("eva", newcomer["eva"])
            return [reply]

        grid.fault = fault

    found, grid = run(tmp_path, prepare, rounds=6, terms=RoundTerms(sites=3, timeout=30.0))
    heard = [set(m["heard"]) for m in found.history]
    assert ["bea" in h for h in heard[1:5]] == [True, False, False, True]
    assert ["eva" in h for h in heard[3:5]] == [False, True]
    assert found.learned_from == 5
    assert grid.now < 30  # nobody waited for the dead one


def test_a_run_may_begin_with_more_sites_than_a_round_needs(tmp_path: Path) -> None:
    """It waits for everyone first; later it goes on without whoever is not there."""

    def prepare(grid: LocalGrid) -> None:
        grid.offline.add("bea")
        sleep = grid.sleep

        def later(seconds: float) -> None:
            sleep(seconds)
            if not any(train(site, request) for site, request, _ in grid.traffic):
                grid.offline.clear()

        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            if site == "dag" and train(site, request) == 1:
                grid.offline.add("bea")
            return [reply]

        grid.sleep, grid.fault = later, fault  # type: ignore[method-assign]

    found, _ = run(tmp_path, prepare, terms=RoundTerms(sites=3, begin=4, timeout=30.0))
    assert ["bea" in m["heard"] for m in found.history] == [True, True, False, False]


def test_weights_from_observed_participation(tmp_path: Path) -> None:
    """A site that was heard in one round of two counts twice, in the limit."""
    grid = LocalGrid(app, enrol(tmp_path, four("softmax")))
    terms = RoundTerms(sites=4, weights="observed")
    members, _ = enrolled_members(deployment(made("FedSOUL", "softmax"), 3, terms=terms), transport_on(grid))
    for name, site in members.sites.items():
        site.rounds, site.times = 99, 49 if name == "bea" else 99
    active = members.active(fp.participation.Everyone(), Key(0), 0)
    weights = dict(zip(members.names, active.weights.tolist(), strict=True))
    assert weights == {"ada": 1.0, "bea": 2.0, "cem": 1.0, "dag": 1.0}
    assert not active.ratio


def test_a_node_is_not_taken_for_another_site(tmp_path: Path) -> None:
    """A key that was registered under one name cannot speak for another."""

    def prepare(grid: LocalGrid) -> None:
        node = next(n for n, name in grid.names.items() if name == "bea")
        grid.registered[node] = "ada"

    found, _ = run(tmp_path, prepare, rounds=2, terms=RoundTerms(sites=3))
    assert all(set(m["heard"]) == {"ada", "cem", "dag"} for m in found.history)


def test_sites_that_differ_in_form_are_told(tmp_path: Path) -> None:
    data = four("softmax")
    data["bea"] = (data["bea"][0][:, :2], data["bea"][1])
    grid = LocalGrid(app, enrol(tmp_path, data))
    with pytest.raises(SettingsError, match=r"of 1 unit\(s\) \[\[2\]\].* unlike the others: bea"):
        run_deployment(deployment(made("FedSOUL", "softmax"), 2, terms=TERMS), transport_on(grid))


def test_a_method_that_needs_everyone_waits_and_says_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fedpop.server")

    def prepare(grid: LocalGrid) -> None:
        sleep = grid.sleep

        def later(seconds: float) -> None:
            sleep(seconds)
            if grid.now > 100:
                grid.offline.clear()

        grid.sleep = later  # type: ignore[method-assign]

        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            if train(site, request) == 1 and site == "dag":
                grid.offline.add("bea")
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare, method=made("DGLMC", "softmax"))
    assert all(len(m["heard"]) == 4 for m in found.history)
    assert any("waiting for bea" in r.message for r in caplog.records)


def test_a_question_that_needs_everyone_names_who_is_missing(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, request: Message, reply: Message) -> list[Message] | None:
            incoming = request_from_record(request.content)
            asks = incoming.kind == "ask" and incoming.header["question"] == "curvature"
            return None if asks and site == "cem" else [reply]

        grid.fault = fault

    with pytest.raises(EstimateError, match="cem: it did not answer in time"):
        run(tmp_path, prepare, method=made("DGLMC", "softmax"))


# --- Flower's simulation ------------------------------------------------------------------------------


def test_nodes_that_have_numbers_stand_for_sites(tmp_path: Path) -> None:
    """In a simulation of Flower's a node has a number in the place of a folder."""
    data = four("softmax")
    enrol(tmp_path / "sites", data)
    grid = LocalGrid(app, dict.fromkeys(data, ""))
    for k, context in enumerate(grid.nodes.values()):
        context.node_config = {"partition-id": k, "num-partitions": len(data)}
        context.run_config = {"sites": str(tmp_path / "sites")}
    found = run_deployment(deployment(made("FedAvg", "softmax"), 2, terms=TERMS), transport_on(grid))
    same_bits(found.published, here(made("FedAvg", "softmax"), data, rounds=2).published)
