"""``fedpop site ledger``: what left a site, for people and for programs; nothing else is imported for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedpop.errors import SettingsError
from fedpop.flower.ledger import LEDGER, Ledger
from fedpop.run.progress import human_bytes


def show(
    root: Path, plain: bool, verify: bool, head: str | None, last: int | None, say: Callable[[str], None]
) -> None:
    """Print the entries, each of which is checked against the one before it."""
    if not (root / "site.toml").exists():
        raise SettingsError(f"{root} is no site's folder: it has no site.toml")
    entries = list(Ledger.of(root).read())
    if head is not None and all(entry["hash"] != head for entry in entries):
        raise SettingsError(
            f"{root / LEDGER} has no entry {head}: entries that once were there are missing, or it is of "
            "another ledger"
        )
    if not verify:
        shown = entries[len(entries) - last if last and last < len(entries) else 0 :]
        for entry in shown:
            say(json.dumps(entry) if plain else in_a_line(entry))
    if plain:
        return
    if not entries:
        say("nothing has left this site yet")
        return
    total = sum(entry["bytes"] for entry in entries)
    torn = sum("torn" in entry for entry in entries)
    crashes = f"; {torn} of them follow(s) a line that a crash cut off" if torn else ""
    say(f"{len(entries)} message(s), {human_bytes(total)}, none of them changed or missing{crashes}")
    say(f"the last one is {entries[-1]['hash']}")


def in_a_line(entry: Mapping[str, Any]) -> str:
    """
    >>> in_a_line({"n": 3, "time": "2026-01-02T03:04:05.678Z", "run": "clinics", "kind": "train",
    ...            "round": 0, "vectors": {"I": {"entries": 4, "bytes": 16}}, "bytes": 216})
    '    3  2026-01-02 03:04:05  clinics  round 1: I (4); 216 B'
    """
    what = {"hello": "greeting", "finish": "receipt of theta"}.get(entry["kind"], "answer")
    what = f"round {entry['round'] + 1}" if "round" in entry else what
    what = f"question {entry['question']}" if "question" in entry else what
    named = ", ".join(f"{name} ({vector['entries']})" for name, vector in entry["vectors"].items())
    if "refused" in entry:
        named = f"refused: {entry['refused'][1]}"
    when = entry["time"][:19].replace("T", " ")
    size = human_bytes(entry["bytes"])
    return f"{entry['n']:>5}  {when}  {entry['run']}  {what}: {named or 'no vector'}; {size}"
