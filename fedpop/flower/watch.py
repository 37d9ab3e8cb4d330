"""``fedpop server watch``: a live page of a run, for this machine alone, at an address that has a secret."""

from __future__ import annotations

import itertools
import json
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError, SettingsError
from fedpop.flower.logs import LINE_PARTS
from fedpop.flower.pages import Served, serving
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.status import read_rounds, standing

SHOWN_POINTS, SHOWN_ROUNDS, SHOWN_LINES = 400, 60, 14
"""Points of the curve, rounds of each site's strip, lines of the log."""
LOG_END_BYTES = 2**15
HEARD, MISSED, IDLE = "h", "m", "."
"""Marks of a site's rounds: its message counted; it was asked and is not in the round; it was not asked."""


def serve_page(root: Path, port: int, say: Callable[[str], None]) -> None:
    """Until somebody stops it."""
    folder = ServerFolder(root)
    _ = folder.settings  # a folder that is none is an error now
    token = secrets.token_urlsafe(18)
    with serving(port, lambda path: page_of(folder, token, path)) as address:
        say(f"the live page is at {address}/{token}/ for this machine alone; Ctrl-C stops it")
        while True:
            time.sleep(3600)


def page_of(folder: ServerFolder, token: str, path: str) -> Served | None:
    """What is at a path: the page, and what it shows."""
    _, given, *rest = [*path.split("/", 2), ""]
    if not secrets.compare_digest(given.encode(), token.encode()):
        return None
    if rest[0] == "":
        return Served("text/html; charset=utf-8", (files("fedpop.flower") / "watch.html").read_bytes())
    if rest[0] != "view.json":
        return None
    try:
        found = view(ServerFolder(folder.root))  # its settings may have been edited
    except (CheckpointError, SettingsError) as error:
        found = {"error": str(error)}
    return Served("application/json", json.dumps(found).encode())


def view(folder: ServerFolder) -> dict[str, Any]:
    """All that the page shows."""
    lines = read_rounds(folder)
    found = standing(folder, lines)
    losses = [[m["round"], m["loss"]] for m in lines if m.get("loss") is not None]
    for site in found["sites"]:
        site["strip"] = "".join(_mark(site["name"], line) for line in lines[-SHOWN_ROUNDS:])
    times = [m.get("seconds", 0.0) for m in lines[-21:]]
    took = [after - before for before, after in itertools.pairwise(times)]
    return found | {
        "now": time.time(),
        "losses": _thinned(losses),
        "first": lines[-SHOWN_ROUNDS:][0]["round"] if lines else None,
        "usual_seconds": statistics.median(took) if took else None,
        "timeout": folder.settings.get("sites", {}).get("timeout", 600.0),
        "log": _log_end(folder.run / "server.log"),
    }


def _mark(name: str, line: Mapping[str, Any]) -> str:
    if name in line.get("heard", ()):
        return HEARD
    return MISSED if name in line.get("reasons", {}) or name in line["left_out"] else IDLE


def _thinned(points: Sequence[list[float]]) -> list[list[float]]:
    """At most so many of them, the last among them."""
    step = -(-len(points) // SHOWN_POINTS) or 1
    return list(points[(len(points) - 1) % step :: step]) if points else []


def _log_end(file: Path) -> list[dict[str, str]]:
    """The last lines of the run's log, newest last; an error's traceback is left out."""
    if not file.exists():
        return []
    with file.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(0, size - LOG_END_BYTES))
        text = log.read().decode(errors="replace")
    found = filter(None, map(LINE_PARTS.fullmatch, text.splitlines()))
    return [{"time": m[1][:19], "level": m[2], "words": m[3]} for m in found][-SHOWN_LINES:]
