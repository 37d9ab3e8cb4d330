"""The live page: what it shows, in a real browser, and to whom."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from fedpop.files import write_json
from fedpop.flower.metrics import of_run
from fedpop.flower.pages import Served, serving
from fedpop.flower.processes import locked
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.status import NewRounds, read_rounds, standing
from fedpop.flower.watch import SHOWN_POINTS, page_of, view
from tests.flower.browser import browsed, get, needs_browser
from tests.flower.commands import fedpop, refused

TOKEN = "a-token-of-the-test"
SETTINGS = """name = "clinics"
[data]
x = ["age"]
y = "dose"
[run]
rounds = 30
[server]
address = "127.0.0.1:1"
"""


def a_round(number: int, **more: Any) -> dict[str, Any]:
    base = {
        "round": number,
        "active": 2,
        "asked": 2,
        "left_out": [],
        "heard": ["north", "south"],
        "reasons": {},
    }
    base |= {"late": 0, "loss": 2.0 / number, "bytes_up": 300 * number, "bytes_down": 200 * number}
    return base | {"seconds": 1.5 * number} | more


@pytest.fixture
def folder(tmp_path: Path) -> ServerFolder:
    """A run of twelve rounds, in which one site was left out twice and is waited for."""
    root = tmp_path / "server"
    fedpop("server", "init", root, "--name", "clinics", "--address", "127.0.0.1:1")
    found = ServerFolder(root)
    (root / "app" / "federation.toml").write_text(SETTINGS)
    for name in ("north", "south"):
        (found.admitted / f"{name}.pub").write_text("")
    found.run.mkdir()
    missing = {"heard": ["north"], "left_out": ["south"], "reasons": {"south": "it did not answer in time"}}
    lines = [a_round(k, **(missing if k in (5, 12) else {})) for k in range(1, 13)]
    (found.run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(found.run / "status.json", {"state": "running"})
    waits = {"what": "round 13", "since": time.time() - 20, "waiting": ["south"]}
    write_json(found.run / "present.json", waits)
    log = "2026-01-02 03:04:05,678 INFO site north is here\nTraceback of something\n"
    log += "2026-01-02 03:04:06,000 WARNING south <img src=x onerror=alert(1)> was left out\n"
    (found.run / "server.log").write_text(log)
    return found


def over(folder: ServerFolder) -> None:
    write_json(folder.run / "status.json", {"state": "finished", "rounds": 12})
    verdict = {"words": "converged to a local optimum", "converged": True}
    write_json(folder.run / "result.json", {"rounds": 12, "best_round": None, "convergence": verdict})
    write_json(
        folder.run / "outcome.json",
        {"estimates": [], "warnings": ["the prior's scale is at its lower bound"]},
    )
    write_json(folder.run / "afterwards.json", {"log_likelihood": {"words": "-567.89"}})


def text_of(document: str) -> str:
    """What is to be read in it."""
    body = document[document.index("<body") : document.index("<script>")]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


# --- in a browser ------------------------------------------------------------------------------------


@needs_browser
def test_a_run_that_goes_on(folder: ServerFolder, tmp_path: Path) -> None:
    """Rounds, losses, who was heard, who is late, bytes; what comes from elsewhere is text and no more."""
    asked = []

    def answer(path: str) -> Served | None:
        asked.append(path)
        return page_of(folder, TOKEN, path)

    with locked(folder.run / "run"), serving(0, answer) as address:
        document = browsed(f"{address}/{TOKEN}/", tmp_path)
    text = text_of(document)
    assert "clinics running 12 of 30 rounds; now round 13" in text
    assert "loss 0.1667" in text
    assert "1 of 2 sites" in text
    assert "sent up 3.6 kB sent down 2.4 kB time for a round 1.5 s left, about 27 s" in text
    assert re.search(r"south 10 of 12 11 0 late, [\d hmins]+ it did not answer in time", text)
    assert "north 12 of 12 12 0" in text
    assert "south <img src=x onerror=alert(1)> was left out" in text
    assert "<img" not in document
    assert "Traceback" not in text
    assert document.count('fill="var(--orange)"') + document.count("fill: var(--orange)") >= 2
    assert 'aria-label="heard in 10, left out of 2 of the last 12 rounds"' in document
    assert 'aria-label="loss 2 in round 1, 0.1667 in round 12"' in document
    assert set(asked) == {f"/{TOKEN}/", f"/{TOKEN}/view.json"}


@needs_browser
def test_a_run_that_is_over(folder: ServerFolder, tmp_path: Path) -> None:
    over(folder)
    with serving(0, lambda path: page_of(folder, TOKEN, path)) as address:
        text = text_of(browsed(f"{address}/{TOKEN}/", tmp_path))
    assert "clinics finished" in text
    assert "Warnings the prior's scale is at its lower bound" in text
    assert "theta: converged to a local optimum" in text
    assert "log likelihood: -567.89" in text


@needs_browser
@pytest.mark.parametrize("size", [(1100, 1200), (500, 1600)])
def test_it_fits_its_window(folder: ServerFolder, tmp_path: Path, size: tuple[int, int]) -> None:
    """Nothing is wider than a wide window, nor than a narrow one, and something is drawn."""
    measure = (
        b"<script>setTimeout(() => { document.body.dataset.width = "
        b"`${document.documentElement.scrollWidth} of ${innerWidth}` }, 1500)</script></body>"
    )

    def answer(path: str) -> Served | None:
        found = page_of(folder, TOKEN, path)
        assert found is not None
        return Served(found.kind, found.body.replace(b"</body>", measure))

    with locked(folder.run / "run"), serving(0, answer) as address:
        document = browsed(f"{address}/{TOKEN}/", tmp_path, size=size)
        found = re.search(r'data-width="(\d+) of (\d+)"', document)
        assert found is not None
        assert int(found[1]) <= int(found[2]) == size[0]
        browsed(f"{address}/{TOKEN}/", tmp_path, f"--screenshot={tmp_path / 'page.png'}", size=size)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_points_nowhere() -> None:
    found = page_of(ServerFolder(Path("nowhere")), TOKEN, f"/{TOKEN}/")
    assert found is not None
    page = found.body.decode()
    assert re.findall(r"https?://[^\"'\s]+", page) == ["http://www.w3.org/2000/svg"]
    assert "innerHTML" not in page
    assert not re.search(r"<(script|link|img|iframe)[^>]+src=", page)


# --- who sees it ---------------------------------------------------------------------------------------


def test_without_the_token_there_is_nothing(folder: ServerFolder) -> None:
    with serving(0, lambda path: page_of(folder, TOKEN, path)) as address:
        assert address.startswith("http://127.0.0.1:")
        status, _, headers = get(address, f"/{TOKEN}/view.json")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for path in ("/", "/view.json", "//view.json", f"/{TOKEN}x/", f"/{TOKEN}/app/federation.toml"):
            status, body, _ = get(address, path)
            assert (status, body) == (404, b"there is nothing here\n")
        assert (
            get(address, f"/{TOKEN}/", host="elsewhere.example")[0] == 404
        )  # a name that was made to point here


def test_a_folder_that_is_damaged_says_so(folder: ServerFolder) -> None:
    (folder.run / "metrics.jsonl").write_text("what?\n")
    found = page_of(folder, TOKEN, f"/{TOKEN}/view.json")
    assert found is not None
    assert "these are not a round's numbers" in json.loads(found.body)["error"]


def test_a_port_that_is_taken_is_an_error(folder: ServerFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(0, lambda path: None) as address:
        port = address.rsplit(":", 1)[1]
        assert "cannot be had" in refused(capsys, "server", "watch", folder.root, "--port", port)
    assert "is this a federation's folder?" in refused(capsys, "server", "watch", folder.root / "none")


# --- the same in other forms -----------------------------------------------------------------------------


def test_curves_of_long_runs_are_thinned(folder: ServerFolder) -> None:
    lines = [a_round(k) for k in range(1, 3001)]
    (folder.run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses = view(folder)["losses"]
    assert len(losses) <= SHOWN_POINTS
    assert losses[-1] == [3000, 2.0 / 3000]


def test_status_as_json(folder: ServerFolder, capsys: pytest.CaptureFixture[str]) -> None:
    over(folder)
    capsys.readouterr()
    fedpop("server", "status", folder.root, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["state"], found["rounds"], found["planned"]) == (
        "clinics",
        "finished",
        12,
        30,
    )
    assert found["sites"][1] == {
        "name": "south",
        "last_round": 11,
        "heard": 10,
        "late": 0,
        "why": "it did not answer in time",
        "waited_for": False,
    }
    assert found["warnings"] == ["the prior's scale is at its lower bound"]
    fedpop("server", "status", folder.root)
    assert "  warning   the prior's scale is at its lower bound\n" in capsys.readouterr().out


def test_who_was_stopped_before_the_first_round_is_told(
    folder: ServerFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a site that has taken part since it is no longer said."""
    (folder.admitted / "east.pub").write_text("")
    stopped = {"east": "a column is out of proportion", "north": "so was one here"}
    write_json(folder.run / "scales.json", {"columns": {}, "stopped": stopped})
    why = {site["name"]: site["why"] for site in standing(folder)["sites"]}
    missed = "it did not answer in time"
    assert why == {"east": "a column is out of proportion", "north": None, "south": missed}
    capsys.readouterr()
    fedpop("server", "status", folder.root)
    output = capsys.readouterr().out
    assert "  east      no message yet; a column is out of proportion\n" in output
    assert f"last message in round 11; in the last one: {missed}" in output


