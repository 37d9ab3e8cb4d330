"""Rounds wait for sites that can be asked, a while after a quorum, and for whoever was not heard for long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message

from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.transport import NODE_GONE
from tests.flower.faulty import run, train
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, transport_on
from tests.methods.conformance import four, made


def asked(grid: LocalGrid) -> dict[int, list[str]]:
    """Who was asked in each round."""
    out: dict[int, list[str]] = {}
    for site, request, _ in grid.traffic:
        number = train(site, request)
        if number is not None:
            out.setdefault(number, []).append(site)
    return out


def slow(grid: LocalGrid, name: str, seconds: float, others: float = 1.0) -> None:
    """This site's work takes so long, that of others a second."""

    def delay(site: str, request: Message) -> float:
        return 0.0 if train(site, request) is None else seconds if site == name else others

    grid.delay = delay


def killed(grid: LocalGrid, name: str, at: int, back: float, gone: bool) -> None:
    """A site is killed while it works on a round: Flower lists its node for a minute more, and says that it
    is gone (or not). It is there again later."""
    state: dict[str, float] = {}
    sleep: Callable[[float], None] = grid.sleep

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        if site != name or (train(site, request) != at and not state) or "back" in state:
            return [reply]
        state.setdefault("killed", grid.now)
        return [Message(Error(code=NODE_GONE, reason="gone"), reply_to=request)] if gone else []

    def later(seconds: float) -> None:
        sleep(seconds)
        if "killed" in state and "back" not in state:
            away = grid.now - state["killed"]
            (grid.offline.add if 60 < away < back else grid.offline.discard)(name)
            if away >= back:
                state["back"] = grid.now

    grid.fault, grid.sleep = fault, later  # type: ignore[method-assign]


@pytest.mark.parametrize("gone", [True, False])
def test_no_round_is_begun_with_fewer_sites_than_are_wanted(
    gone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while Flower still lists the node of one that was killed; the server says for whom it waits."""
    caplog.set_level("INFO", logger="fedpop.server")
    data = {n: values for n, values in four("softmax").items() if n in ("ada", "bea")}
    grid = LocalGrid(app, enrol(tmp_path, data))
    killed(grid, "bea", at=1, back=300.0, gone=gone)
    terms = RoundTerms(sites=2, quorum=1.0, timeout=30.0)
    found = run_deployment(deployment(made("FedSOUL", "softmax"), 5, terms=terms), transport_on(grid))
    assert found.rounds == 5
    heard = [m["heard"] for m in found.history]
    assert heard == [["ada", "bea"], ["ada"], *[["ada", "bea"]] * 3]
    assert all(set(sites) == {"ada", "bea"} for sites in asked(grid).values())
    assert "waiting for 1 more site(s) (bea: " in caplog.text
    assert "; here: ada" in caplog.text


def test_a_site_that_is_busy_is_not_counted(tmp_path: Path) -> None:
    """Its late answer is taken in while the server waits, and it is asked again then."""

    def prepare(grid: LocalGrid) -> None:
        slow(grid, "dag", 45.0)

    found, grid = run(tmp_path, prepare, rounds=3, terms=RoundTerms(sites=4, timeout=30.0))
    assert [m["left_out"] for m in found.history] == [["dag"]] * 3
    assert [len(sites) for sites in asked(grid).values()] == [4, 4, 4]
    assert grid.now < 3 * 50  # as soon as the late answer is there


def test_after_a_quorum_there_is_some_grace(tmp_path: Path) -> None:
    heard = []
    for k, grace in enumerate((0.0, 6.0)):
        terms = RoundTerms(sites=3, quorum=0.75, grace=grace, timeout=100.0)
        found, grid = run(tmp_path / str(k), lambda grid: slow(grid, "dag", 5.0), rounds=1, terms=terms)
        heard.append(found.history[0]["heard"])
        assert grid.now < 10
    assert heard == [["ada", "bea", "cem"], ["ada", "bea", "cem", "dag"]]


def test_grace_ends(tmp_path: Path) -> None:
    terms = RoundTerms(sites=3, quorum=0.75, grace=6.0, timeout=1000.0)
    found, grid = run(tmp_path, lambda grid: slow(grid, "dag", 50.0), rounds=1, terms=terms)
    assert found.history[0]["heard"] == ["ada", "bea", "cem"]
    assert grid.now < 15


@pytest.mark.parametrize("unheard", [1, 3])
def test_the_slowest_site_is_heard_again(unheard: int, tmp_path: Path) -> None:
    """At a quorum that others always make it would never be."""
    terms = RoundTerms(sites=3, quorum=0.6, timeout=200.0, unheard=unheard)
    found, _ = run(tmp_path, lambda grid: slow(grid, "dag", 20.0), rounds=12, terms=terms)
    missed = longest = 0
    for line in found.history:
        missed = 0 if "dag" in line["heard"] else missed + 1
        longest = max(longest, missed)
    assert longest == unheard
    never = RoundTerms(sites=3, quorum=0.6, timeout=200.0, unheard=1000)
    found, _ = run(tmp_path / "never", lambda grid: slow(grid, "dag", 20.0), rounds=12, terms=never)
    assert not any("dag" in line["heard"] for line in found.history)


def test_who_takes_longer_than_a_timeout_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It holds up one round in so many, and not each."""
    terms = RoundTerms(sites=3, quorum=0.6, timeout=30.0, unheard=2)
    found, grid = run(tmp_path, lambda grid: slow(grid, "dag", 55.0), rounds=9, terms=terms)
    assert found.rounds == 9
    assert "dag has not been heard for 2 rounds, nor now within 30 s" in caplog.text
    assert grid.now < 9 * 30


def test_what_was_missed_outlives_the_server(tmp_path: Path) -> None:
    data, terms = four("softmax"), RoundTerms(sites=3, quorum=0.6, timeout=200.0, unheard=4)
    grid = LocalGrid(app, enrol(tmp_path, data))
    slow(grid, "dag", 20.0)
    method = made("FedSOUL", "softmax")
    for rounds in (3, 6):
        planned = deployment(method, rounds, terms=terms)
        found = run_deployment(planned, transport_on(grid), tmp_path / "run")
    assert ["dag" in line["heard"] for line in found.history] == [False] * 4 + [True, False]


def test_newcomers_are_asked_before_they_count(tmp_path: Path) -> None:
    """A round waits for sites that have answered the questions before the rounds; newcomers are asked."""
    data = four("softmax")

    def prepare(grid: LocalGrid) -> None:
        newcomer = enrol(tmp_path / "new", {"eva": data["ada"]})

        def fault(site: str, request: Message, reply: Message) -> list[Any]:
            if train(site, request) == 1 and site == "dag":
                grid.offline.add("bea")
                grid.join("eva", newcomer["eva"])
            return [reply]

        grid.fault = fault

    found, grid = run(
        tmp_path, prepare, method=made("QLSD", "softmax"), rounds=4, terms=RoundTerms(sites=4, timeout=30.0)
    )
    assert [m["heard"] for m in found.history][2:] == [["ada", "cem", "dag", "eva"]] * 2
    before = [r.kind for r in (request_from_record(m.content) for s, m, _ in grid.traffic if s == "eva")]
    assert before.index("ask") < before.index("train")
