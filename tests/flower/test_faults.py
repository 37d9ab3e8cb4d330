"""What goes wrong between machines: messages that are lost, late, doubled or corrupt; a killed server."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Array, Message, RecordDict

import fedpop as fp
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import (
    message_from_record,
    message_to_record,
    request_from_record,
    request_to_record,
)
from fedpop.flower.remote import RoundTerms
from fedpop.flower.requests import Request
from fedpop.message.compressors.base import sealed
from tests.flower.faulty import TERMS, run, train, with_lost
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, here, same_bits, transport_on
from tests.methods.conformance import four, made

# --- on the way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD"])
def test_a_lost_reply_did_not_happen(name: str, tmp_path: Path) -> None:
    """The site goes on from before it, but for what a chain may keep: as in the simulator, to the bit."""

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, request: Message, reply: Message) -> list[Message] | None:
            return None if site == "bea" and train(site, request) in (1, 2) else [reply]

        grid.fault = fault

    # A site is not asked while a request to it may yet be answered: here it is lost for good, and known.
    terms = RoundTerms(sites=4, timeout=0.1)
    found, _ = run(tmp_path, prepare, terms=terms, method=made(name, "softmax"))
    missed = [m["round"] - 1 for m in found.history if "bea" in m["left_out"]]
    assert missed == [1, 2]
    simulated = with_lost(lambda k, site: site == "bea" and k in missed, name=name)
    same_bits(found.published, simulated.published)
    assert found.history[missed[0]]["reasons"] == {"bea": "it did not answer in time"}


def test_a_late_reply_is_dropped_and_counted(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        grid.delay = lambda site, request: 45.0 if site == "bea" and train(site, request) == 1 else 0.0

        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            grid.now += 3  # sites need their time
            return [reply]

        grid.fault = fault

    found, grid = run(tmp_path, prepare, rounds=6, terms=RoundTerms(sites=3, timeout=30.0))
    assert found.history[1]["left_out"] == ["bea"]
    assert found.history[-1]["late"] == 1
    # It is busy until the late reply is there, so it is not asked; then it takes part again.
    heard = ["bea" in m["heard"] for m in found.history]
    assert heard[:3] == [True, False, False]
    assert heard[-1]
    rounds = [train(s, m) for s, m, _ in grid.traffic if s == "bea" and train(s, m) is not None]
    assert rounds == [k for k, h in enumerate(heard) if h or k == 1]


def test_a_round_closes_on_its_quorum(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        grid.delay = lambda site, request: 20.0 if site == "dag" and train(site, request) is not None else 0.0

    found, grid = run(tmp_path, prepare, terms=RoundTerms(sites=4, quorum=0.75, timeout=1000.0))
    assert "dag" not in found.history[0]["heard"]
    assert len(found.history[0]["heard"]) == 3
    assert grid.now < 200  # nobody waited for the timeout


def test_a_doubled_reply_counts_once(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        grid.fault = lambda site, request, reply: [reply, reply]

    found, _ = run(tmp_path, prepare)
    same_bits(found.published, here(made("FedSOUL", "softmax"), four("softmax"), rounds=4).published)


def spoiled(reply: Message, how: str) -> Message:
    """A reply as something between the site and the server may have changed it."""
    old = message_from_record(reply.content)
    record = message_to_record(old)
    arrays = record.array_records["arrays"]
    first = next(iter(arrays))
    array = arrays[first]
    if how == "nothing in it":
        record = RecordDict()
    elif how == "truncated":
        arrays[first] = Array(array.dtype, array.shape, array.stype, array.data[:-3])
    elif how == "another codec":
        arrays[first] = Array(array.dtype, array.shape, "fedpop.qsgd", array.data)
    elif how == "no JSON":
        record.config_records["fedpop"]["json"] = "{"
    elif how == "a vector too few":
        record = message_to_record(replace(old, payloads=dict(list(old.payloads.items())[1:])))
    elif how == "longer":
        short = dict(old.payloads)
        p = short[first]
        short[first] = type(p)(p.codec, p.length + 1, p.data + p.data[:8])
        record = message_to_record(replace(old, payloads=short))
    elif how == "not finite":
        nan = torch.full((old.payloads[first].length,), math.nan, dtype=torch.float64)
        p = old.payloads[first]
        payloads = dict(old.payloads) | {
            first: type(p)(p.codec, p.length, sealed(0, p.length, bytes([8]), nan.numpy().tobytes()))
        }
        record = message_to_record(replace(old, payloads=payloads))
    else:
        changes = {"another round": {"round": 99}, "another theta": {"digest": "x"}}
        changes |= {"another protocol": {"protocol": 0}, "an unknown word": {"word": 1}}
        if how == "units below zero":
            record = message_to_record(replace(old, units=torch.tensor([-2])))
        elif how == "an undeclared number":
            record = message_to_record(replace(old, numbers={**old.numbers, "age": 1.0}))
        elif how == "an undeclared vector":
            record = message_to_record(replace(old, payloads={**old.payloads, "age": old.payloads[first]}))
        elif how == "an undeclared sum":
            more = {**old.payloads, "named.age": old.payloads[first]}
            record = message_to_record(replace(old, payloads=more))
        else:
            record = message_to_record(replace(old, header={**old.header, **changes[how]}))
    reply.content = record
    return reply


@pytest.mark.parametrize(
    "how",
    [
        "nothing in it",
        "truncated",
        "another codec",
        "no JSON",
        "a vector too few",
        "longer",
        "not finite",
        "another round",
        "another theta",
        "another protocol",
        "units below zero",
        "an unknown word",
        "an undeclared number",
        "an undeclared vector",
        "an undeclared sum",
    ],
)
def test_a_spoiled_reply_is_left_out_and_named(how: str, tmp_path: Path) -> None:
    """And the rest of the run is that in which it was lost."""

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            return [spoiled(reply, how) if site == "cem" and train(site, request) == 1 else reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare, rounds=3)
    assert [m["left_out"] for m in found.history] == [[], ["cem"], []]
    assert set(found.history[1]["reasons"]) == {"cem"}
    same_bits(found.published, without_cem().published)


@functools.cache
def without_cem() -> fp.Population:
    return with_lost(lambda k, site: k == 1 and site == "cem", rounds=3)


# --- a server that is killed -----------------------------------------------------------------------


class Killed(BaseException):
    """Nothing may catch it."""


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD", "FSGLD"])
@pytest.mark.parametrize("when", ["between", "in a round", "before the first"])
def test_a_killed_server_goes_on_to_the_same_theta(name: str, when: str, tmp_path: Path) -> None:
    """Killed as the last request of a round is under way, or its first: sites have worked, nobody heard."""
    data = four("softmax")
    method = made(name, "softmax")
    grid = LocalGrid(app, enrol(tmp_path, data))
    at = {"between": 2, "in a round": 2, "before the first": 0}[when]

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        if train(site, request) == at and (when == "between" or site == "cem" or name == "FSGLD"):
            raise Killed
        return [reply]

    grid.fault = fault
    planned = deployment(method, 4, terms=TERMS)
    with pytest.raises(Killed):
        run_deployment(planned, transport_on(grid), tmp_path / "run")
    grid.fault = None
    found = run_deployment(planned, transport_on(grid), tmp_path / "run")
    same_bits(found.published, here(method, data, rounds=4).published)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]


# --- records ---------------------------------------------------------------------------------------


def test_letters_and_replies_survive_their_records() -> None:
    tensors = {"a": torch.randn(2, 3, dtype=torch.float64), "b": torch.tensor(3), "c": torch.zeros(0)}
    request = Request("train", {"round": 1, "nested": {"x": [1, None]}}, tensors)
    again = request_from_record(request_to_record(request))
    assert again.header == request.header
    for n, t in tensors.items():
        assert torch.equal(again.tensors[n], t)
        assert again.tensors[n].dtype == t.dtype
