"""What goes wrong at a site, and requests that it has had before or should not have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

import fedpop as fp
from fedpop.errors import ExtraError
from fedpop.federation.participation import Active
from fedpop.flower import site_state
from fedpop.flower.records import (
    message_from_record,
)
from fedpop.flower.requests import PROTOCOL, Request, digest_of
from fedpop.flower.site import open_site
from fedpop.keys import unit_of
from fedpop.run.run import Run, Settings
from fedpop.site.sites import Sites
from fedpop.version import __version__
from tests.flower.faulty import requests_to, run, train
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import across, same_bits
from tests.methods.conformance import four, made

# --- at a site -----------------------------------------------------------------------------------


def test_what_goes_wrong_at_a_site_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hears what kind of error it was, never its words, which may hold data."""
    work = Sites.round_work

    def failing(self: Sites, method: Any, round: Any, *more: Any, **named: Any) -> Any:
        if self.sites is not None and int(self.sites[0]) == unit_of("bea") and round.number == 2:
            raise RuntimeError("row 17 of patient Jane Doe is odd")
        return work(self, method, round, *more, **named)

    monkeypatch.setattr(Sites, "round_work", failing)
    found, grid = run(tmp_path, lambda grid: None)
    assert found.history[2]["reasons"] == {"bea": "RuntimeError; the site's log says more"}
    sent = json.dumps([str(m.content.config_records) for _, _, m in grid.traffic])
    assert "Jane" not in sent
    same_bits(found.published, with_lost_at_site("bea", 2).published)


