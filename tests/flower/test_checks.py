"""``fedpop server check`` and ``fedpop site check``: what can be known before anybody is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from fedpop.flower.site import open_site
from tests.flower.commands import Made, fedpop, refused
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import transport_on

MODEL = """
import torch, fedpop as fp
def model(inputs):
    return fp.Composition(None, torch.nn.Linear(inputs, 1), fp.likelihoods.Normal())
"""


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def settings(made: Made, *changes: tuple[str, str]) -> None:
    file = made.server / "app" / "federation.toml"
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def test_the_servers_settings_are_told(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    settings(made, ("minimum = 2", 'minimum = 2\nrange = {age = [0, 120]}\nunit = {age = "years"}'))
    capsys.readouterr()
    fedpop("server", "check", made.server)
    output = capsys.readouterr().out
    for words in (
        "clinics: the settings can be used",
        "column age: numbers in years from 0 to 120",
        "column sex: names that sites agree on",
        "method FedSOUL, which runs as MaximumMarginalLikelihood",
        "3 rounds, each of 2 site(s) at least",
        "admitted: north, south",
    ):
        assert words in output
    assert not list((made.server / "run").glob("agreed*"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "FedSOUL"', 'name = "FedAvg"\nlocal = {rate = -0.1}', "rate"),
        ('name = "FedSOUL"', 'name = "FedSOUL"\nrates = 3', "unknown setting 'rates'"),
        ('name = "FedSOUL"', 'name = "FedSOUL"\nkernel = {kind = "Walk"}', "unknown kind 'Walk'"),
        ('name = "FedSOUL"', 'name = "FedAvg"\ncompressor = {north = "qsgd"}', "south"),
        ("rounds = 3", "rounds = 3\nparticipation = {north = 0.5}", "south"),
        ('y = "dose"', 'y = "dose"\nrange = {sex = [0, 1]}', "not a column of numbers"),
        ("sites = 2", "sites = 2\ngrace = -1.0", "grace"),
        ("sites = 2", "sites = 2\nunheard = 0", "unheard"),
    ],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_wrong_settings_are_refused_before_anybody_is_asked(
    old: str, new: str, words: str, command: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(made, (old, new))
    assert words in refused(capsys, "server", command, made.server)
    assert not (made.server / "flower" / "superlink.db").exists()


def test_a_model_that_does_not_fit_is_refused(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Where levels are given it is known how many inputs there are."""
    settings(made, ('categories = ["sex"]', 'levels = {sex = ["f", "m", "x"]}'))
    file = made.server / "app" / "model.py"
    file.write_text(MODEL.replace("nn.Linear(inputs, 1)", "nn.Linear(7, 1)"))
    assert "the model does not accept examples of shape [(3,)]" in refused(
        capsys, "server", "check", made.server
    )


def test_a_model_that_cannot_be_imported_is_refused(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (made.server / "app" / "model.py").write_text("import nowhere_to_be_found\n")
    assert "nowhere_to_be_found" in refused(capsys, "server", "check", made.server)


def sent(made: Made) -> set[tuple[str, tuple[tuple[str, int], ...]]]:
    """What the first site really sends in a run, questions and rounds."""
    grid = LocalGrid(app, {name: made.root / name for name in ("north", "south")})
    run_deployment(deployment(ServerFolder(made.server)), transport_on(grid), made.server / "run")
    out = set()
    for site, request, reply in grid.traffic:
        read, message = request_from_record(request.content), message_from_record(reply.content)
        if site == "north" and message.payloads:
            what = str(read.header.get("question") or read.kind)
            out.add((what, tuple((n, p.length) for n, p in sorted(message.payloads.items()))))
    return out


@pytest.mark.parametrize("method", ["FedSOUL", 'FedSOUL"\nengine = "sampled', "SCAFFOLD"])
def test_what_would_be_sent_is_what_is_sent(
    method: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """Name by name and length by length, before the site has heard of the server, and after."""
    settings(made, ('name = "FedSOUL"', f'name = "{method}"'), ("rounds = 3", "rounds = 3\nafterwards = []"))
    capsys.readouterr()
    fedpop("site", "check", made.root / "north", "--federation", made.server / "app")
    before = capsys.readouterr().out
    found = sent(made)
    fedpop("site", "check", made.root / "north")
    after = capsys.readouterr().out
    assert "the data fit" in before
    assert "12 row(s)" in before
    assert "of 3 rounds, of 12 row(s): " in before
    for what, vectors in found:
        line = f"{sum(k for _, k in vectors)} number(s) ({', '.join(f'{n} {k}' for n, k in vectors)})"
        assert line in before
        assert line in after or what in ("column scales", "schema", "standardisation")
        assert what == "train" or f"{what}: " in before


def test_bad_cells_are_shown_to_their_owner(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (made.root / "north.csv").write_text("age,sex,dose\nold,f,1\n30,,2\nold,m,\nolder,m,1\n")
    words = refused(capsys, "site", "check", made.root / "north", "--federation", made.server / "app")
    assert "column 'age', line 2 and 2 more" in words
    assert "older" not in words
    capsys.readouterr()
    with pytest.raises(SystemExit):
        fedpop("site", "check", made.root / "north", "--federation", made.server / "app" / "federation.toml")
    output = capsys.readouterr().out
    assert "column 'age', line 2 and 2 more: something that is no number is there ('old', 'older')" in output
    assert "column 'sex', line 3: nothing is there" in output


def test_a_site_that_was_not_greeted_is_told_what_is_missing(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    fedpop("site", "check", made.root / "north")
    assert "--federation PATH" in capsys.readouterr().out
    assert "cannot read" in refused(capsys, "site", "check", made.root / "north", "--federation", "gone.toml")


def test_few_rows_are_named(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """The site's settings refuse products of a few rows, and the check says of which question."""
    file = made.root / "north" / "site.toml"
    file.write_text(file.read_text() + "spectral_rows = 13\n")
    assert open_site(made.root / "north").spectral_rows == 13
    capsys.readouterr()
    fedpop("site", "check", made.root / "north", "--federation", made.server / "app")
    assert "(refused with fewer than 13 rows)" in capsys.readouterr().out
