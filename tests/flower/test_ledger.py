"""A site's ledger: everything that left it and nothing else, whole after any crash, and no line of it can be
changed unseen."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.errors import CheckpointError, DataError, SettingsError
from fedpop.flower.allowed import Allowed
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.ledger import LEDGER, Ledger
from fedpop.flower.metrics import serving_ledger
from fedpop.flower.processes import free_port
from fedpop.flower.records import message_from_record
from fedpop.flower.site import open_site
from fedpop.site.refusal import Code
from tests.flower.browser import get
from tests.flower.commands import fedpop, refused
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import across, deployment, enrol, transport_on
from tests.methods.conformance import four, made


def filled(path: Path, entries: int) -> Ledger:
    ledger = Ledger(path)
    for i in range(entries):
        ledger.add({"kind": "train", "round": i, "vectors": {"I": {"entries": i}}})
    return ledger


# --- the file ------------------------------------------------------------------------------------


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    ledger = filled(tmp_path / LEDGER, 5)
    found = list(ledger.read())
    assert [(e["n"], e["round"]) for e in found] == [(i + 1, i) for i in range(5)]
    assert all(b["before"] == a["hash"] for a, b in itertools.pairwise(found))
    assert (tmp_path / LEDGER).stat().st_mode & 0o077 == 0
    assert list(Ledger(tmp_path / "none").read()) == []


def test_no_line_can_be_changed_removed_inserted_or_moved(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    ledger = filled(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = [
        *([*lines[:i], lines[i].replace(b'"round": ', b'"round": 1'), *lines[i + 1 :]] for i in range(4)),
        *([*lines[:i], b"scratched\n", *lines[i + 1 :]] for i in range(3)),
        *(lines[:i] + lines[i + 1 :] for i in range(3)),
        *([*lines[:i], lines[i], *lines[i:]] for i in range(4)),
        [lines[1], lines[0], *lines[2:]],
        [b"not an entry\n", *lines],
    ]
    for version in changed:
        path.write_bytes(b"".join(version))
        with pytest.raises(CheckpointError, match=r"ledger.jsonl, line \d"):
            list(ledger.read())
    path.write_bytes(b"".join(lines))
    forged = json.loads(lines[1]) | {"round": 7}
    del forged["hash"]
    forged["hash"] = hashlib.sha256(json.dumps(forged, sort_keys=True).encode()).hexdigest()
    path.write_bytes(lines[0] + json.dumps(forged).encode() + b"\n" + lines[2] + lines[3])
    with pytest.raises(CheckpointError, match="line 3: it does not follow"):
        list(ledger.read())  # its own digest is right; what follows it is not


def test_a_last_line_that_was_edited_is_not_built_upon(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    ledger = filled(path, 2)
    path.write_bytes(path.read_bytes().replace(b'"round": 1', b'"round": 9'))
    with pytest.raises(CheckpointError, match=r"last line .* was edited"):
        ledger.add({"kind": "train"})


def test_it_goes_on_after_a_crash_at_any_byte(tmp_path: Path) -> None:
    """Once, and again while the line after it is written."""
    path = tmp_path / LEDGER
    ledger = filled(path, 3)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in [*range(start, len(whole) - 3, 5), *range(len(whole) - 3, len(whole))]:
        path.write_bytes(whole[:cut])
        survivors = 3 if cut == len(whole) - 1 else 2  # all but its end was there
        assert len(list(ledger.read())) == survivors
        ledger.add({"kind": "ask"})
        found = list(ledger.read())
        assert [e["n"] for e in found] == list(range(1, survivors + 2))
        assert found[-1]["kind"] == "ask"
        if cut % 4 == 0:
            again = path.read_bytes()
            for second in range(cut, len(again), 29):
                path.write_bytes(again[:second])
                ledger.add({"kind": "hello"})
                assert list(ledger.read())[-1]["kind"] == "hello"


def test_a_line_may_be_longer_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    ledger = filled(tmp_path / LEDGER, 1)
    for _ in range(2):
        ledger.add({"kind": "ask", "numbers": ["x" * 100] * 2000})
    ledger.add({"kind": "finish"})
    assert [e["n"] for e in ledger.read()] == [1, 2, 3, 4]


def test_who_writes_at_the_same_time_writes_one_after_the_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    threads = [
        threading.Thread(target=lambda: [ledger.add({"kind": "train"}) for _ in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e["n"] for e in ledger.read()] == list(range(1, 41))


# --- what is in it ---------------------------------------------------------------------------------


def digest(reply: Any) -> str:
    """As the documentation says: of the text that travels, then of each vector's bytes."""
    text = str(reply.content.config_records["fedpop"]["json"]).encode()
    arrays = reply.content.array_records["arrays"]
    parts = [hashlib.sha256(arrays[name].data).digest() for name in sorted(arrays)]
    return hashlib.sha256(b"".join([text, *parts])).hexdigest()


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "QLSD"])
def test_it_has_all_that_was_sent_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Against a record of the traffic: the same messages in the same order, their sizes and digests."""
    brief = {"final": fp.chains.Final(2, 5, 5)} if name == "FedSOUL" else {}
    data = four("linear")
    _, grid = across(made(name, "linear", **brief), data, tmp_path, rounds=3)
    assert grid.traffic
    for site in data:
        sent = [reply for who, _, reply in grid.traffic if who == site]
        entries = list(Ledger.of(tmp_path / site).read())
        assert [e["digest"] for e in entries] == [digest(reply) for reply in sent]
        for entry, reply in zip(entries, sent, strict=True):
            arrays = reply.content.array_records["arrays"]
            text = str(reply.content.config_records["fedpop"]["json"])
            assert entry["bytes"] == len(text) + sum(len(a.data) for a in arrays.values())
            message = message_from_record(reply.content)
            lengths = {n: p.length for n, p in message.payloads.items()}
            assert {n: v["entries"] for n, v in entry["vectors"].items()} == lengths
            assert entry["run"] == "test"
        rounds = [e["round"] for e in entries if e["kind"] == "train"]
        assert rounds == [0, 1, 2]


def test_values_are_not_in_it(tmp_path: Path) -> None:
    _, grid = across(made("FedAvg", "linear"), four("linear"), tmp_path, rounds=2)
    site = next(iter(four("linear")))
    text = (tmp_path / site / LEDGER).read_text()
    numbers = [
        v
        for who, _, r in grid.traffic
        if who == site
        for v in message_from_record(r.content).numbers.values()
    ]
    real = [v for v in numbers if v != int(v)]
    assert real
    assert not any(repr(v) in text for v in real)


def test_nothing_leaves_that_cannot_be_written_down(tmp_path: Path) -> None:
    """A full disk, say: the reply is a refusal, without any vector."""
    data = four("linear")
    folders = enrol(tmp_path, data)
    grid = LocalGrid(app, folders)
    first = next(iter(data))
    (folders[first] / LEDGER).mkdir()
    deployed = deployment(made("FedAvg", "linear"), 1)
    run_deployment(deployed, transport_on(grid))
    replies = [message_from_record(reply.content) for who, _, reply in grid.traffic if who == first]
    assert replies
    assert all(m.header["refused"] == [str(Code.DISK), "the site cannot write its ledger"] for m in replies)
    assert not any(m.payloads for m in replies)


# --- what a site allows ------------------------------------------------------------------------------


def allow(folder: Path, line: str) -> None:
    with (folder / "site.toml").open("a") as file:
        file.write(line + "\n")


def test_a_question_that_is_not_listed_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = four("linear")
    folders = enrol(tmp_path, data)
    for folder in folders.values():
        allow(folder, 'questions = ["example"]')
    population = run_deployment(
        deployment(made("FedAvg", "linear"), 2), transport_on(LocalGrid(app, folders))
    )
    assert population.rounds == 2  # which asks for no more than what an example looks like
    again = enrol(tmp_path / "again", data)
    first = next(iter(again))
    allow(again[first], 'questions = ["example"]')
    run_deployment(deployment(made("QLSD", "linear"), 2), transport_on(LocalGrid(app, again)))
    why = "the question 'curvature' is not among those that site.toml allows"
    assert f"{first} was left out: {why}" in caplog.text
    entries = [e for e in Ledger.of(again[first]).read() if e["kind"] == "ask"]
    assert ["question", why] in [e.get("refused") for e in entries]
    assert not any(e["vectors"] for e in entries if "refused" in e)


NAMES = """import importlib, pkgutil, sys
import fedpop.flower.client
if "all" in sys.argv:
    for module in pkgutil.walk_packages(fedpop.__path__, "fedpop."):
        importlib.import_module(module.name)
