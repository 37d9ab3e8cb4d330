"""Sites that join a run that has begun: what they are checked against, asked, and start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import nn

import fedpop as fp
from fedpop.federation.participation import Active
from fedpop.files import read_tensors
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.requests import Request
from fedpop.flower.site_state import SiteState
from fedpop.keys import Key, units_of
from fedpop.methods.base import usual_participation
from fedpop.run.run import Run, Settings
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, same_bits, transport_on
from tests.methods.conformance import four, made

CPU = torch.device("cpu")
LATE = 2
"""The round before which the last one joins."""


class Joining:
    """A run of four sites whose last one is there from round ``LATE`` on."""

    def __init__(self, root: Path, data: dict[str, Any]) -> None:
        folders = enrol(root, data)
        self.last = list(data)[-1]
        self.grid = LocalGrid(app, {n: f for n, f in folders.items() if n != self.last})
        self.state: list[dict[str, torch.Tensor]] = []

        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            incoming = request_from_record(request.content)
            if (
                incoming.kind == "train"
                and incoming.header["round"] == LATE - 1
                and len(self.grid.nodes) < len(data)
            ):
                self.grid.join(self.last, folders[self.last])
            return [reply]

        self.grid.fault = fault

    def requests(self, kind: str) -> list[Request]:
        """Those that went to the one that joined."""
        every = [request_from_record(m.content) for s, m, _ in self.grid.traffic if s == self.last]
        return [request for request in every if request.kind == kind]


def from_round(first: int, everyone: int) -> fp.participation.Participation:
    """In simulation: the last client takes part from this round on, and sums are plain."""

    class Later(fp.participation.Everyone):
        def draw(self, roster: Any, key: Key) -> Active:
            ids = torch.arange(everyone if key.round >= first else everyone - 1)
            return Active(ids, torch.ones(len(ids)), ratio=False)

    return Later()


@pytest.mark.parametrize("name", ["FedAvg", "Ditto", "FedRep"])
def test_a_newcomer_starts_as_a_client_that_enters_late(name: str, tmp_path: Path) -> None:
    """Theta and the newcomer's state, to the bit."""
    data, method = four("softmax"), made(name, "softmax")
    joining = Joining(tmp_path, data)
    rule = fp.participation.Bernoulli(1.0, weights="inverse")
    terms = RoundTerms(sites=3)
    found = run_deployment(deployment(method, 5, rule=rule, terms=terms), transport_on(joining.grid))
    assert [len(m["heard"]) for m in found.history] == [3, 3, 4, 4, 4]
    federation = fp.Federation.of(data)
    method = method.prepared(federation.example)
    settings = Settings(5, 0, from_round(LATE, 4), sites={n: [n] for n in data})
    simulated = Run(method, method.model.checked(federation), settings).execute(resume=False, progress=False)
    same_bits(found.published, simulated.published)
    stored = SiteState.read(tmp_path / joining.last / "experiments" / "test" / "chain.safetensors")
    assert simulated.store is not None
    same_bits(stored.after.get(torch.tensor([0]), CPU), simulated.store.get(torch.tensor([3]), CPU))


def test_the_chain_of_a_newcomer_starts_at_the_theta_of_its_round(tmp_path: Path) -> None:
    data, method = four("softmax"), made("FedSOUL", "softmax")
    joining = Joining(tmp_path, data)
    run_deployment(deployment(method, LATE + 1, terms=RoundTerms(sites=3)), transport_on(joining.grid))
    (request,) = joining.requests("train")
    assert request.header["round"] == LATE
    stored = SiteState.read(tmp_path / joining.last / "experiments" / "test" / "chain.safetensors")
    units = units_of([joining.last])
    entered = method.prepared(fp.Federation.of(data).example).enter(
        units, request.tensors, Key(0, LATE, "site/train")
    )
    same_bits(stored.before.get(torch.tensor([0]), CPU), entered)


