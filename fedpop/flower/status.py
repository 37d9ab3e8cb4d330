"""How a run stands, as its folder shows: rounds, sites, who is late, bytes, metrics."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import DAMAGED, read_bytes, read_json
from fedpop.flower.present import PRESENT, read_present
from fedpop.flower.processes import is_locked
from fedpop.flower.server_folder import AFTERWARDS, OUTCOME, PRINTED, SCALES, ServerFolder
from fedpop.run.progress import human_bytes, privacy_words

METRICS = "metrics.jsonl"
NEEDED = {"round": int, "asked": int, "left_out": list, "bytes_up": int | float, "bytes_down": int | float}
"""What every round has."""
MAYBE = {"heard": list, "reasons": dict, "late_from": dict, "late": int, "loss": int | float | None}
SHOWN_APART = ("loss", "bytes_up", "bytes_down", "seconds", "epsilon", "epsilon_end", "epsilon_server")
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
    file = folder.run / METRICS
    if not file.exists():
        return []
    return _rounds_in(_whole_lines(read_bytes(file)), file)


class NewRounds:
    """The rounds of a run as they come. What was read is not read again: runs are long."""

    def __init__(self, folder: ServerFolder) -> None:
        self._file = folder.run / METRICS
        self._place = (0, 0)
        """Which file it was, and how much of it was read."""
        self._lines = self.seen = 0
        """Rounds in that, and how many there have ever been: a run that goes back says again what it was."""

    def __call__(self) -> list[dict[str, Any]]:
        try:
            with self._file.open("rb") as file:
                now = os.fstat(file.fileno())
                if self._place[0] != now.st_ino or self._place[1] > now.st_size:
                    self._place, self._lines = (now.st_ino, 0), 0
                file.seek(self._place[1])
                data = _whole_lines(file.read())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self._file}: {error.strerror or error}") from error
        found = _rounds_in(data, self._file, self._lines)
        new = found[max(0, self.seen - self._lines) :]
        self._place = (self._place[0], self._place[1] + len(data))
        self._lines += len(found)
        self.seen = max(self.seen, self._lines)
        return new


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _rounds_in(data: bytes, file: Path, before: int = 0) -> list[dict[str, Any]]:
    out = []
    for number, line in enumerate(data.splitlines(), before + 1):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not _fits(found):
            raise CheckpointError(f"{file}, line {number}: these are not a round's numbers; {DAMAGED}")
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
    what = f"question {line['round']}, {line['question']}" if "question" in line else f"round {line['round']}"
    return f"{what}: {received}{loss}{missing}"


def standing(folder: ServerFolder, lines: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """How a run stands, in plain values: for ``status --json``, the live page and metrics."""
    settings = folder.settings
    lines = read_rounds(folder) if lines is None else lines
    now, outcome = read_state(folder), _plain(folder.run / OUTCOME)
    state = "not begun" if now is None else str(now["state"])
    if state == "running" and not is_locked(folder.run / "run"):
        state = "stopped"
    present = read_present(folder.run / PRESENT) if state == "running" else {}
    last = lines[-1] if lines else {}
    verdict = _plain(folder.run / "result.json").get("convergence")
    return {
        "name": str(settings.get("name", "federation")),
        "state": state,
        "why": now.get("why") if now else None,
        "rounds": len(lines),
        "planned": settings.get("run", {}).get("rounds"),
        "sites": _sites(folder, lines, present.get("waiting", [])),
        "doing": present.get("what"),
        "since": present.get("since"),
        "bytes_up": last.get("bytes_up", 0),
        "bytes_down": last.get("bytes_down", 0),
        "seconds": last.get("seconds", 0.0),
        "late": last.get("late", 0),
        "last": last or None,
        "privacy": privacy_words(last) if last.get("epsilon") is not None else None,
        "verdict": None if verdict is None else str(verdict["words"]),
        "converged": None if verdict is None else verdict["converged"],
        "afterwards": _afterwards(folder.run / AFTERWARDS),
        "formula": settings.get("model", {}).get("formula"),
        "fit": (folder.run / PRINTED).read_text() if (folder.run / PRINTED).exists() else None,
        "warnings": [str(words) for words in outcome.get("warnings", [])],
    }


def _sites(
    folder: ServerFolder, lines: Sequence[Mapping[str, Any]], waiting: Collection[str]
) -> list[dict[str, Any]]:
    """Each site that was admitted, or was heard: when, and what was wrong last, or before the first round."""
    received, count = dict[str, int](), Counter[str]()
    stopped = _plain(folder.run / SCALES).get("stopped", {})
    for line in lines:
        received |= dict.fromkeys(line.get("heard", []), line["round"])
        count.update(line.get("heard", []))
    last = lines[-1] if lines else {}
    return [
        {
            "name": name,
            "last_round": received.get(name),
            "heard": count[name],
            "late": last.get("late_from", {}).get(name, 0),
            "why": last.get("reasons", {}).get(name, None if name in received else stopped.get(name)),
            "waited_for": name in waiting,
        }
        for name in sorted({*folder.names, *received, *last.get("reasons", {})})
    ]


def status(root: Path, say: Callable[[str], None], plain: bool = False) -> None:
    """Print how a run stands."""
    found = standing(ServerFolder(root))
    if plain:
        say(json.dumps(found, indent=2))
        return
    state = "stopped; fedpop server run goes on with it" if found["state"] == "stopped" else found["state"]
    planned = "as many as needed" if found["planned"] is None else found["planned"]
    done = f"{found['rounds']} questions" if found["formula"] else f"{found['rounds']} of {planned} rounds"
    say(f"{found['name']}: {state}, {done}")
    if found["state"] in ("failed", "broken"):
        say(f"  why       {found['why']}")
    for site in found["sites"]:
        seen = site["last_round"] is not None
        unit = "question" if found["formula"] else "round"
        text = f"last message in {unit} {site['last_round']}" if seen else "no message yet"
        text += f"; {site['late']} of its replies came late" if site["late"] else ""
        text += f"; {'in the last one: ' if seen else ''}{site['why']}" if site["why"] else ""
        text += "; waited for" if site["waited_for"] else ""
        say(f"  {site['name']:<9} {text}")
    if (last := found["last"]) is not None:
        up, down = human_bytes(found["bytes_up"]), human_bytes(found["bytes_down"])
        say(f"  bytes     {up} up, {down} down")
        say(f"  late      {found['late']} replies were dropped")
        say(f"  last      {round_words(last)}")
        numbers = {n: v for n, v in last.items() if n not in SHOWN_APART and isinstance(v, float)}
        say(f"  metrics   {', '.join(f'{n} {v:.4g}' for n, v in numbers.items()) or 'none'}")
    if found["privacy"] is not None:
        say(f"  privacy   {found['privacy']}")
    if found["verdict"] is not None:
        say(f"  theta     {found['verdict']}")
    for name, words in found["afterwards"].items():
        say(f"  {name.replace('_', ' ')}: {words}")
    for words in found["warnings"]:
        say(f"  warning   {words}")
    if found["fit"] is not None:
        say(f"\n{found['fit'].rstrip()}")


def _plain(file: Path) -> dict[str, Any]:
    """A JSON object that the run wrote; nothing before it has."""
    found = read_json(file) if file.exists() else {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a JSON object; {DAMAGED}")
    return found


def _afterwards(file: Path) -> dict[str, str]:
    """The answers to what was asked at the end, in words."""
    found = read_json(file) if file.exists() else {}
    try:
        return {str(name): str(answer["words"]) for name, answer in found.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not hold a run's answers; {DAMAGED}") from error
