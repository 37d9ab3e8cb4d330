"""What ``deploy/`` and the pages say is run: every command is there with its options, units and recipes are
well-formed, and what they name exists."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the commands of servers and sites need the extra 'flower'")
yaml = pytest.importorskip("yaml", reason="reads compose files")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PAGES = [ROOT / "docs" / "deployment.md", ROOT / "examples" / "hospitals" / "README.md"]
SERVICE = {
    *(
        "image",
        "build",
        "user",
        "init",
        "read_only",
        "tmpfs",
        "cap_drop",
        "security_opt",
        "stop_grace_period",
    ),
    *("profiles", "command", "ports", "volumes", "restart", "healthcheck"),
}
"""Of a service, those of the compose specification that are used here."""
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
BEFORE = "server|site|anybody|for .* do|sudo -u fedpop|docker run .*"
"""What may stand before a command on a page: who types it, and what runs it."""
INSTRUCTIONS = {"FROM", "ARG", "COPY", "RUN", "ENV", "USER", "WORKDIR", "VOLUME", "ENTRYPOINT", "CMD"}


@cache
def options(*command: str) -> frozenset[str]:
    """The options of one of fedpop's commands, by its own help; an error where there is no such command."""
    from contextlib import redirect_stdout
    from io import StringIO

    from fedpop.cli import main

    text = StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0, command
    assert f"fedpop {' '.join(command)}" in text.getvalue(), f"no command fedpop {' '.join(command)}"
    return frozenset(re.findall(r"--[a-z][a-z-]*", text.getvalue()))


def check(words: list[str]) -> None:
    """Raise unless this command line, after ``fedpop``, is one of fedpop's."""
    depth = 2 if words[0] in ("server", "site", "data") else 1
    known = options(*words[:depth])
    assert known, words
    for word in words[depth:]:
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"fedpop {' '.join(words)}: no {word}"


def commands_of(page: str) -> Iterator[list[str]]:
    """Lines of code that begin with fedpop, or have it after who types it."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(rf"\s*(?:(?:{BEFORE}) +)*(?:\S*/)?fedpop (.*)", line)
            if found:
                tokens = shlex.shlex(
                    re.split(r"\s{2,}", found[1].strip())[0], posix=True, punctuation_chars=True
                )
                words = list(takewhile(lambda token: not set(token) <= set("();<>|&"), tokens))
                if words and re.fullmatch(r"[a-z-]+", words[0]):
                    yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)
def test_commands_on_pages_exist(page: Path) -> None:
    found = list(commands_of(page.read_text()))
    assert len(found) > 6
    for words in found:
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)
def test_what_a_page_installs_fits_formulas(page: Path) -> None:
    """Sites that are asked for a formula need its extra, wherever the environment comes from."""
    text = page.read_text()
    assert "fedpop server fit" in text
    code = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    recipe = (DEPLOY / "Containerfile").read_text()
    found = re.findall(r"pip install [^\n]*'(?:fedpop|/src)\[([\w,]+)\]'", code + recipe)
    assert len(found) > 1
    assert all({"flower", "formula"} <= set(extras.split(",")) for extras in found), found


def test_a_command_that_is_not_there_would_be_found() -> None:
    with pytest.raises(AssertionError, match="no --jsn"):
        check(["server", "status", "DIR", "--jsn"])
    with pytest.raises(AssertionError, match="no command fedpop server start"):
        check(["server", "start", "DIR"])


# --- units -------------------------------------------------------------------------------------------


def exec_of(unit: Path) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_runs_a_command_that_exists(unit: Path) -> None:
    program, *words = exec_of(unit)
    assert program == "/opt/fedpop/bin/fedpop"
    check(words)
    text = unit.read_text()
    folder = Path(words[-1])
    assert folder.parent.name == re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)[0]
    assert ("Restart=always" in text) == (words[0] == "site")  # a run is over one day


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    """Not one unknown key; and little that the service may do beside its work, by systemd's own count."""
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace(exec_of(unit)[0], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(here)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:]


# --- containers ----------------------------------------------------------------------------------------


def test_services_are_of_the_compose_specification() -> None:
    assert set(COMPOSE) - {"x-fedpop"} == {"services"}
    for name, service in COMPOSE["services"].items():
        assert not service.keys() - SERVICE
        assert service["profiles"] == [name]
        check(service["command"])
        recipe = (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
        assert recipe == DEPLOY / "Containerfile"
        mounted = [volume.rsplit(":", 2 if volume.endswith(":ro") else 1)[1] for volume in service["volumes"]]
        assert any(service["command"][2] == place for place in mounted)
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    probe = COMPOSE["services"]["server"]["healthcheck"]["test"]
    assert probe[:2] == ["CMD", "fedpop"]
    check(probe[2:])


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def ignored(path: str) -> bool:
    """By the last pattern of ``.dockerignore`` that says anything of it."""
    out = False
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern and not pattern.startswith("#") and fnmatch.fnmatch(path, pattern.lstrip("!")):
            out = not pattern.startswith("!")
    return out


def test_the_recipe_copies_what_is_there_and_installs_what_is_named() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= INSTRUCTIONS
    for _, words in (pair for pair in found if pair[0] == "COPY"):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert not ignored(source), source
    assert ignored("research")
    assert ignored(".git")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'/src\[([\w,]+)\]'", (DEPLOY / "Containerfile").read_text())
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert dict(found)["ENTRYPOINT"] == '["fedpop"]'
    assert "fedpop" in project["scripts"]
    assert dict(found)["USER"] != "root"
    needed = {project["readme"], *project["license-files"], "pyproject.toml", "fedpop"}
    copied = {source for name, words in found if name == "COPY" for source in words.split()[:-1]}
    assert needed <= copied  # or nothing could be built of it
