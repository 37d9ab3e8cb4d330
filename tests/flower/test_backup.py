"""A server's or a site's folder put back from a copy; a run that another version began."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from flwr.app import Message

from fedpop.errors import CheckpointError
from fedpop.files import read_json, write_json
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from tests.flower.commands import Made
from tests.flower.faulty import TERMS, train
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, here, same_bits, transport_on
from tests.methods.conformance import four, made


class Stopped(BaseException):
    """Somebody stopped the server."""


def copied_at_three(root: Path, name: str = "FedSOUL") -> LocalGrid:
    """A run of which everything was copied once it was stopped in its third round, and that then went on for
    two rounds more."""
    grid = LocalGrid(app, enrol(root / "sites", four("softmax")))
    planned = deployment(made(name, "softmax"), 4, terms=TERMS)

    def fault(site: str, request: Message, reply: Message) -> list[Message]:
        if train(site, request) == 2:
            raise Stopped
        return [reply]

    grid.fault = fault
    with pytest.raises(Stopped):
        run_deployment(planned, transport_on(grid), root / "run")
    shutil.copytree(root / "run", root / "copy" / "run")
    shutil.copytree(root / "sites", root / "copy" / "sites")
    grid.fault = None
    run_deployment(planned, transport_on(grid), root / "run")
    return grid


def put_back(root: Path, what: str) -> None:
    shutil.rmtree(root / what)
    shutil.copytree(root / "copy" / what, root / what)


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD"])
def test_both_sides_put_back_go_on_to_the_same_theta(name: str, tmp_path: Path) -> None:
    grid = copied_at_three(tmp_path, name)
    put_back(tmp_path, "run")
    put_back(tmp_path, "sites")
    found = run_deployment(
        deployment(made(name, "softmax"), 4, terms=TERMS), transport_on(grid), tmp_path / "run"
    )
    same_bits(found.published, here(made(name, "softmax"), four("softmax"), rounds=4).published)


@pytest.mark.parametrize("what", ["run", "sites", "sites/bea"])
def test_one_side_put_back_goes_on(what: str, tmp_path: Path) -> None:
    """A server goes back some rounds, or a site's chains do: everyone takes part, and nothing is refused."""
    grid = copied_at_three(tmp_path)
    put_back(tmp_path, what)
    planned = deployment(made("FedSOUL", "softmax"), 6, terms=TERMS)
    found = run_deployment(planned, transport_on(grid), tmp_path / "run")
    assert [m["round"] for m in found.history] == [1, 2, 3, 4, 5, 6]
    assert all(len(m["heard"]) == 4 and not m["left_out"] for m in found.history)


def test_a_federation_of_another_patch_version_goes_on(tmp_path: Path) -> None:
    """A folder that an earlier version made and a run that it began, at a server and at its sites."""
    enrolled = Made(tmp_path, rounds=2)
    first = enrolled.run_deployment()
    write_json(enrolled.server / "version.json", {"version": "0.1.9"})
    for path in (enrolled.server / "run" / "checkpoints").glob("round-*.json"):
        assert "version" in read_json(path)
    settings = enrolled.server / "app" / "federation.toml"
    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = 3"))
    found = enrolled.run_deployment()
    assert (first.rounds, found.rounds) == (2, 3)


def test_a_checkpoint_of_another_layout_says_what_to_do(tmp_path: Path) -> None:
    enrolled = Made(tmp_path, rounds=1)
    enrolled.run_deployment()
    from fedpop.files import read_sealed, write_sealed

    for path in (enrolled.server / "run" / "checkpoints").glob("round-*.json"):
        plain = read_sealed(path, "a checkpoint")
        write_sealed(path, json.loads(json.dumps(plain)) | {"format": -1, "version": "0.0.9"})
    with (
        pytest.warns(UserWarning, match="checkpoint refused"),
        pytest.raises(CheckpointError, match=r"written by fedpop 0\.0\.9.*finish the run with that version"),
    ):
        enrolled.run_deployment()
