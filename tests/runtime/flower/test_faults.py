"""What goes wrong between machines: messages that are lost, late, doubled or corrupt; sites that fail,
differ, leave and come; a server that is killed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, Message, RecordDict

import fedpop as fp
from fedpop.channel.compressors.base import sealed
from fedpop.errors import EstimateError, SettingsError
from fedpop.federation.participation import Active
from fedpop.files import write_tensors
from fedpop.keys import Key
from fedpop.population.sites import Sites
from fedpop.runtime.flower import memory as memories
from fedpop.runtime.flower import site as at_site
from fedpop.runtime.flower.client import app
from fedpop.runtime.flower.conduct import conduct, enrolled
from fedpop.runtime.flower.elsewhere import RoundTerms
from fedpop.runtime.flower.folder import open_site
from fedpop.runtime.flower.letters import Letter, Reply, digest_of
from fedpop.runtime.flower.records import (
    letter_from_record,
    letter_to_record,
    reply_from_record,
    reply_to_record,
)
from fedpop.runtime.run import Run, Settings
from tests.algorithms.conformance import four, made
from tests.runtime.flower.local_grid import LocalGrid
from tests.runtime.flower.sites import across, deployment, enrol, here, post_on, same_bits

TERMS = RoundTerms(sites=4, timeout=30.0)


def train(name: str, message: Message) -> int | None:
    """The round that a letter to this site asks for; None of any other letter."""
    letter = letter_from_record(message.content)
    return int(letter.about["round"]) if letter.kind == "train" else None


def run(
    tmp_path: Path, prepare: Any, rounds: int = 5, terms: RoundTerms = TERMS, **more: Any
) -> tuple[fp.Population, LocalGrid]:
    grid = LocalGrid(app, enrol(tmp_path, four("softmax")))
    prepare(grid)
    method = more.pop("method", None) or made("FedSOUL", "softmax")
    return conduct(deployment(method, rounds, terms=terms, **more), post_on(grid)), grid


def with_lost(lost: Any, rounds: int = 5, name: str = "FedSOUL") -> fp.Population:
    """The simulator's run in which the same messages are lost, summed in the same order."""
    method, data = made(name, "softmax"), four("softmax")
    federation = fp.Federation.of(data)
    method = method.prepared(federation.example)
    settings = Settings(rounds, 0, fp.participation.Everyone(), sites={n: [n] for n in data})
    simulation = Run(method, method.model.checked(federation), settings)
    names = {int(u): n for u, n in zip(federation.units, federation.names, strict=True)}
    simulation.sites.lost = lambda k, units: torch.tensor([lost(k, names[int(u)]) for u in units])
    return simulation.execute(resume=False, progress=False)


# --- on the way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD"])
def test_a_lost_reply_did_not_happen(name: str, tmp_path: Path) -> None:
    """The site goes on from before it, but for what a chain may keep: as in the simulator, to the bit."""

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, letter: Message, reply: Message) -> list[Message] | None:
            return None if site == "bea" and train(site, letter) in (1, 2) else [reply]

        grid.fault = fault

    # A site is not asked while a letter of its own may yet be answered: here it is lost for good, and known.
    terms = RoundTerms(sites=4, timeout=0.1)
    found, _ = run(tmp_path, prepare, terms=terms, method=made(name, "softmax"))
    missed = [m["round"] - 1 for m in found.history if "bea" in m["left_out"]]
    assert missed == [1, 2]
    simulated = with_lost(lambda k, site: site == "bea" and k in missed, name=name)
    same_bits(found.published, simulated.published)
    assert found.history[missed[0]]["reasons"] == {"bea": "it did not answer in time"}


