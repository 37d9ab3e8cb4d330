"""Reading what was damaged: the same as before, or one error."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import fedpop as fp
from fedpop.cli import main
from tests.bad_input.corrupter import ENDS, FLIPS, TYPES
from tests.helpers import linear_model, ragged

SEALED = FLIPS | ENDS | TYPES
"""Where there is a digest, every change is noticed."""


def attempt(call: Callable[[], Any], error: type[Exception]) -> tuple[Any, str]:
    """What a call gives, or the one line that an error of this class says; no other may come."""
    told = ""
    try:
        return call(), told
    except error as raised:
        told = str(raised)
    assert len(told.splitlines()) == 1
    return None, told


def same(one: bytes, other: bytes) -> bool:
    """The same JSON, but for space around it."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def small(rounds: int = 3, **options: Any) -> fp.Population:
    clients = dict(zip(("anna", "ben", "cara"), ragged((3, 4, 2)), strict=True))
    return fp.FedSOUL(linear_model()).fit(clients, rounds=rounds, **options)


# --- reports ------------------------------------------------------------------------------------


def command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What a command says when it ends with code 2; None where it works."""
    code = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    if code == 0:
        return None
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("fedpop: ")
    assert len(said.strip().splitlines()) == 1
    return said