from fedpop.questions import Question
from fedpop.settings import all_of
print(sorted({q.name for q in all_of(Question) if hasattr(q, "name") and q.__module__.startswith("fedpop.")}))
"""


def test_a_site_knows_every_question_of_the_library() -> None:
    """In a process of its own, where nothing else has imported them."""
    known, every = (
        subprocess.run(
            [sys.executable, "-c", NAMES, which], capture_output=True, text=True, check=True
        ).stdout
        for which in ("client", "all")
    )
    assert known == every


def test_a_question_that_does_not_exist_is_an_error_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "site.toml").write_text('name = "city"\ndata = "../rows.csv"\nserver = "127.0.0.1:1"\n')
    (folder / "secret").write_text("1\n")
    assert open_site(folder).allowed == Allowed()
    allow(folder, 'questions = ["moments of everything"]')
    with pytest.raises(SettingsError, match="unknown question 'moments of everything'; known are"):
        open_site(folder)


def test_a_formula_that_is_not_listed_is_refused_by_name(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")
    pytest.importorskip("formulae", reason="mixed models need the extra 'formula'")
    from tests.flower.formulas import by_site, over

    g = torch.Generator().manual_seed(0)
    table = pd.DataFrame({"g": [i // 8 for i in range(72)], "x": torch.randn(72, generator=g).numpy()})
    table["y"] = table.x + table.g % 3 + torch.randn(72, generator=g).numpy()
    table["w"] = 1.0
    folders = enrol(tmp_path, by_site(table, "g", 3))
    allow(folders["north"], 'formulas = ["y ~ x + (1|g)", "y ~ 1 + (1|g); weights = w"]')
    grid = LocalGrid(app, folders)
    assert over(grid, "y  ~  x + (1 | g)").rounds
    over(LocalGrid(app, folders), "y ~ 1 + (1 | g)", weights="w")
    for asked, weights in (("y ~ 1 + (1 | g)", {}), ("y ~ x + (1 | g)", {"weights": "w"})):
        with pytest.raises(DataError, match=r"north: the formula 'y ~ .* is not among those that site.toml"):
            over(LocalGrid(app, folders), asked, **weights)


# --- the command ---------------------------------------------------------------------------------------


def test_the_command_prints_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    across(made("FedAvg", "linear"), four("linear"), tmp_path, rounds=2)
    folder = tmp_path / next(iter(four("linear")))
    entries = list(Ledger.of(folder).read())
    capsys.readouterr()

    def told(*arguments: str) -> list[str]:
        fedpop("site", "ledger", folder, *arguments)
        return capsys.readouterr().out.splitlines()

    shown = told()
    assert len(shown) == len(entries) + 2
    assert any("  test  round 2: " in line for line in shown)
    assert shown[-2].startswith(f"{len(entries)} message(s), ")
    assert shown[-1] == f"the last one is {entries[-1]['hash']}"
    assert told("--verify") == shown[-2:]
    assert told("--last", "1") == shown[-3:]
    assert [json.loads(line) for line in told("--json")] == entries
    assert told("--verify", "--head", entries[1]["hash"]) == shown[-2:]
    lines = (folder / LEDGER).read_bytes().splitlines(keepends=True)
    (folder / LEDGER).write_bytes(b"".join(lines[:-1]))  # the chain is whole, and the noted digest is gone
    assert len(told("--verify")) == 2
    assert "entries that once were there are missing" in refused(
        capsys, "site", "ledger", folder, "--head", entries[-1]["hash"]
    )
    (folder / LEDGER).write_bytes(lines[0] + b"".join(lines[2:]))
    assert "line 2: it does not follow" in refused(capsys, "site", "ledger", folder, "--verify")
    (folder / LEDGER).unlink()
    assert told() == ["nothing has left this site yet"]
    assert "is no site's folder" in refused(capsys, "site", "ledger", tmp_path / "none")


def test_a_site_s_numbers_for_prometheus(tmp_path: Path) -> None:
    """What its ledger has, on loopback, under that path and no other."""
    across(made("FedAvg", "linear"), four("linear"), tmp_path, rounds=3)
    folder = tmp_path / next(iter(four("linear")))
    entries, told, port = list(Ledger.of(folder).read()), list[str](), free_port()
    with serving_ledger(folder, port, told.append):
        assert told == [f"metrics are at http://127.0.0.1:{port}/metrics"]
        status, body, headers = get(f"http://127.0.0.1:{port}", "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert get(f"http://127.0.0.1:{port}", "/")[0] == 404
    text = body.decode()
    assert f"fedpop_site_messages_total {len(entries)}\n" in text
    assert f"fedpop_site_bytes_total {sum(e['bytes'] for e in entries)}\n" in text
    assert "fedpop_site_last_round 3\n" in text
    with serving_ledger(folder, 0, told.append):
        assert len(told) == 1  # no port, no server