def test_a_late_reply_is_dropped_and_counted(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        grid.delay = lambda site, letter: 45.0 if site == "bea" and train(site, letter) == 1 else 0.0

        def fault(site: str, letter: Message, reply: Message) -> list[Message]:
            grid.now += 3  # sites need their time
            return [reply]

        grid.fault = fault

    found, grid = run(tmp_path, prepare, rounds=6)
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
        grid.delay = lambda site, letter: 20.0 if site == "dag" and train(site, letter) is not None else 0.0

    found, grid = run(tmp_path, prepare, terms=RoundTerms(sites=4, quorum=0.75, timeout=1000.0))
    assert "dag" not in found.history[0]["heard"]
    assert len(found.history[0]["heard"]) == 3
    assert grid.now < 200  # nobody waited for the timeout


def test_a_doubled_reply_counts_once(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        grid.fault = lambda site, letter, reply: [reply, reply]

    found, _ = run(tmp_path, prepare)
    same_bits(found.published, here(made("FedSOUL", "softmax"), four("softmax"), rounds=5).published)


def spoiled(reply: Message, how: str) -> Message:
    """A reply as something between the site and the server may have changed it."""
    old = reply_from_record(reply.content)
    record = reply_to_record(old)
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
        record = reply_to_record(Reply(old.about, dict(list(old.payloads.items())[1:])))
    elif how == "longer":
        short = dict(old.payloads)
        p = short[first]
        short[first] = type(p)(p.codec, p.length + 1, p.data + p.data[:8])
        record = reply_to_record(Reply(old.about, short))
    elif how == "not finite":
        nan = torch.full((old.payloads[first].length,), math.nan, dtype=torch.float64)
        p = old.payloads[first]
        own = dict(old.payloads) | {
            first: type(p)(p.codec, p.length, sealed(0, p.length, bytes([8]), nan.numpy().tobytes()))
        }
        record = reply_to_record(Reply(old.about, own))
    else:
        changes = {"another round": {"round": 99}, "another theta": {"digest": "x"}}
        changes |= {"another version": {"version": "0.0.0"}, "units below zero": {"units": -2}}
        record = reply_to_record(Reply(dict(old.about) | changes[how], old.payloads))
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
        "another version",
        "units below zero",
    ],
)
def test_a_spoiled_reply_is_left_out_and_named(how: str, tmp_path: Path) -> None:
    """And the rest of the run is that in which it was lost."""

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, letter: Message, reply: Message) -> list[Message]:
            return [spoiled(reply, how) if site == "cem" and train(site, letter) == 1 else reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare)
    assert [m["left_out"] for m in found.history] == [[], ["cem"], [], [], []]
    assert set(found.history[1]["reasons"]) == {"cem"}
    same_bits(found.published, with_lost(lambda k, site: k == 1 and site == "cem").published)


# --- at a site -----------------------------------------------------------------------------------


