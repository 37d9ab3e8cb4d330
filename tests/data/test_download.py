"""Downloads against a server of our own: whole and right, or not there; what broke off goes on."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedpop.data import download
from fedpop.data.catalogue import DATASETS, Remote
from fedpop.data.download import digest_of, fetch
from fedpop.data.images import open_images
from fedpop.errors import DataError
from tests.data.files import mnist

CONTENT = bytes(range(256)) * 500


@dataclass
class Server:
    """Files, and how the next answers go wrong."""

    home: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    breaks: list[int] = field(default_factory=list)
    """After how many bytes of an answer the connection is closed."""
    ranges: bool = True
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    told = Server()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            told.asked.append(f"{self.path} {wanted}".strip())
            content = told.files.get(self.path[1:])
            if content is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and told.ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            end = start + told.breaks.pop(0) if told.breaks else len(content)
            self.wfile.write(content[start:end])

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    told.home = f"http://127.0.0.1:{http.server_address[1]}/"
    try:
        yield told
    finally:
        http.shutdown()
        http.server_close()


def remote(server: Server, content: bytes = CONTENT, kind: str = "sha256") -> Remote:
    return Remote("a.gz", (server.home,), f"{kind}:{hashlib.new(kind, content).hexdigest()}")


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_a_file_is_fetched_once(server: Server, tmp_path: Path, kind: str) -> None:
    server.files["a.gz"] = CONTENT
    seen: list[tuple[str, int, int]] = []
    for _ in range(2):
        path = fetch(remote(server, kind=kind), tmp_path / "new", lambda *told: seen.append(told))
        assert path.read_bytes() == CONTENT
    assert server.asked == ["/a.gz"]
    assert seen[-1] == ("fetching a.gz", len(CONTENT), len(CONTENT))
    assert names(tmp_path / "new") == ["a.gz"]


def test_what_broke_off_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"], server.breaks = CONTENT, [1000, 500]
    for got in (1000, 1500):
        with pytest.raises(DataError, match=rf"broke off after {got} of {len(CONTENT)} bytes"):
            fetch(remote(server), tmp_path)
        assert names(tmp_path) == [".a.gz.part"]
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["/a.gz", "/a.gz bytes=1000-", "/a.gz bytes=1500-"]
    assert names(tmp_path) == ["a.gz"]


def test_a_server_that_knows_no_parts_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"], server.breaks, server.ranges = CONTENT, [1000], False
    with pytest.raises(DataError, match="broke off"):
        fetch(remote(server), tmp_path)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_only_checked(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = CONTENT
    (tmp_path / ".a.gz.part").write_bytes(CONTENT)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("junk", [b"x" * 100, b"x" * (len(CONTENT) + 5)])
def test_a_beginning_that_was_another_files_is_thrown_away(
    server: Server, tmp_path: Path, junk: bytes
) -> None:
    server.files["a.gz"] = CONTENT
    (tmp_path / ".a.gz.part").write_bytes(junk)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_another_file_than_the_published_one_is_removed(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = CONTENT[:-1] + b"?"
    with pytest.raises(DataError, match="not the published file: its sha256 is another one"):
        fetch(remote(server), tmp_path)
    assert names(tmp_path) == []


def test_the_next_home_is_tried_and_all_failures_are_told(server: Server, tmp_path: Path) -> None:
    server.files["second/a.gz"] = CONTENT
    homes = (server.home + "first/", server.home + "second/")
    assert fetch(Remote("a.gz", homes, remote(server).digest), tmp_path).read_bytes() == CONTENT
    gone = Remote("b.gz", (*homes, "http://127.0.0.1:9/"), remote(server).digest)
    with pytest.raises(DataError, match=r"first/b\.gz answered 404.*second/b\.gz answered 404.*refused"):
        fetch(gone, tmp_path)


def test_a_folder_that_cannot_be_written_to(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot write to"):
        fetch(remote(server), tmp_path / "file" / "below")


def test_a_silent_server_is_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        silent = Remote("a.gz", (f"http://127.0.0.1:{deaf.getsockname()[1]}/",), remote(server).digest)
        with pytest.raises(DataError, match="timed out"):
            fetch(silent, tmp_path)


# --- a whole set --------------------------------------------------------------------------------


@pytest.fixture
def published(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MNIST at our own server; gives the cache that it goes to."""
    folder = mnist(tmp_path / "server") / "mnist"
    server.files = {f.name: f.read_bytes() for f in folder.iterdir()}
    digests = {f.name: digest_of(f, "md5") for f in folder.iterdir()}
    remotes = {
        split: tuple(replace(r, homes=(server.home,), digest=digests[r.file]) for r in files)
        for split, files in DATASETS["mnist"].remotes.items()
    }
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], remotes=remotes))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedpop" / "data" / "mnist"


def test_a_set_that_is_not_there_is_fetched_when_it_is_asked_for(server: Server, published: Path) -> None:
    source = open_images("mnist")
    assert not server.asked
    assert len(source.test) == 20
    assert len(server.asked) == 2
    assert len(source.train) == 40
    assert len(open_images("mnist").train) == 40
    assert len(server.asked) == 4
    assert len(names(published)) == 4


def test_half_a_set_is_never_used(server: Server, published: Path) -> None:
    server.breaks = [100]
    with pytest.raises(DataError, match=r"no train images of mnist.*broke off after 100 of"):
        _ = open_images("mnist").train
    assert names(published) == [".train-images-idx3-ubyte.gz.part"]
    assert len(open_images("mnist").train) == 40


def test_a_fetched_file_that_was_damaged_is_fetched_anew(server: Server, published: Path) -> None:
    source = open_images("mnist")
    assert len(source.get("train")) == 2
    damaged = published / "train-images-idx3-ubyte.gz"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    assert open_images("mnist").get("train")[0] == damaged
    assert damaged.read_bytes() == whole
    damaged.write_bytes(whole[:-1])
    server.files.clear()
    with pytest.raises(DataError, match=r"cannot be unpacked.*cannot be had .*404.*Remove or replace"):
        open_images("mnist").get("train")
