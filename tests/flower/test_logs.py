"""Logs of commands and of runs: times, levels, JSON, and files that are rotated without losing a line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from fedpop.errors import SettingsError
from fedpop.flower import logs
from fedpop.flower.logs import LogLine, command_log, log_to, put_aside, rotating
from fedpop.flower.processes import LogTail
from tests.flower.commands import Made, refused

TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) (.*)")


def test_lines_have_times_and_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with command_log(tmp_path / "logs" / "fedpop.log", plain=False) as say:
        say("round 1: 2 of 2 sites")
        say(LogLine("north was left out"))
    text = (tmp_path / "logs" / "fedpop.log").read_text()
    assert capsys.readouterr().out == text
    found = [TEXT.fullmatch(line) for line in text.splitlines()]
    assert [m and m.groups() for m in found] == [
        ("INFO", "round 1: 2 of 2 sites"),
        ("WARNING", "north was left out"),
    ]


def test_lines_are_json_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with command_log(tmp_path / "fedpop.log", plain=True) as say:
        say('a "quoted" line\nand its end')
        say(LogLine("wrong", logging.ERROR))
    lines = capsys.readouterr().out.splitlines()
    assert lines == (tmp_path / "fedpop.log").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [(f["level"], f["message"]) for f in found] == [
        ("INFO", 'a "quoted" line\nand its end'),
        ("ERROR", "wrong"),
    ]
    assert all(datetime.fromisoformat(f["time"]).tzinfo is not None for f in found)


def test_what_ended_a_command_is_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And once on the terminal, as of any command."""
    made = Made(tmp_path)
    file = made.server / "app" / "federation.toml"
    file.write_text(file.read_text().replace("FedSOUL", "FedSOLE"))
    told = refused(capsys, "server", "run", made.server, "--log-json")
    assert "FedSOLE" in told
    (line,) = (made.server / "logs" / "fedpop.log").read_text().splitlines()
    found = json.loads(line)
    assert found["level"] == "ERROR"
    assert told == f"fedpop: {found['message']}\n"
    (made.root / "north.csv").write_text("age,sex,dose\n")
    told = refused(capsys, "site", "join", made.root / "north")
    (line,) = (made.root / "north" / "logs" / "fedpop.log").read_text().splitlines()
    match = TEXT.fullmatch(line)
    assert match is not None
    assert match[1] == "ERROR"
    assert told == f"fedpop: {match[2]}\n"


def test_no_log_is_made_in_a_folder_that_is_no_federations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, "server", "run", tmp_path / "nowhere")
    refused(capsys, "site", "join", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_logs_are_rotated_and_nothing_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows a log reads each line once, also where the file was put aside in between."""
    monkeypatch.setattr(logs, "LOG_BYTES", 2000)
    file = tmp_path / "server.log"
    tail = LogTail(file, ("INFO",))
    handler = rotating(file)
    handler.setFormatter(logging.Formatter(logs.LINE))
    log = logging.Logger("test")
    log.addHandler(handler)
    seen = []
    for i in range(400):
        log.info("line %d", i)
        if i % 17 == 0:
            seen += tail.new()
    seen += tail.new()
    handler.close()
    assert seen == [f"line {i}" for i in range(400)]
    assert {p.name for p in tmp_path.iterdir()} == {"server.log", *(f"server.log.{k}" for k in range(1, 6))}
    assert all(p.stat().st_size <= 2000 for p in tmp_path.iterdir())


def test_a_log_that_another_process_has_open_is_put_aside(tmp_path: Path) -> None:
    """It goes on in the emptied file: its handle is for appending."""
    file = tmp_path / "node.log"
    code = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"
    with file.open("ab") as out:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=out, text=True)
    assert child.stdin is not None

    def wrote(words: str) -> None:
        assert child.stdin is not None
        child.stdin.write(words + "\n")
        child.stdin.flush()
        while words not in file.read_text():
            assert child.poll() is None

    wrote("first")
    put_aside(file, largest=10_000)
    assert file.read_text() == "first\n"  # not as long as that
    for words in ("second", "third"):
        put_aside(file, largest=1)
        wrote(words)
    child.stdin.close()
    assert child.wait(10) == 0
    assert file.read_text() == "third\n"
    assert file.with_name("node.log.1").read_text() == "second\n"
    assert file.with_name("node.log.2").read_text() == "first\n"


def test_a_run_s_log_is_in_one_file_at_a_time(tmp_path: Path) -> None:
    log_to(tmp_path / "one.log")
    logging.getLogger("fedpop.site").info("first")
    log_to(tmp_path / "other.log")
    logging.getLogger("fedpop.site").warning("second")
    log = logging.getLogger("fedpop")
    for handler in [h for h in log.handlers if isinstance(h, logging.FileHandler)]:
        log.removeHandler(handler)
        handler.close()
    assert "first" in (tmp_path / "one.log").read_text()
    assert "second" not in (tmp_path / "one.log").read_text()
    assert " WARNING second" in (tmp_path / "other.log").read_text()


def test_a_folder_without_room_for_logs_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with (
        pytest.raises(SettingsError, match="cannot write to"),
        command_log(tmp_path / "logs" / "a.log", False),
    ):
        pass