def test_a_package_that_a_site_lacks_is_told_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of data, and somebody has to install it there."""

    def lacking(*given: Any, **named: Any) -> Any:
        raise ExtraError("mixed models need pandas: pip install 'fedpop[formula]'")

    _, grid = across(made("FedAvg", "softmax"), four("softmax"), tmp_path, rounds=1)
    (request,) = [r for r in requests_to(grid, "ada") if r.kind == "train"]
    monkeypatch.setattr(Sites, "round_work", lacking)
    (tmp_path / "ada" / "experiments" / request.header["experiment"] / "chain.safetensors").unlink()
    why = open_site(tmp_path / "ada").answer(request).refused
    assert why == "site ada: mixed models need pandas: pip install 'fedpop[formula]'"


def with_lost_at_site(name: str, round: int) -> fp.Population:
    """A run in which a site is not there in one round: it did not work, so its chain did not move."""
    rounds = [[i for i, n in enumerate(four("softmax")) if k != round or n != name] for k in range(4)]
    data = four("softmax")

    class Listed(fp.participation.Everyone):
        def draw(self, roster: Any, key: Any) -> Any:
            ids = torch.tensor(rounds[key.round])
            return Active(ids, torch.ones(len(ids)), ratio=True)

    federation = fp.Federation.of(data)
    method = made("FedSOUL", "softmax").prepared(federation.example)
    settings = Settings(4, 0, Listed(), sites={n: [n] for n in data})
    return Run(method, method.model.checked(federation), settings).execute(resume=False, progress=False)


def test_a_full_disk_is_a_refusal_and_leaves_the_chain_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"now": False}

    replace = os.replace

    def replacing(source: Path, target: Path) -> None:
        if full["now"] and "bea" in target.parts:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replacing)

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            full["now"] = train(site, request) == 1  # the sites after it in this round, until the next
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare, rounds=4)
    assert "No space left" in found.history[1]["reasons"]["bea"]
    assert found.history[3]["reasons"] == {}
    chain = tmp_path / "bea" / "experiments" / "test" / "chain.safetensors"
    assert site_state.SiteState.read(chain).round == 3
    assert not list(chain.parent.glob("*.tmp"))


def test_a_wiped_disk_is_a_stateless_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            if site == "bea" and train(site, request) == 1:
                (tmp_path / "bea" / "experiments" / "test" / "chain.safetensors").unlink()
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare)
    assert all(m["left_out"] == [] for m in found.history)
    assert any("stateless start" in r.message for r in caplog.records)


def test_a_wiped_folder_is_greeted_again(tmp_path: Path) -> None:
    """Without the study that it received a site cannot work; it is sent again."""

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            if site == "bea" and train(site, request) == 1:
                for file in (tmp_path / "bea" / "experiments" / "test").iterdir():
                    file.unlink()
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare)
    assert [m["left_out"] for m in found.history] == [[], [], ["bea"], []]


# --- the same round twice --------------------------------------------------------------------------


def test_a_repeated_round_gives_the_same_reply_and_another_theta_starts_from_before(tmp_path: Path) -> None:
    _, grid = across(made("FedSOUL", "softmax"), four("softmax"), tmp_path, rounds=3)
    last = [x for x in requests_to(grid, "ada") if x.kind == "train"][-1]
    site = open_site(tmp_path / "ada")
    chain = tmp_path / "ada" / "experiments" / "test" / "chain.safetensors"
    stored = chain.read_bytes()
    again = site.answer(last)
    assert (
        again.payloads
        == [message_from_record(r.content) for s, m, r in grid.traffic if s == "ada"][-2].payloads
    )
    assert chain.read_bytes() == stored
    moved = {n: t + 0.25 if t.is_floating_point() else t for n, t in last.tensors.items()}
    other = Request("train", dict(last.header) | {"digest": digest_of(moved)}, moved)
    first = site.answer(other)
    assert first.payloads != again.payloads
    assert site.answer(last).payloads == again.payloads  # from before the round, whatever came in between
    assert site.answer(other).payloads == first.payloads


def test_theta_that_did_not_arrive_as_sent_is_refused(tmp_path: Path) -> None:
    _, grid = across(made("FedSOUL", "softmax"), four("softmax"), tmp_path, rounds=1)
    last = [x for x in requests_to(grid, "ada") if x.kind == "train"][-1]
    bent = {n: t + 1 if t.is_floating_point() else t for n, t in last.tensors.items()}
    assert open_site(tmp_path / "ada").answer(Request("train", last.header, bent)).refused is not None


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "", "A"])
def test_an_experiment_cannot_leave_its_folder(name: str, tmp_path: Path) -> None:
    _, grid = across(made("FedAvg", "softmax"), four("softmax"), tmp_path, rounds=1)
    for request in requests_to(grid, "ada")[1:]:
        other = Request(request.kind, dict(request.header) | {"experiment": name}, request.tensors)
        assert "no dot first" in str(open_site(tmp_path / "ada").answer(other).refused)


@pytest.mark.parametrize("change", [{"protocol": PROTOCOL + 1, "version": "9.0.0"}, {"protocol": 0}])
def test_a_server_of_another_protocol_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """And told which side has to be brought up to date."""
    _, grid = across(made("FedAvg", "softmax"), four("softmax"), tmp_path, rounds=1)
    for request in requests_to(grid, "ada"):
        other = Request(request.kind, dict(request.header) | change, request.tensors)
        why = open_site(tmp_path / "ada").answer(other).refused
        assert why is not None
        newer = bool(change["protocol"])
        todo = "install fedpop 9.0.0 at the site" if newer else f"install fedpop {__version__} at the server"
        assert todo in why


def test_patch_versions_work_together(tmp_path: Path) -> None:
    """What decides is the protocol, not the version: of the server's requests, and of sites' replies."""

    def prepare(grid: LocalGrid) -> None:
        def other(site: str, request: Message, reply: Message) -> list[Message]:
            record = reply.content.config_records["fedpop"]
            record["json"] = str(record["json"]).replace(f'"{__version__}"', '"0.2.99"')
            assert '"0.2.99"' in record["json"]
            return [reply]

        grid.fault = other

    found, grid = run(tmp_path, prepare, rounds=2)
    assert [m["left_out"] for m in found.history] == [[], []]
    last = [x for x in requests_to(grid, "ada") if x.kind == "train"][-1]
    other = Request("train", dict(last.header) | {"version": "0.1.7"}, last.tensors)
    assert open_site(tmp_path / "ada").answer(other).refused is None