def test_what_goes_wrong_at_a_site_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hears what kind of error it was, never its words, which may hold data."""
    work = at_site.site_round

    def failing(sites: Sites, method: Any, round: Any, name: str, *more: Any) -> Any:
        if name == "bea" and round.number == 2:
            raise RuntimeError("row 17 of patient Jane Doe is odd")
        return work(sites, method, round, name, *more)

    monkeypatch.setattr(at_site, "site_round", failing)
    found, grid = run(tmp_path, lambda grid: None)
    assert found.history[2]["reasons"] == {"bea": "RuntimeError; the site's log says more"}
    sent = json.dumps([str(m.content.config_records) for _, _, m in grid.traffic])
    assert "Jane" not in sent
    same_bits(found.published, with_lost_at_site("bea", 2).published)


def with_lost_at_site(name: str, round: int) -> fp.Population:
    """A run in which a site is not there in one round: it did not work, so its chain did not move."""
    rounds = [[i for i, n in enumerate(four("softmax")) if k != round or n != name] for k in range(5)]
    data = four("softmax")

    class Listed(fp.participation.Everyone):
        def draw(self, roster: Any, key: Any) -> Any:
            ids = torch.tensor(rounds[key.round])
            return Active(ids, torch.ones(len(ids)), ratio=True)

    federation = fp.Federation.of(data)
    method = made("FedSOUL", "softmax").prepared(federation.example)
    settings = Settings(5, 0, Listed(), sites={n: [n] for n in data})
    return Run(method, method.model.checked(federation), settings).execute(resume=False, progress=False)


def test_a_full_disk_is_a_refusal_and_leaves_the_chain_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"now": False}

    def writing(path: Path, tensors: Any) -> str:
        if full["now"] and "bea" in path.parts:
            raise OSError(28, "No space left on device")
        return write_tensors(path, tensors)

    monkeypatch.setattr(memories, "write_tensors", writing)

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, letter: Message, reply: Message) -> list[Message]:
            full["now"] = train(site, letter) == 1  # the sites after it in this round, until the next
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare, rounds=4)
    assert "No space left" in found.history[1]["reasons"]["bea"]
    assert found.history[3]["reasons"] == {}
    chain = tmp_path / "bea" / "experiments" / "test" / "chain.safetensors"
    assert memories.Memory.read(chain, 1).round == 3
    assert not list(chain.parent.glob("*.tmp"))


def test_a_wiped_disk_is_a_stateless_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, letter: Message, reply: Message) -> list[Message]:
            if site == "bea" and train(site, letter) == 1:
                (tmp_path / "bea" / "experiments" / "test" / "chain.safetensors").unlink()
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare)
    assert all(m["left_out"] == [] for m in found.history)
    assert any("stateless start" in r.message for r in caplog.records)


def test_a_wiped_folder_is_greeted_again(tmp_path: Path) -> None:
    """Without the method that it was told of a site cannot work; it is told of it anew."""

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, letter: Message, reply: Message) -> list[Message]:
            if site == "bea" and train(site, letter) == 1:
                for file in (tmp_path / "bea" / "experiments" / "test").iterdir():
                    file.unlink()
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare)
    assert [m["left_out"] for m in found.history] == [[], [], ["bea"], [], []]


# --- the same round twice --------------------------------------------------------------------------


def letters_to(grid: LocalGrid, site: str) -> list[Letter]:
    return [letter_from_record(m.content) for s, m, _ in grid.traffic if s == site]


def test_a_repeated_round_gives_the_same_reply_and_another_theta_starts_from_before(tmp_path: Path) -> None:
    _, grid = across(made("FedSOUL", "softmax"), four("softmax"), tmp_path, rounds=3)
    last = [x for x in letters_to(grid, "ada") if x.kind == "train"][-1]
    site = open_site(tmp_path / "ada")
    chain = tmp_path / "ada" / "experiments" / "test" / "chain.safetensors"
    held = chain.read_bytes()
    again = site.answer(last)
    assert (
        again.payloads
        == [reply_from_record(r.content) for s, m, r in grid.traffic if s == "ada"][-2].payloads
    )
    assert chain.read_bytes() == held
    moved = {n: t + 0.25 if t.is_floating_point() else t for n, t in last.tensors.items()}
    other = Letter("train", dict(last.about) | {"digest": digest_of(moved)}, moved)
    first = site.answer(other)
    assert first.payloads != again.payloads
    assert site.answer(last).payloads == again.payloads  # from before the round, whatever came in between
    assert site.answer(other).payloads == first.payloads


def test_theta_that_did_not_arrive_as_sent_is_refused(tmp_path: Path) -> None:
    _, grid = across(made("FedSOUL", "softmax"), four("softmax"), tmp_path, rounds=1)
    last = [x for x in letters_to(grid, "ada") if x.kind == "train"][-1]
    bent = {n: t + 1 if t.is_floating_point() else t for n, t in last.tensors.items()}
    assert open_site(tmp_path / "ada").answer(Letter("train", last.about, bent)).refused is not None


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "", "A"])
def test_an_experiment_cannot_leave_its_folder(name: str, tmp_path: Path) -> None:
    _, grid = across(made("FedAvg", "softmax"), four("softmax"), tmp_path, rounds=1)
    for letter in letters_to(grid, "ada")[1:]:
        other = Letter(letter.kind, dict(letter.about) | {"experiment": name}, letter.tensors)
        assert "no dot first" in str(open_site(tmp_path / "ada").answer(other).refused)


def test_a_server_of_another_version_is_refused(tmp_path: Path) -> None:
    _, grid = across(made("FedAvg", "softmax"), four("softmax"), tmp_path, rounds=1)
    for letter in letters_to(grid, "ada"):
        other = Letter(letter.kind, dict(letter.about) | {"version": "0.0.0"}, letter.tensors)
        said = open_site(tmp_path / "ada").answer(other).refused
        assert said is not None
        assert said.endswith("the server 0.0.0")


# --- who is there ----------------------------------------------------------------------------------


def test_a_dead_site_is_not_picked_and_a_new_one_takes_part(tmp_path: Path) -> None:
    data = four("softmax")

    def prepare(grid: LocalGrid) -> None:
        newcomer = enrol(tmp_path / "new", {"eva": data["ada"]})

        def fault(site: str, letter: Message, reply: Message) -> list[Message]:
            if train(site, letter) == 1 and site == "dag":
                grid.offline.add("bea")
            if train(site, letter) == 3 and site == "dag":
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


def test_weights_from_observed_participation(tmp_path: Path) -> None:
    """A site that was heard in one round of two counts twice, in the limit."""
    grid = LocalGrid(app, enrol(tmp_path, four("softmax")))
    terms = RoundTerms(sites=4, weights="observed")
    members, _ = enrolled(deployment(made("FedSOUL", "softmax"), 3, terms=terms), post_on(grid))
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


def test_sites_that_differ_in_form_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = four("softmax")
    data["bea"] = (data["bea"][0][:, :2], data["bea"][1])
    grid = LocalGrid(app, enrol(tmp_path, data))
    caplog.set_level("INFO", "fedpop.server")
    with pytest.raises(SettingsError, match=r"of 1 unit\(s\) \[\[2\]\], of 3 unit\(s\) \[\[3\]\]"):
        conduct(deployment(made("FedSOUL", "softmax"), 2, terms=TERMS), post_on(grid))
    assert 'bea, example: {"names": null, "shapes": [[2]]' in caplog.text


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

        def fault(site: str, letter: Message, reply: Message) -> list[Message]:
            if train(site, letter) == 1 and site == "dag":
                grid.offline.add("bea")
            return [reply]

        grid.fault = fault

    found, _ = run(tmp_path, prepare, method=made("DGLMC", "softmax"))
    assert all(len(m["heard"]) == 4 for m in found.history)
    assert any("waiting for bea" in r.message for r in caplog.records)


def test_a_question_that_needs_everyone_names_who_is_missing(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, letter: Message, reply: Message) -> list[Message] | None:
            told = letter_from_record(letter.content)
            asks = told.kind == "ask" and told.about["question"] == "curvature"
            return None if asks and site == "cem" else [reply]

        grid.fault = fault

    with pytest.raises(EstimateError, match="cem: it did not answer in time"):
        run(tmp_path, prepare, method=made("DGLMC", "softmax"))


# --- a server that is killed -----------------------------------------------------------------------


class Killed(BaseException):
    """Nothing may catch it."""


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD", "FSGLD"])
@pytest.mark.parametrize("when", ["between", "in a round", "before the first"])
def test_a_killed_server_goes_on_to_the_same_theta(name: str, when: str, tmp_path: Path) -> None:
    """Killed as the last letter of a round is under way, or its first: sites have worked, nobody heard."""
    data = four("softmax")
    method = made(name, "softmax")
    grid = LocalGrid(app, enrol(tmp_path, data))
    at = {"between": 3, "in a round": 3, "before the first": 0}[when]

    def fault(site: str, letter: Message, reply: Message) -> list[Message]:
        if train(site, letter) == at and (when == "between" or site == "cem" or name == "FSGLD"):
            raise Killed
        return [reply]

    grid.fault = fault
    told = deployment(method, 6, terms=TERMS)
    with pytest.raises(Killed):
        conduct(told, post_on(grid), tmp_path / "run")
    grid.fault = None
    found = conduct(told, post_on(grid), tmp_path / "run")
    same_bits(found.published, here(method, data, rounds=6).published)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]


# --- Flower's simulation ------------------------------------------------------------------------------


def test_nodes_that_have_numbers_stand_for_sites(tmp_path: Path) -> None:
    """In a simulation of Flower's a node has a number in the place of a folder."""
    data = four("softmax")
    enrol(tmp_path / "sites", data)
    grid = LocalGrid(app, dict.fromkeys(data, ""))
    for k, context in enumerate(grid.nodes.values()):
        context.node_config = {"partition-id": k, "num-partitions": len(data)}
        context.run_config = {"sites": str(tmp_path / "sites")}
    found = conduct(deployment(made("FedAvg", "softmax"), 2, terms=TERMS), post_on(grid))
    same_bits(found.published, here(made("FedAvg", "softmax"), data, rounds=2).published)


# --- records ---------------------------------------------------------------------------------------


def test_letters_and_replies_survive_their_records() -> None:
    tensors = {"a": torch.randn(2, 3, dtype=torch.float64), "b": torch.tensor(3), "c": torch.zeros(0)}
    letter = Letter("train", {"round": 1, "nested": {"x": [1, None]}}, tensors)
    again = letter_from_record(letter_to_record(letter))
    assert again.about == letter.about
    for n, t in tensors.items():
        assert torch.equal(again.tensors[n], t)
        assert again.tensors[n].dtype == t.dtype
