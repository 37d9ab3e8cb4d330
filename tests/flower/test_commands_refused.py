"""Bad input to the commands of a server and its sites: one line, and nothing half done."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedpop.errors import SettingsError
from fedpop.files import write_json
from fedpop.flower import certificates, site_commands
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from tests.flower.commands import Made, fedpop, refused, rows
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import transport_on


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_bad_folders_and_settings(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert "already" in refused(capsys, "server", "init", made.server)
    assert "is this a federation's folder?" in refused(capsys, "server", "run", made.root / "gone")
    assert "is this a site's folder?" in refused(capsys, "site", "join", made.root / "gone")
    assert "already" in refused(
        capsys, "site", "enrol", made.root / "north", "--name", "north", "--server", made.address,
        "--data", made.root / "north.csv", "--ca", made.server / "tls" / "ca.crt",
    )  # fmt: skip
    assert "host:port" in refused(capsys, "server", "init", made.root / "x", "--address", "nowhere")
    assert "no dot first" in refused(
        capsys, "server", "admit", made.server, "..", made.root / "north/node.pub"
    )
    file = made.server / "app" / "federation.toml"
    good = file.read_text()
    for bad, words in {
        "[data]\ncolour = 1": "unknown setting 'colour'",
        "[data]\nx = ['a']": "both x",
        "[method]\nname = 'FedX'": "unknown method 'FedX'",
        "[run]\nround = 3": "unknown setting 'round'",
        "[sites]\nquorum = 3.0": "quorum is a share",
        "[sites]\nquorum = 'all'": "quorum",
        "[sites]\nbegin = 0": "begin",
        "[sites]\ntimeout = -1.0": "timeout",
        "[run]\nrounds = 'ten'": "rounds",
        "[run]\nparticipation = 'some'": "participation",
        "[run]\nparticipation = {north = 2.0}": "p['north'] must be a number in (0, 1]",
        "[run]\nprecision = 'half'": "precision must be one of",
        "[run]\nearly_stop = {evry = 3}": "unknown setting 'evry'",
        "[run]\nearly_stop = 3": "early_stop is a table",
        "[run]\nafterwards = ['luck']": "afterwards is a list of",
        "run = 3": "run is a table",
        "[model]\nentry = 'model'": "entry is module:name",
        "[model]\nentry = 'nowhere_at_all:model'": "there is no module 'nowhere_at_all'",
        "[model]\nfile = 'model.py'": "unknown setting 'file'",
        "[server]\nport = 1": "unknown setting 'port'",
        "[server]\naddress = 'here'": "host:port",
        "[sites": "not readable TOML",
    }.items():
        file.write_text(bad)
        assert words in refused(capsys, "server", "run", made.server)
    file.write_text(good)
    (made.server / "app" / "model.py").write_text("def model(:\n")
    assert "is not Python" in refused(capsys, "server", "run", made.server)


def test_bad_settings_of_a_site(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    file = made.root / "north" / "site.toml"
    good = file.read_text()
    for bad, words in {
        "threads = 0": "threads",
        "memory = 'plenty'": "memory",
        "port = 99999": "port is below 65536",
        "colour = 1": "unknown setting 'colour'",
        "data = 3": "not readable TOML",  # twice
        "[": "not readable TOML",
    }.items():
        file.write_text(f"{good}{bad}\n")
        assert words in refused(capsys, "site", "join", made.root / "north")
    file.write_text("name = 3\ndata = 'rows.csv'\n")
    assert "name is a text, not 3" in refused(capsys, "site", "join", made.root / "north")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        file.write_text(f"{good}port = {other.getsockname()[1]}\n")
        assert "needs the federation's signature" in refused(
            capsys, "site", "join", made.root / "north", "--stock"
        )
        trusted = (made.server / "tls" / "federation.yaml").read_bytes()
        (made.root / "north" / "federation.yaml").write_bytes(trusted)
        assert "cannot be had" in refused(capsys, "site", "join", made.root / "north", "--stock")


@pytest.mark.parametrize("code", ["raise OSError('no')", "def model(n):\n    return 1 / 0", "model = 3"])
def test_a_model_whose_code_is_wrong(code: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the file and the error, not again and again."""
    (made.server / "app" / "broken_model.py").write_text(code)
    file = made.server / "app" / "federation.toml"
    file.write_text(file.read_text() + "[model]\nentry = 'broken_model:model'\n")
    monkeypatch.delitem(sys.modules, "broken_model", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SettingsError, match=r"federation\.toml: .*broken_model:model"):
        made.run_deployment()


