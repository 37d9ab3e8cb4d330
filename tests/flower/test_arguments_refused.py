"""What people type after ``fedpop server`` and ``fedpop site``, and damaged files: an error that says what is
wrong and code 2, before anything is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flower.commands import Made, fedpop, refused

ADDRESSES = [
    "x", ":8000", "host:", "host:0", "host:99999", "host:-1", "host:1.5", "host:\u0661", "a b:80",
    "http://h:80", "::1:8000", "h:80:90", "\u00e9:80", "h" * 64 + ":80", "h..i:80", "h:80\n",
    'h";x="1:80', "1.2.3:80", "[h]:80",
]  # fmt: skip
HOSTS = ["a b", "*", "x" * 300, "256.1.1.1", "\u00e9", "h:80", "-", "a..b", "h/i"]
NAMES = [".", "..", "a/b", "x" * 65, "\u00e9", "a b", "$(x)"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A federation whose run is over."""
    made = Made(tmp_path_factory.mktemp("made"))
    made.run_deployment()
    return made


Told = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("address", a) for a in ADDRESSES] + [("hosts", h) for h in HOSTS] + [("name", n) for n in NAMES],
)
def test_a_federation_that_cannot_be(flag: str, value: str, tmp_path: Path, capsys: Told) -> None:
    output = refused(capsys, "server", "init", tmp_path / "new", f"--{flag}", value)
    assert value.rpartition(":")[0][:60].strip() in output or repr(value) in output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("address", ["[::1]:8000", "hub.example.org:443", "192.0.2.7:1", "a_b:80"])
def test_addresses_that_can_be(address: str, tmp_path: Path) -> None:
    fedpop("server", "init", tmp_path / "new", "--address", address, "--hosts", "*.example.org", "::1")


@pytest.mark.parametrize("arguments", [("server", "init", ""), ("site", "join", ""), ("report", ""),
                                       ("server", "init", "x", "--name", "")])  # fmt: skip
def test_an_empty_argument_is_not_the_current_folder(
    arguments: tuple[str, ...], tmp_path: Path, capsys: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is empty" in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("days", [0, -1, 40_000_000, 99_999_999_999])
def test_days_of_a_certificate(days: int, made: Made, capsys: Told) -> None:
    before = (made.server / "tls" / "server.crt").read_bytes()
    assert str(days) in refused(capsys, "server", "certificate", made.server, "--days", days)
    assert "\u00e9" in refused(capsys, "server", "certificate", made.server, "--hosts", "\u00e9")
    assert (made.server / "tls" / "server.crt").read_bytes() == before


@pytest.mark.parametrize("key", ["north/node.key", "server/tls/ca.crt", "north/site.toml", "gone", "north"])
def test_what_is_no_public_key(key: str, made: Made, capsys: Told) -> None:
    assert key in refused(capsys, "server", "admit", made.server, "west", made.root / key)
    assert not (made.server / "admitted" / "west.pub").exists()


LINE = {"round": 1, "asked": 1, "left_out": [], "bytes_up": 1, "bytes_down": 1}
WRONG: dict[str, list[str | bytes]] = {
    "metrics.jsonl": ["x\n", "{}\n", "[]\n", "null\n", b"\xff\xfe\n", *(
        json.dumps(LINE | wrong) + "\n"
        for wrong in ({"round": "a"}, {"left_out": 3}, {"heard": 5}, {"bytes_up": "x"}, {"reasons": []})
    )],
    "status.json": ["", "x", "[]", "{}", '"a"', "null", '{"state": 3}', '{"state": "failed"}'],
    "afterwards.json": ["", "x", "[]", '{"a": 3}', '{"a": {}}', "null"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(n, text) for n, texts in WRONG.items() for text in texts])
def test_how_a_damaged_run_stands(name: str, text: str | bytes, made: Made, capsys: Told) -> None:
    file = made.server / "run" / name
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        assert name in refused(capsys, "server", "status", made.server)
    finally:
        file.unlink() if before is None else file.write_bytes(before)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda b: b"",
    "half": lambda b: b[: len(b) // 2],
    "a list": lambda b: b"[]",
    "an object": lambda b: b"{}",
    "a bit": lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :],
    "gone": lambda b: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["method.json", "model.safetensors", "theta.json", "theta.safetensors"])
def test_a_damaged_theta(name: str, damage: str, made: Made, tmp_path: Path, capsys: Told) -> None:
    """Neither at the server, whence a new site takes it, nor at a site that took part."""
    theta, data = made.server / "run" / "theta", made.root / "north.csv"
    (folder_here,) = (made.root / "north" / "experiments").iterdir()
    if (damage, name) == ("gone", "theta.safetensors"):
        words = "no theta yet", "theta"
    elif (damage, name) == ("gone", "method.json"):
        words = "method", "no theta"
    else:
        words = name, name
    commands = ("predict", made.root / "north", "--data", data), (
        "personalise", tmp_path / "new", "--theta", theta, "--data", data
    )  # fmt: skip
    for folder, command, output in zip((folder_here, theta), commands, words, strict=True):
        before = (folder / name).read_bytes()
        after = DAMAGES[damage](before)
        (folder / name).unlink() if after is None else (folder / name).write_bytes(after)
        try:
            assert output in refused(capsys, "site", *command)
        finally:
            (folder / name).write_bytes(before)
    assert not (tmp_path / "new").exists()
