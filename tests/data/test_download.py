"""Downloads against a server of our own: whole and right, or not there; what broke off goes on."""

import hashlib
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedpop.data import download
from fedpop.data.catalogue import DATASETS, Remote
from fedpop.data.download import digest_of_file, fetch
from fedpop.data.images import open_images
from fedpop.errors import DataError
from fedpop.run.lock import locked_folder
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
    pause: float = 0.0
    """Seconds before each answer's content."""
    headers: dict[str, str] = field(default_factory=dict)
    """In place of its own."""
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
            own = {"Content-Length": str(len(content) - start)}
            if start:
                own["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            for name, value in (own | told.headers).items():
                self.send_header(name, value.format(start=start, last=len(content) - 1))
            self.end_headers()
            time.sleep(told.pause)
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
    monkeypatch.setattr(download, "LONGEST_SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        silent = Remote("a.gz", (f"http://127.0.0.1:{deaf.getsockname()[1]}/",), remote(server).digest)
        with pytest.raises(DataError, match="timed out"):
            fetch(silent, tmp_path)


@pytest.mark.parametrize("length", ["abc", "-5", ""])
def test_a_length_that_is_no_number_is_not_said(server: Server, tmp_path: Path, length: str) -> None:
    server.files["a.gz"], server.headers = CONTENT, {"Content-Length": length}
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_part_of_a_file_whose_length_is_not_said(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = CONTENT
    server.headers = {"Content-Range": "bytes {start}-{last}/*"}
    (tmp_path / ".a.gz.part").write_bytes(CONTENT[:500])
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["/a.gz bytes=500-"]


@pytest.mark.parametrize("span", ["bytes 0-9/10", "junk", ""])
def test_a_server_that_sends_another_part_is_asked_for_all_of_it(
    server: Server, tmp_path: Path, span: str
) -> None:
    server.files["a.gz"], server.headers = CONTENT, {"Content-Range": span}
    (tmp_path / ".a.gz.part").write_bytes(CONTENT[:500])
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["/a.gz bytes=500-", "/a.gz"]


def test_two_that_want_one_file_fetch_it_once(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"], server.pause = CONTENT, 0.5
    script = (
        "import sys; from pathlib import Path; from fedpop.data.catalogue import Remote; "
        "from fedpop.data.download import fetch; "
        "fetch(Remote('a.gz', (sys.argv[1],), sys.argv[2]), Path(sys.argv[3]))"
    )
    command = [sys.executable, "-c", script, server.home, remote(server).digest, str(tmp_path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert (tmp_path / "a.gz").read_bytes() == CONTENT
    assert server.asked == ["/a.gz"]
    assert names(tmp_path) == ["a.gz"]


def test_one_that_waits_says_so_and_goes_on_when_the_other_has_done(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["a.gz"] = CONTENT
    seen: list[str] = []
    other = ExitStack()
    other.enter_context(locked_folder(tmp_path))
    monkeypatch.setattr(download.time, "sleep", lambda seconds: other.close())
    fetch(remote(server), tmp_path, lambda what, done, total: seen.append(what))
    assert seen[0] == f"waiting for another process that fetches into {tmp_path}"
    assert seen[-1] == "fetching a.gz"


@pytest.mark.parametrize("name", ["a.gz", ".a.gz.part"])
def test_a_folder_where_the_file_should_be_is_told_before_the_download(
    server: Server, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"{name} is a folder, where a file should be"):
        fetch(remote(server), tmp_path)
    assert not server.asked


def test_an_answer_of_several_lines_is_one_line(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no\n  such\r\nhost")

    monkeypatch.setattr(urllib.request, "urlopen", fails)
    with pytest.raises(DataError, match=r"\(no such host\)$"):
        fetch(remote(server), tmp_path)


# --- a whole set --------------------------------------------------------------------------------


@pytest.fixture
def published(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MNIST at our own server; gives the cache that it goes to."""
    folder = mnist(tmp_path / "server") / "mnist"
    server.files = {f.name: f.read_bytes() for f in folder.iterdir()}
    digests = {f.name: digest_of_file(f, "md5") for f in folder.iterdir()}
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
