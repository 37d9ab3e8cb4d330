"""The protocol has a number of its own: what the two sides say to each other is what that number means."""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import fedpop.evaluation
import fedpop.methods
import fedpop.mixed
import fedpop.questions
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import request_from_record
from fedpop.flower.requests import KINDS, PROTOCOL, versions, why_not_understood
from fedpop.message.declared import HEADER
from fedpop.questions import Question
from fedpop.settings import known
from fedpop.site.refusal import Code
from fedpop.version import __version__
from tests.flower.sites import transport_on
from tests.flower.tables import ages, planned, table, tables_at

SPOKEN = {1: "3bb549f5ccdedfb3"}
"""The beginning of a digest of what is said, by the protocol's number."""


def keys(value: Any) -> Any:
    """The names in nested plain values."""
    return {n: keys(v) for n, v in sorted(value.items())} if isinstance(value, Mapping) else None


def said(tmp_path: Path) -> dict[str, Any]:
    """Names in requests of a whole run, in headers of replies, and fields of fedpop's questions."""
    grid = tables_at(tmp_path, {n: table(ages(k)) for k, n in enumerate(("north", "south"))})
    run_deployment(planned(rounds=1), transport_on(grid))
    requests = {}
    for _, message, _ in grid.traffic:
        read = request_from_record(message.content)
        header = {n: keys(v) for n, v in sorted(read.header.items()) if n != "description"}
        kind = read.header.get("study", {}).get("kind", read.kind)
        if kind == "Training":
            header["study"]["method"]["algorithm"] = header["study"]["method"]["model"] = None
        requests[kind] = header
    for package in (fedpop.questions, fedpop.evaluation, fedpop.methods, fedpop.mixed):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)  # a question is known once it is defined
    ours = {n: c for n, c in known(Question).items() if c.__module__.startswith("fedpop.")}
    asked = {n: [f.name for f in fields(c)] if is_dataclass(c) else [] for n, c in sorted(ours.items())}
    return {
        "requests": requests,
        "kinds": KINDS,
        "header": sorted(HEADER),
        "codes": sorted(Code),
        "questions": asked,
    }


def test_what_is_said_changes_with_the_protocols_number_only(tmp_path: Path) -> None:
    """If this fails, sites of the last release would not understand what is said now, or the other way round.
    Raise ``PROTOCOL``, unless no release has had its present number, and write the new digest down here."""
    found = said(tmp_path)
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    assert SPOKEN[PROTOCOL] == digest, found


def test_whoever_speaks_another_protocol_is_told_who_is_to_be_updated() -> None:
    assert why_not_understood(versions(), "the site") is None
    assert why_not_understood(versions() | {"version": "0.2.99"}, "the site") is None
    older = why_not_understood({"version": "0.1.0"}, "the site")
    assert older is not None
    assert older.endswith(f"install fedpop {__version__} at the site")
    newer = why_not_understood({"version": "9.0.0", "protocol": PROTOCOL + 1}, "the server")
    assert newer is not None
    assert "the server has fedpop 9.0.0" in newer
    assert "install fedpop 9.0.0 at the site, or" in newer
    assert why_not_understood({"version": "1", "protocol": "x"}, "the site") is not None