def test_numbers_for_prometheus(folder: ServerFolder) -> None:
    """By its text format: a help and a type before each name's samples, names and values as it wants them."""
    text = of_run(standing(folder))
    assert 'fedpop_state{state="stopped"} 1\n' in text  # it says that it runs, and nobody has its lock
    assert "fedpop_rounds_total 12\n" in text
    assert "fedpop_loss 0.16666666666666666\n" in text
    assert 'fedpop_site_last_round{site="south"} 11\n' in text
    typed, seen = set[str](), list[str]()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            typed.add(line.split()[2])
            continue
        if line.startswith("# HELP"):
            continue
        sample = re.fullmatch(r'([a-z_:][a-z0-9_:]*)(\{\w+="[^"]*"(,\w+="[^"]*")*\})? (\S+)', line)
        assert sample is not None, line
        float(sample[4])
        assert sample[1] in typed
        seen.append(sample[1])
    assert [n for i, n in enumerate(seen) if n not in seen[:i]] == [
        n for i, n in enumerate(seen) if i == 0 or seen[i - 1] != n
    ]  # samples of one name stand together


# --- rounds as they come ---------------------------------------------------------------------------


def test_rounds_are_read_once_as_they_come(folder: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are being written, files that go back with their run, and files that are new."""
    file, new = folder.run / "metrics.jsonl", NewRounds(folder)
    before = file.read_bytes()
    assert new() == read_rounds(folder)
    assert new() == []
    parsed = list[bytes]()
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    line = json.dumps(a_round(13)).encode() + b"\n"
    with file.open("ab") as more:
        more.write(line[:40])
        more.flush()
        assert new() == []
        more.write(line[40:])
    assert [m["round"] for m in new()] == [13]
    assert len(parsed) == 1
    file.write_bytes(before)  # the run went back: its thirteenth round was said
    assert new() == []
    lines = [json.dumps(a_round(k)).encode() + b"\n" for k in (13, 14)]
    file.write_bytes(before + b"".join(lines))
    assert [m["round"] for m in new()] == [14]
    file.unlink()
    assert new() == []
    assert new.seen == 14
