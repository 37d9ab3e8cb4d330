"""A node that goes away, a server that begins anew, a table in another order, a folder that was moved: what
outlives them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message
from torch import nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.flower import processes, site_commands
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.processes import free_port, require_free
from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.site import open_site
from fedpop.flower.transport import NODE_GONE
from fedpop.site.study import Survey
from tests.flower.commands import Made, fedpop, refused
from tests.flower.faulty import TERMS, train
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, here, same_bits, transport_on
from tests.methods.conformance import four, made


def gone_once(grid: LocalGrid, name: str, at: int, kind: str = "train") -> list[str]:
    """A node that dies on its way from a request to the reply: Flower tells that it is unavailable."""
    met: list[str] = []

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        incoming = request_from_record(request.content)
        if site == name and incoming.kind == kind and not met and incoming.header.get("round", at) == at:
            met.append(site)
            return [Message(Error(code=NODE_GONE, reason="gone"), reply_to=request)]
        return [reply]

    grid.fault = fault
    return met


@pytest.mark.parametrize("name", ["DGLMC", "L2GD"])
def test_who_needs_everyone_waits_for_a_node_that_comes_back(name: str, tmp_path: Path) -> None:
    """It had worked and nobody had heard: asked again, it gives the same reply."""
    data, method = four("softmax"), made(name, "softmax")
    grid = LocalGrid(app, enrol(tmp_path, data))
    met = gone_once(grid, "cem", 1)
    found = run_deployment(deployment(method, 3, terms=TERMS), transport_on(grid))
    assert met
    assert [line["reasons"] for line in found.history] == [{}, {}, {}]
    same_bits(found.published, here(method, data, rounds=3).published)


def test_a_question_to_everyone_waits_for_it_too(tmp_path: Path) -> None:
    data, method = four("softmax"), made("DGLMC", "softmax")
    grid = LocalGrid(app, enrol(tmp_path, data))
    met = gone_once(grid, "bea", -1, kind="ask")
    found = run_deployment(deployment(method, 2, terms=TERMS), transport_on(grid))
    assert met
    same_bits(found.published, here(method, data, rounds=2).published)


def test_early_stopping_does_without_a_site_that_is_away(tmp_path: Path) -> None:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    y = x @ torch.tensor([1.0, -1.0])
    data = {
        n: fp.Client(x + k, y + k, validation=(x[:4], y[:4])) for k, n in enumerate(("ada", "bea", "cem"))
    }
    grid = LocalGrid(app, enrol(tmp_path, data))

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        if train(site, request) == 2:
            grid.offline.add("cem")
        return [reply]

    grid.fault = fault
    model = fp.Composition(None, nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    stop = fp.callbacks.EarlyStop(every=1, patience=50)
    planned = deployment(fp.FedAvg(model), 6, terms=RoundTerms(sites=2), callbacks=[stop])
    found = run_deployment(planned, transport_on(grid), tmp_path / "run")
    assert [line["heard"] for line in found.history[3:]] == [["ada", "bea"]] * 3
    assert all("validation_log_likelihood" in line for line in found.history)


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD"])
def test_a_server_that_begins_anew_hears_the_same(name: str, tmp_path: Path) -> None:
    """As trial rounds do that were killed: the experiment is known at the site, no round of it counted."""
    data, method = four("softmax"), made(name, "softmax")
    grid = LocalGrid(app, enrol(tmp_path, data))
    first = run_deployment(deployment(method, 3, terms=TERMS), transport_on(grid))
    again = run_deployment(deployment(method, 3, terms=TERMS), transport_on(grid))
    same_bits(first.published, again.published)


def test_whom_the_settings_have_no_place_for_stays_outside_when_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = four("softmax")
    folders = enrol(tmp_path, data)
    enrolled = dict.fromkeys([n for n in data if n != "cem"], "qsgd")
    method = made("FedAvg", "softmax", compressor=enrolled)
    terms = RoundTerms(sites=3)
    few = {n: f for n, f in folders.items() if n != "cem"}
    run_deployment(deployment(method, 2, terms=terms), transport_on(LocalGrid(app, few)), tmp_path / "run")
    found = run_deployment(
        deployment(method, 4, terms=terms), transport_on(LocalGrid(app, folders)), tmp_path / "run"
    )
    assert "cem cannot take part" in caplog.text
    assert found.rounds == 4
    assert found.history[-1]["heard"] == sorted(enrolled)


def test_groups_in_another_order_do_not_swap_their_chains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    groups = {g: (x + k, x.sum(1) + 3 * k) for k, g in enumerate("ab")}
    folders = enrol(tmp_path, {"ada": groups, "bea": groups})
    model = fp.Composition(None, nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    method = fp.Ditto(model, local=fp.LocalSGD(rate=0.1))
    planned = deployment(method, 2, terms=RoundTerms(sites=2))
    run_deployment(planned, transport_on(LocalGrid(app, folders)), tmp_path / "run")
    enrol(tmp_path / "again", {"ada": dict(reversed(groups.items())), "bea": groups})
    with caplog.at_level(logging.WARNING):
        found = run_deployment(
            deployment(method, 4, terms=RoundTerms(sites=2)),
            transport_on(LocalGrid(app, folders)),
            tmp_path / "run",
        )
    assert found.rounds == 4
    assert "in another order: a stateless start" in (tmp_path / "ada" / "site.log").read_text() + caplog.text


# --- commands ------------------------------------------------------------------------------------


@pytest.fixture
def made_by_command(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_personalise_takes_the_data_and_the_theta_it_is_given(
    made_by_command: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    enrolled = made_by_command
    enrolled.run_deployment()
    theta, new = enrolled.server / "run" / "theta", enrolled.root / "new"
    wrong = enrolled.root / "wrong.csv"
    wrong.write_text("age,dose\n1,2\n")
    assert "sex" in refused(capsys, "site", "personalise", new, "--theta", theta, "--data", wrong)
    assert not new.exists()
    output = []
    for name in ("north", "south", "north"):
        arguments = (
            "--theta",
            theta,
            "--data",
            enrolled.root / f"{name}.csv",
            "--at",
            enrolled.root / "north.csv",
        )
        fedpop("site", "personalise", new, *arguments)
        output.append(capsys.readouterr().out.splitlines()[2])
    assert output[0] == output[2]
    assert output[0] != output[1]
    later = enrolled.root / "later"
    for file in theta.iterdir():
        later.mkdir(exist_ok=True)
        (later / file.name).write_bytes(file.read_bytes())
    from fedpop.files import read_tensors
    from fedpop.flower.site import THETA, keep_theta

    keep_theta(later, {n: 2 * t for n, t in read_tensors(later / THETA).items()})
    arguments = ("--theta", later, "--data", enrolled.root / "north.csv", "--at", enrolled.root / "north.csv")
    fedpop("site", "personalise", new, *arguments)
    assert capsys.readouterr().out.splitlines()[2] != output[0]


def test_data_given_to_join_are_kept_however_the_file_is_written(
    made_by_command: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrolled = made_by_command
    settings = enrolled.root / "north" / "site.toml"
    settings.write_text(settings.read_text().replace("data = ", "data="))
    monkeypatch.setattr(site_commands.certificates, "check_connection", lambda *_: True)
    monkeypatch.setattr(site_commands.certificates, "check_clock", lambda *_: None)

    def started(*_: Any) -> None:
        raise SettingsError("started")

    monkeypatch.setattr(site_commands, "Supervised", started)
    with pytest.raises(SettingsError, match="started"):
        site_commands.join(enrolled.root / "north", str(enrolled.root / "south.csv"), False, print)
    assert 'south.csv"' in settings.read_text()
    assert settings.read_text().count("data =") == 1


def test_a_function_beside_the_sites_settings(tmp_path: Path) -> None:
    """Found there; in a federation that agrees on columns it is refused in words."""
    folder = tmp_path / "ada"
    folder.mkdir()
    (folder / "ada_rows_of_mine.py").write_text(
        "import torch\ndef rows():\n    return torch.ones(12, 2), torch.ones(12)\n"
    )
    (folder / "site.toml").write_text('name = "ada"\ndata = "ada_rows_of_mine:rows"\n')
    (folder / "secret").write_text("1\n")
    site = open_site(folder)
    try:
        assert len(Survey().read(site.data)) == 1
        with pytest.raises(fp.DataError if hasattr(fp, "DataError") else ValueError, match="has a function"):
            Survey({"x": ["a"], "y": "b"}).read(site.data)
    finally:
        sys.path.remove(str(folder))


def test_the_server_listens_elsewhere_than_sites_reach_it(made_by_command: Made) -> None:
    enrolled = made_by_command
    file = enrolled.server / "app" / "federation.toml"
    text = file.read_text()
    assert ServerFolder(enrolled.server).nearby == enrolled.address
    for listen, nearby in (("0.0.0.0:8000", "127.0.0.1:8000"), ("[::]:8000", "[::1]:8000"), ("h:1", "h:1")):
        file.write_text(text + f'listen = "{listen}"\n')
        folder = ServerFolder(enrolled.server)
        assert (folder.address, folder.listen, folder.nearby) == (enrolled.address, listen, nearby)
    with pytest.raises(SettingsError, match="not an address of this machine"):
        require_free("192.0.2.7", free_port())
    require_free("127.0.0.1", free_port())


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": 3}'])
def test_a_version_that_is_none(made_by_command: Made, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (made_by_command.server / "version.json").write_text(text)
    assert "was made by fedpop" in refused(capsys, "server", "status", made_by_command.server)


def test_a_version_of_flower_that_was_not_tested(
    made_by_command: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line at the start, also where a module of the version that was tested has moved."""
    north = made_by_command.root / "north"
    monkeypatch.setattr(processes, "MODULES", (*processes.MODULES, "supernode/elsewhere"))
    for command in (("server", "run", made_by_command.server), ("site", "join", north)):
        output = refused(capsys, *command)
        assert "there is no flwr/supernode/elsewhere.py" in output
        assert len(output.strip().splitlines()) == 1
    monkeypatch.undo()
    monkeypatch.setattr(processes.importlib.metadata, "version", lambda name: "1.99.0")
    assert "flwr 1.99.0 is installed, and fedpop" in refused(capsys, "site", "join", north)