LASTING: dict[str, Callable[[], Any]] = {
    "DG-LMC": lambda: made("DGLMC", "softmax"),
    "QLSD*": lambda: fp.QLSD(made("QLSD", "softmax").model, variant="star"),
    "FSGLD": lambda: made("FSGLD", "softmax"),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_newcomer_is_asked_what_lasts_of_the_questions(name: str, tmp_path: Path) -> None:
    """Once; and what the server made of the answers is that of everyone, as if all had been there."""
    data, method = four("softmax"), LASTING[name]()
    joining, run = Joining(tmp_path / "sites", data), tmp_path / "run"
    planned = deployment(method, LATE + 2, terms=RoundTerms(sites=3))
    found = run_deployment(planned, transport_on(joining.grid), run)
    federation = fp.Federation.of(data)
    prepared = method.prepared(federation.example)
    settings = Settings(LATE + 2, 0, usual_participation(method), sites={n: [n] for n in data})
    whole = Run(prepared, prepared.model.checked(federation), settings)
    whole.begin()
    questions = [q.name for q in prepared.questions(whole.facts, whole.key) if q.lasting]
    assert questions
    assert [x.header["question"] for x in joining.requests("ask")] == questions
    assert found.learned_from == 4
    saved = sorted((run / "checkpoints").glob("*.safetensors"))[-1]
    server = read_tensors(saved)
    for part in ("gamma", "reference", "precision", "shift", "clients"):
        if part in whole.server:
            torch.testing.assert_close(server[f"server.{part}"], whole.server[part], rtol=1e-5, atol=1e-6)
    # It goes on as well from a checkpoint: nobody is asked twice.
    count = len(joining.requests("ask"))
    longer = deployment(method, LATE + 4, terms=RoundTerms(sites=3))
    run_deployment(longer, transport_on(joining.grid), run)
    assert len(joining.requests("ask")) == count


def test_a_newcomer_that_does_not_answer_waits_outside(tmp_path: Path) -> None:
    """It is asked again when a round's time is over; nobody is kept from working."""
    data = four("softmax")
    joining = Joining(tmp_path, data)
    inner = joining.grid.fault
    assert inner is not None

    def fault(site: str, request: Message, reply: Message) -> list[Message] | None:
        joining.grid.now += 1
        incoming = request_from_record(request.content)
        asked = incoming.kind == "ask" and site == joining.last
        return None if asked and len(joining.requests("ask")) < 2 else inner(site, request, reply)

    joining.grid.fault = fault
    method = fp.QLSD(made("QLSD", "softmax").model, variant="star", step=1e-3)
    found = run_deployment(
        deployment(method, 8, terms=RoundTerms(sites=3, timeout=5.0)), transport_on(joining.grid)
    )
    heard = [joining.last in m["heard"] for m in found.history]
    assert heard[: LATE + 1] == [False] * (LATE + 1)
    assert heard[-1]
    assert [m["active"] for m in found.history] == [4 if h else 3 for h in heard]


def rows(levels: str, n: int = 12) -> str:
    table = [(30 + i, levels[i % len(levels)], 0.1 * i + (i % 2)) for i in range(n)]
    return "age,sex,dose\n" + "".join(f"{a},{s},{d:.3f}\n" for a, s, d in table)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (rows("fmx"), "column 'sex', line 4 and 3 more: a level that is not one of f, m"),
        (rows("fm").replace("dose", "amount"), "has no column 'dose'"),
        ("age,sex,dose\n", "has no rows"),
    ],
    ids=["a level that nobody had", "another column", "no rows"],
)
def test_a_newcomer_is_held_to_what_was_agreed_on(
    text: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log has its name and the column, the others go on, and once mended it takes part."""
    folders = {}
    for name in ("east", "north", "south"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rows.csv").write_text(text if name == "south" else rows("fm"))
        (folder / "site.toml").write_text(f'name = "{name}"\ndata = "rows.csv"\n')
        (folder / "secret").write_text("1\n")
        folders[name] = folder
    grid = LocalGrid(app, {n: folders[n] for n in ("east", "north")})

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        incoming = request_from_record(request.content)
        grid.now += 10
        if incoming.kind == "train" and site == "north":
            if incoming.header["round"] == 0:
                grid.join("south", folders["south"])
            if incoming.header["round"] == 3:
                (folders["south"] / "rows.csv").write_text(rows("fm"))
        return [reply]

    grid.fault = fault
    schema = {"x": ["age", "sex"], "y": "dose", "categories": ["sex"]}
    model = fp.Composition(None, nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    incoming = deployment(fp.FedAvg(model), 9, terms=RoundTerms(sites=2), schema=schema)
    found = run_deployment(incoming, transport_on(grid, greeting=30.0))
    output = [r.getMessage() for r in caplog.records if "cannot take part" in r.getMessage()]
    assert output
    assert all("site 'south'" in line and words in line for line in output)
    heard = ["south" in m["heard"] for m in found.history]
    assert not any(heard[:4])
    assert heard[-1]
    replies = [message_from_record(r.content) for s, _, r in grid.traffic if s == "south"]
    assert replies[0].refused is not None


def test_a_newcomer_for_whom_there_is_no_setting_stays_outside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = four("softmax")
    joining = Joining(tmp_path, data)
    names = list(data)[:3]
    method = made("FedSOUL", "softmax", compressor=dict.fromkeys(names, "qsgd"))
    found = run_deployment(deployment(method, 4, terms=RoundTerms(sites=3)), transport_on(joining.grid))
    assert all(m["heard"] == names for m in found.history)
    assert f"{joining.last} cannot take part: compressor: no value for client" in caplog.text


def test_a_run_that_somebody_joined_goes_on(tmp_path: Path) -> None:
    """After a restart at which not everyone is there at once."""
    data, method = four("softmax"), made("FedAvg", "softmax")
    joining = Joining(tmp_path / "sites", data)
    run_deployment(
        deployment(method, 3, terms=RoundTerms(sites=3)), transport_on(joining.grid), tmp_path / "run"
    )
    joining.grid.offline.add("ada")
    found = run_deployment(
        deployment(method, 5, terms=RoundTerms(sites=3)), transport_on(joining.grid), tmp_path / "run"
    )
    assert [len(m["heard"]) for m in found.history] == [3, 3, 4, 3, 3]
