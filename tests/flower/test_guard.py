"""One absurd message must not move everybody, between machines as in the simulator."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

import fedpop as fp
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import message_from_record, message_to_record, request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.keys import Key
from fedpop.message import Channel
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import across, deployment, enrol, here, same_bits, transport_on
from tests.flower.test_agreement import SGD, softmax
from tests.helpers import generator

NAMES = ("ada", "bea", "cem", "dag", "eva", "fay")


def data(scale: float = 1.0, who: str = "cem") -> dict[str, Any]:
    g = generator(0)
    out = {}
    for name in NAMES:
        x, y = torch.randn(5, 3, generator=g), torch.randint(3, (5,), generator=g)
        out[name] = (x * scale if name == who else x, y)
    return out


def grown(reply: Message, factor: float) -> Message:
    """A reply whose vectors, if it has any, are so many times as long."""
    old = message_from_record(reply.content)
    longer = {}
    for name, p in old.payloads.items():
        vector = Channel().decode(name, p, 0) * factor
        longer[name] = Channel().encode(name, vector, 0, Key(0))
    counts = {_shifted(n, factor if longer else 1.0): number for n, number in old.numbers.items()}
    reply.content = message_to_record(replace(old, payloads=longer, numbers=counts))
    return reply


def _shifted(name: str, factor: float) -> str:
    """The name of a count of norms that are so many times as long."""
    *begin, last = name.split(".")
    return ".".join([*begin, str(int(last) + round(math.log2(factor)))]) if begin[:1] == ["norms"] else name


@pytest.mark.parametrize("at", [0, 2], ids=["in the first round", "later"])
def test_the_server_leaves_out_what_is_out_of_proportion(at: int, tmp_path: Path) -> None:
    """Whoever comes first: all messages of a round are looked at together. Named, counted, not unbiased."""
    grid = LocalGrid(app, enrol(tmp_path, data()))

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        incoming = request_from_record(request.content)
        absurd = incoming.kind == "train" and incoming.header["round"] == at and site == "cem"
        return [grown(reply, 1e7) if absurd else reply]

    grid.fault = fault
    found = run_deployment(
        deployment(fp.FedSOUL(softmax(), final=fp.chains.Final(2, 5, 5)), 4, terms=RoundTerms(sites=6)),
        transport_on(grid),
    )
    assert [m["left_out"] for m in found.history] == [["cem"] if k == at else [] for k in range(4)]
    line = found.history[at]
    assert line["out_of_proportion"] == ["cem"]
    assert line["unbiased"] is False
    assert line["reasons"] == {"cem": "its message was out of all proportion"}
    assert found.totals["out_of_proportion"] == 1
    assert "unbiased" not in found.history[3]


@pytest.mark.parametrize("compressor", ["identity", "qsgd"])
def test_a_site_judges_itself_as_the_simulator_does(
    compressor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From what is usual, which is broadcast: the absurd message does not leave it, its norm does; who is
    left out, and theta, are the simulator's."""
    method = fp.FedAvg(softmax(), local=SGD, compressor=compressor, guard=3.0)
    # In turn by their hashes: where the culprit comes late the simulator can tell in its first round, too.
    for who in NAMES:
        simulated = here(method, data(40.0, who), rounds=4)
        if [m["left_out"] for m in simulated.history] == [[who]] * 4:
            break
    else:
        pytest.fail("nobody is left out in every round")
    elsewhere, grid = across(method, data(40.0, who), tmp_path, rounds=4)
    for one, other in zip(elsewhere.history, simulated.history, strict=True):
        assert one["left_out"] == other["left_out"] == one["out_of_proportion"] == other["out_of_proportion"]
        assert one["unbiased"] is other["unbiased"] is False
    same_bits(elsewhere.published, simulated.published)
    replies = [
        message_from_record(r.content)
        for s, m, r in grid.traffic
        if s == who and request_from_record(m.content).kind == "train"
    ]
    assert replies[0].payloads  # nothing is known to be usual yet
    for withheld in replies[1:]:  # the counts of its norms leave it, and nothing else
        assert not withheld.payloads
        assert {n.split(".")[1] for n in withheld.numbers} == {"dw"}
        assert all(n.startswith("norms.") for n in withheld.numbers)
    assert json.dumps(elsewhere.history[1]["reasons"]).count("the site withheld it") == 1
    assert "is not sent: look at the data's scale" in caplog.text


def test_everyone_cannot_be_shut_out(tmp_path: Path) -> None:
    """Norms that were withheld count in what is usual: a jump of all of them costs one round."""
    grid = LocalGrid(app, enrol(tmp_path, data()))
    planned = deployment(fp.FedAvg(softmax(), local=SGD, guard=3.0), 5, terms=RoundTerms(sites=6))

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        about = request_from_record(request.content).header
        return [grown(reply, 1e-6) if about.get("round") in (0, 1) else reply]

    grid.fault = fault
    found = run_deployment(planned, transport_on(grid))
    left_out = [len(m["left_out"]) for m in found.history]
    assert left_out == [0, 6, 0, 0, 0]


def test_a_few_sites_have_no_median(tmp_path: Path) -> None:
    few = {n: rows for n, rows in data(1e4).items() if n in NAMES[:4]}
    found, _ = across(fp.FedAvg(softmax(), local=SGD, guard=2.0), few, tmp_path, rounds=2)
    assert all("out_of_proportion" not in m for m in found.history)
