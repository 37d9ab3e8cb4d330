"""How a run stands, as its folder shows: rounds, sites, who is late, bytes, metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import DAMAGED, read_bytes, read_json
from fedpop.flower.deployment import AFTERWARDS
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.site_state import is_locked
from fedpop.run.progress import human_bytes

NEEDED = {"round": int, "asked": int, "left_out": list, "bytes_up": int | float, "bytes_down": int | float}
"""What every round has."""
MAYBE = {"heard": list, "reasons": dict, "late_from": dict, "late": int, "loss": int | float | None}
SHOWN_APART = ("loss", "bytes_up", "bytes_down", "seconds")
"""Numbers of a round with a line of their own."""


def read_state(folder: ServerFolder) -> dict[str, Any] | None:
    """``state``, and ``why`` it is that; None before a run has begun."""
    file = folder.run / "status.json"
    if not file.exists():
        return None
    found = read_json(file)
    whole = isinstance(found, dict) and isinstance(found.get("state"), str)
    if not whole or (found["state"] in ("failed", "broken") and not isinstance(found.get("why"), str)):
        raise CheckpointError(f"{file} does not say how the run stands; remove it and start the server again")
    state: dict[str, Any] = found
    return state


def read_rounds(folder: ServerFolder) -> list[dict[str, Any]]:
    """The rounds so far: whole lines of a file that may be being written."""
    file = folder.run / "metrics.jsonl"
    if not file.exists():
        return []
    data = read_bytes(file)
    out = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not _fits(found):
            raise CheckpointError(f"{file}, line {number + 1}: these are not a round's numbers; {DAMAGED}")
        out.append(found)
    return out


def _fits(line: dict[str, Any]) -> bool:
    there = all(name in line for name in NEEDED)
    return there and all(isinstance(line[n], kind) for n, kind in (NEEDED | MAYBE).items() if n in line)


def round_words(line: dict[str, Any]) -> str:
    """A round in a line."""
    received = f"{len(line.get('heard', []))} of {line['asked']} sites"
    loss = "" if line.get("loss") is None else f", loss {line['loss']:.4g}"
    missing = f", without {', '.join(line['left_out'])}" if line["left_out"] else ""
    return f"round {line['round']}: {received}{loss}{missing}"


def status(root: Path, say: Callable[[str], None]) -> None:
    """Print how a run stands."""
    folder = ServerFolder(root)
    settings = folder.settings
    lines, now, after = read_rounds(folder), read_state(folder), _afterwards(folder.run / AFTERWARDS)
    state = "not begun" if now is None else str(now["state"])
    if now is not None and state == "running" and not is_locked(folder.run / "run"):
        state = "stopped; fedpop server run goes on with it"
    rounds = settings.get("run", {}).get("rounds")
    planned = "as many as needed" if rounds is None else rounds
    say(f"{settings.get('name', 'federation')}: {state}, {len(lines)} of {planned} rounds")
    if now is not None and state in ("failed", "broken"):
        say(f"  why       {now['why']}")
    admitted = sorted(key.stem for key in folder.admitted.glob("*.pub"))
    received: dict[str, int] = {}
    for line in lines:
        received |= dict.fromkeys(line.get("heard", []), line["round"])
    for site in sorted({*admitted, *received}):
        text = f"last message in round {received[site]}" if site in received else "no message yet"
        why = lines[-1].get("reasons", {}).get(site) if lines else None
        late = lines[-1].get("late_from", {}).get(site, 0) if lines else 0
        text += f"; {late} of its replies came late" if late else ""
        say(f"  {site:<9} {text}{f'; in the last one: {why}' if why else ''}")
    if lines:
        last = lines[-1]
        up, down = human_bytes(last["bytes_up"]), human_bytes(last["bytes_down"])
        say(f"  bytes     {up} up, {down} down")
        say(f"  late      {last.get('late', 0)} replies were dropped")
        say(f"  last      {round_words(last)}")
        numbers = {n: v for n, v in last.items() if n not in SHOWN_APART and isinstance(v, float)}
        say(f"  metrics   {', '.join(f'{n} {v:.4g}' for n, v in numbers.items()) or 'none'}")
    for name, words in after.items():
        say(f"  {name.replace('_', ' ')}: {words}")


def _afterwards(file: Path) -> dict[str, str]:
    """The answers to what was asked at the end, in words."""
    found = read_json(file) if file.exists() else {}
    try:
        return {str(name): str(answer["words"]) for name, answer in found.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not hold a run's answers; {DAMAGED}") from error