def test_a_folder_from_another_version(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """One of a newer layout is refused, in words that say what to do; an older one's goes on."""
    write_json(made.server / "version.json", {"version": "9.9.0", "layout": 99})
    words = refused(capsys, "server", "run", made.server)
    assert "was made by fedpop 9.9.0 in layout 99" in words
    assert "install fedpop 9.9.0 or newer" in words
    write_json(made.server / "version.json", {"version": "0.1.0"})
    assert ServerFolder(made.server).settings["name"] == "clinics"


def test_a_port_in_use(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(made.address.split(":")[1])))
        other.listen()
        assert "cannot be had" in refused(capsys, "server", "run", made.server)
    assert not (made.server / "flower" / "superlink.db").exists()


def test_a_server_certificate_that_expired_or_is_of_tomorrow(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    now, tls = dt.datetime.now(dt.UTC), made.server / "tls"
    certificates.make_server_certificate(tls, ["127.0.0.1"], 1, now - dt.timedelta(days=9))
    assert "expired on" in refused(capsys, "server", "run", made.server)
    certificates.make_server_certificate(tls, ["127.0.0.1"], 9, now + dt.timedelta(days=2))
    assert "set the clock" in refused(capsys, "server", "run", made.server)
    fedpop("server", "certificate", made.server)
    certificates.check_server_certificate(tls)
    (tls / "server.key").write_text("nothing")
    assert "not a readable key" in refused(capsys, "server", "run", made.server)


@contextmanager
def listening(address: str, tls: Path | None, header: str = "Server: x") -> Iterator[None]:
    """A server that shakes hands and says hardly more."""
    host, port = certificates.split_address(address)
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.crt", tls / "server.key")
    over = threading.Event()
    with socket.create_server((host, port)) as server:
        server.settimeout(0.1)

        def serve() -> None:
            while not over.is_set():
                try:
                    plain, _ = server.accept()
                except TimeoutError:
                    continue
                try:
                    with plain if context is None else context.wrap_socket(plain, server_side=True) as one:
                        one.settimeout(5)
                        one.recv(4096)  # else what is left unread resets the connection
                        one.sendall(f"HTTP/1.1 400 no\r\n{header}\r\n\r\n".encode())
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_a_site_knows_its_server(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate of another authority, for another name, of the past or the future; no TLS at all."""

    def started(*_: Any) -> None:
        raise AssertionError("the site's node was started")

    monkeypatch.setattr(site_commands, "Supervised", started)
    now, tls = dt.datetime.now(dt.UTC), made.server / "tls"
    other = made.root / "other"
    other.mkdir()
    certificates.make_authority(other, "other")
    certificates.make_server_certificate(other, ["127.0.0.1"])
    with listening(made.address, other):
        assert "was not signed by" in refused(capsys, "site", "join", made.root / "north")
    certificates.make_server_certificate(tls, ["127.0.0.1"], 1, now - dt.timedelta(days=9))
    with listening(made.address, tls):
        assert "has expired" in refused(capsys, "site", "join", made.root / "north")
    certificates.make_server_certificate(tls, ["127.0.0.1"], 9, now + dt.timedelta(days=2))
    with listening(made.address, tls):
        assert "not yet valid: the clock here" in refused(capsys, "site", "join", made.root / "north")
    with listening(made.address, None):
        assert "does not speak TLS" in refused(capsys, "site", "join", made.root / "north")
    certificates.make_server_certificate(tls, ["127.0.0.1"])
    with listening(made.address, tls):
        assert certificates.check_connection(made.address, tls / "ca.crt")
    for apart, words in ((-60, "ahead of"), (400, "behind")):
        there = now + dt.timedelta(seconds=apart)
        with listening(made.address, tls, f"Date: {there:%a, %d %b %Y %H:%M:%S} GMT"):
            output = refused(capsys, "site", "join", made.root / "north")
            assert words in output
            assert "set both clocks" in output
    assert not certificates.check_connection(made.address, tls / "ca.crt")


def test_bad_keys(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (made.root / "junk.pub").write_text("junk")
    assert "not a site's public key" in refused(
        capsys, "server", "admit", made.server, "x", made.root / "junk.pub"
    )
    assert "the key of site 'south'" in refused(
        capsys, "server", "admit", made.server, "north", made.root / "south" / "node.pub"
    )
    (made.root / "junk.crt").write_text("junk")
    given = ("--name", "west", "--server", made.address, "--data", made.root / "north.csv", "--ca")
    for ca in (made.root / "junk.crt", made.root / "gone.crt", made.root):
        assert str(ca) in refused(capsys, "site", "enrol", made.root / "west", *given, ca)
        assert not (made.root / "west").exists()
    (made.root / "north" / "node.key").write_text("junk")
    assert "is not a site's key" in refused(capsys, "site", "join", made.root / "north")
    (made.root / "north" / "node.key").unlink()
    assert "cannot read" in refused(capsys, "site", "join", made.root / "north")
    (made.root / "south" / "secret").write_text("junk")
    assert "does not hold a site's secret" in refused(capsys, "site", "join", made.root / "south")


def test_insecure_is_asked_for_and_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fedpop("server", "init", tmp_path / "server", "--insecure")
    assert "warning: without TLS" in capsys.readouterr().out
    assert "has no certificate" in refused(capsys, "server", "run", tmp_path / "server")
    (tmp_path / "rows.csv").write_text(rows(0))
    given = ("--name", "a", "--server", "127.0.0.1:8000", "--data", tmp_path / "rows.csv")
    assert "--ca" in refused(capsys, "site", "enrol", tmp_path / "a", *given)
    fedpop("site", "enrol", tmp_path / "a", *given, "--insecure")
    assert "warning: without TLS" in capsys.readouterr().out
    assert "enrolled without TLS" in refused(capsys, "site", "join", tmp_path / "a")


def test_data_that_are_not_there(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no data at" in refused(
        capsys, "site", "enrol", made.root / "west", "--name", "west", "--server", made.address,
        "--ca", made.server / "tls" / "ca.crt", "--data", made.root / "gone.csv",
    )  # fmt: skip
    assert not (made.root / "west").exists()
    (made.root / "north.csv").unlink()
    assert "no data at" in refused(capsys, "site", "join", made.root / "north")


def test_data_without_a_row_or_an_image(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the federation's form may be: an error before a node is started, and nothing is changed."""
    wrong = {
        "empty.csv": "has no rows",
        "header.csv": "has no rows",
        "ragged.csv": "more values",
        "model.pt": "a .csv or .parquet file",
        "images": "no images",
        "math:nothing": "has no 'nothing'",
        "nomodule:rows": "no module nomodule",
    }
    (made.root / "empty.csv").write_text("")
    (made.root / "header.csv").write_text("age,sex,dose\n")
    (made.root / "ragged.csv").write_text("age,sex,dose\n1,f,2,3\n")
    (made.root / "model.pt").write_bytes(b"x")
    (made.root / "images" / "cat").mkdir(parents=True)
    before = (made.root / "north" / "site.toml").read_text()
    for name, words in wrong.items():
        data = name if ":" in name else made.root / name
        assert words in refused(
            capsys, "site", "enrol", made.root / "west", "--name", "west", "--server", made.address,
            "--ca", made.server / "tls" / "ca.crt", "--data", data,
        )  # fmt: skip
        output = refused(capsys, "site", "join", made.root / "north", "--data", data)
        assert words in output
        assert "north" in output or str(data) in output
    assert not (made.root / "west").exists()
    assert (made.root / "north" / "site.toml").read_text() == before
    (made.root / "north.csv").write_text("age,sex,dose\n")
    assert "site 'north' has no rows" in refused(capsys, "site", "join", made.root / "north")


def test_a_column_that_a_site_lacks_is_told_to_the_server(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first round, with the site and the column; the site may mend it and is asked again."""
    good = (made.root / "south.csv").read_text()
    (made.root / "south.csv").write_text(good.replace("sex", "gender"))
    folder = ServerFolder(made.server)
    grid = LocalGrid(app, {name: made.root / name for name in ("north", "south")})
    sleep = grid.sleep

    def later(seconds: float) -> None:
        sleep(seconds)
        (made.root / "south.csv").write_text(good)

    grid.sleep = later  # type: ignore[method-assign]
    run_deployment(deployment(folder), transport_on(grid), folder.run)
    assert any("site 'south' has no column 'sex'" in r.getMessage() for r in caplog.records)


def test_without_flower(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpop.extras.find_spec", lambda name: None)
    assert "pip install 'fedpop[flower]'" in refused(capsys, "server", "status", made.server)


def test_theta_comes_at_the_end(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    at = made.root / "north.csv"
    assert "has no theta yet" in refused(capsys, "site", "predict", made.root / "north", "--data", at)
    assert "holds no theta" in refused(
        capsys, "site", "personalise", made.root / "new", "--theta", made.root, "--data", at
    )
    assert not (made.root / "new").exists()
