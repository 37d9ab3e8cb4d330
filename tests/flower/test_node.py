"""What a site's node remembers between requests, and what it takes from the server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

import fedpop as fp
from fedpop.flower import node, site_state
from fedpop.flower.deployment import run_deployment
from fedpop.flower.node import jittered, reply_to
from fedpop.flower.processes import free_port
from fedpop.flower.records import message_to_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.requests import Request
from fedpop.flower.site import Site, keep_hello, open_site
from fedpop.site import study
from fedpop.site.refusal import Refusal
from tests.flower.faulty import TERMS, with_lost
from tests.flower.local_grid import LocalGrid, wire
from tests.flower.sites import deployment, enrol, here, same_bits, transport_on
from tests.methods.conformance import four, made


class Nodes:
    """Nodes that stay, one for each folder."""

    def __init__(self) -> None:
        self.sites: dict[str, Site] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        folder = str(context.node_config["site"])
        site = self.sites.setdefault(folder, open_site(folder, lasting=True))
        return Message(message_to_record(reply_to(message, site)), reply_to=message)


def run(root: Path, method: Any, rounds: int = 5, **more: Any) -> tuple[fp.Population, LocalGrid]:
    grid = LocalGrid(Nodes(), enrol(root, four("softmax")))
    grid.fault = more.pop("fault", None)
    planned = deployment(method, rounds, **{"terms": TERMS} | more)
    return run_deployment(planned, transport_on(grid)), grid


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD", "DGLMC", "FedAvg"])
def test_theta_is_the_simulators_with_nodes_that_stay(name: str, tmp_path: Path) -> None:
    method = made(name, "softmax")
    found, _ = run(tmp_path, method)
    same_bits(found.published, here(method, four("softmax"), 5).published)


def test_what_is_lost_is_lost_for_nodes_that_stay(tmp_path: Path) -> None:
    """The state in memory is the one on disk: before the round, or after it."""

    def fault(name: str, request: Message, reply: Message) -> list[Message] | None:
        kind = request.metadata.message_type
        lost = name == "bea" and kind == MessageType.TRAIN and request.metadata.group_id in ("1", "2")
        return None if lost else [reply]

    terms = RoundTerms(sites=4, timeout=0.1)  # a site that does not answer is asked again
    found, _ = run(tmp_path, made("FedSOUL", "softmax"), 4, fault=fault, terms=terms)
    assert [m["round"] - 1 for m in found.history if "bea" in m["left_out"]] == [1, 2]
    same_bits(found.published, with_lost(lambda k, n: n == "bea" and k in (1, 2)).published)


def test_data_are_read_once_for_a_study_and_chains_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: dict[str, int] = {"data": 0, "chain": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            reads[name] += 1
            return function(*given, **more)

        return call

    monkeypatch.setattr(study, "read_data", counted("data", study.read_data))
    monkeypatch.setattr(site_state, "read_tensors", counted("chain", site_state.read_tensors))
    run(tmp_path, made("FedAvg", "softmax"), 12)
    sites = len(four("softmax"))
    assert reads["data"] <= 2 * sites  # for what examples look like, and for training
    assert reads["chain"] <= sites  # once, at the end


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "site.toml").write_text('name = "x"\ndata = "rows.csv"\n')
    (tmp_path / "secret").write_text("1\n")
    site = open_site(tmp_path, lasting=True)
    first = site._experiment("e", anew=False)
    assert site._experiment("e", anew=False) is first
    assert site._experiment("e", anew=True) is not first
    second = site._experiment("e", anew=False)
    table.write_text("a,b\n1,2\n3,4\n5,6\n")
    assert site._experiment("e", anew=False) is not second
    os.remove(table)
    assert site._experiment("e", anew=False).stamp == ()
    assert open_site(tmp_path).at_hand == {}


def test_no_code_comes_from_the_server(tmp_path: Path) -> None:
    """A model by name is one of a module that the site names itself; neither is anything else imported."""
    (folder,) = enrol(tmp_path, {"ada": four("softmax")["ada"]}).values()
    experiment = open_site(folder, lasting=True)._experiment("e", anew=True)
    for entry in ("subprocess:getoutput", "os:system", "tests.flower.sites:data_of"):
        described = {"kind": "Training", "method": {"entry": entry}}
        keep_hello(experiment.folder, Request("hello", {"experiment": "e", "study": described}))
        with pytest.raises(Refusal, match=r"name its module in site\.toml"):
            _ = experiment.study


def test_what_is_no_record_of_fedpops_is_refused(tmp_path: Path) -> None:
    (folder,) = enrol(tmp_path, {"ada": four("softmax")["ada"]}).values()
    content = RecordDict({"arrays": ArrayRecord({}), "config": ConfigRecord({"lr": 0.1})})
    LocalGrid(Nodes(), {})
    message = Message(content, 1, MessageType.TRAIN, ttl=60)
    reply = reply_to(wire(message), open_site(folder, lasting=True))
    assert "not a record of fedpop's" in str(reply.refused)


def test_sites_do_not_come_all_at_once() -> None:
    times = [jittered(1.0) for _ in range(200)]
    assert all(0.5 <= t < 1.5 for t in times)
    assert len(set(times)) > 100
    assert torch.tensor(times).std() > 0.1


def test_a_sites_work_is_what_the_benchmark_measures(tmp_path: Path) -> None:
    """It makes requests itself, which sites must understand."""
    from benchmarks import federation

    run(tmp_path, made("FedAvg", "softmax"), 2)
    before = (tmp_path / "ada" / "ledger.jsonl").read_text().count('"train"')
    assert federation.work_of(tmp_path / "ada") > 0
    assert (tmp_path / "ada" / "ledger.jsonl").read_text().count('"train"') == before + 5


class Silent:
    """A server that has nothing for a site."""

    def receive(self) -> None:
        return None


def test_a_node_that_has_grown_and_has_nothing_to_do_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while it works, not soon after, and not where it takes what it took at its start."""
    (folder,) = enrol(tmp_path, {"ada": four("softmax")["ada"]}).values()
    now, memory = [0.0], [10 * node.GROWN_BYTES]
    monkeypatch.setattr(node.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(node, "resident", lambda: memory[0])
    rest, asked = node.Rest(), []

    def sleep(seconds: float) -> None:
        asked.append(now[0])
        now[0] += 10
        memory[0] += node.GROWN_BYTES // 10

    monkeypatch.setattr(node.time, "sleep", sleep)
    with pytest.raises(node.Rested):
        node._serve(Silent(), open_site(folder), rest)  # type: ignore[arg-type]
    assert asked[-1] == pytest.approx(node.REST_SECONDS)  # it had grown enough after a hundred seconds
    rest.worked()
    rest.check()
    now[0] += 2 * node.REST_SECONDS
    memory[0] = 10 * node.GROWN_BYTES
    rest.check()


ANEW = """
import sys
from fedpop.flower import node
node.REST_SECONDS, node.GROWN_BYTES = 0.1, -1
raise SystemExit(node.process(sys.argv[1:]))
"""


@pytest.mark.flower
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_begins_anew_under_its_number(tmp_path: Path) -> None:
    (folder,) = enrol(tmp_path, {"ada": four("softmax")["ada"]}).values()
    with (folder / "site.toml").open("a") as file:
        file.write(f'server = "127.0.0.1:{free_port()}"\ninsecure = true\n')
    child = subprocess.Popen([sys.executable, "-c", ANEW, str(folder)])
    end, log = time.monotonic() + 120, folder / "site.log"
    try:
        while not log.exists() or log.read_text().count("begins anew") < 2:
            assert child.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
        assert child.poll() is None
    finally:
        child.terminate()
        child.wait(30)
