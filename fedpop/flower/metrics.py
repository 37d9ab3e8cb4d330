"""Numbers for Prometheus, in its text format, on a port of this machine: a run's, and what left a site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError, SettingsError
from fedpop.flower.ledger import Ledger
from fedpop.flower.pages import Served, serving
from fedpop.run.metrics import scalars

FORM = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, Mapping[str, str], float]
"""A name, labels and a value."""
STATES = ("not begun", "running", "stopped", "finished", "failed", "broken")
COUNTED = ("bytes_up", "bytes_down", "seconds", "late", "round")
"""Numbers of a round that only grow, over the whole run."""


def port_of(value: Any, where: str) -> int:
    """A port as settings give it; 0 is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**16:
        raise SettingsError(f"{where}: metrics is a port of this machine, 1 to 65535, not {value!r}")
    return value


def exposition(samples: list[tuple[str, str, Sample]]) -> str:
    """Help, kind and samples as Prometheus reads them.

    >>> print(exposition([("rounds so far", "counter", ("fedpop_rounds_total", {}, 3))]), end="")
    # HELP fedpop_rounds_total rounds so far
    # TYPE fedpop_rounds_total counter
    fedpop_rounds_total 3
    """
    lines, known = [], set()
    for words, kind, (name, labels, value) in samples:
        if name not in known:
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
            known.add(name)
        inside = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels.items())
        lines.append(f"{name}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "".join(line + "\n" for line in lines)


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def of_run(found: Mapping[str, Any]) -> str:
    """Of what ``status.standing`` says."""
    last = found["last"] or {}
    samples: list[tuple[str, str, Sample]] = [
        ("1 for the state that the run is in", "gauge", ("fedpop_state", {"state": s}, s == found["state"]))
        for s in STATES
    ]
    samples.append(("rounds so far", "counter", ("fedpop_rounds_total", {}, found["rounds"])))
    if found["planned"] is not None:
        samples.append(
            ("rounds that the settings ask for", "gauge", ("fedpop_rounds_planned", {}, found["planned"]))
        )
    for name in ("bytes_up", "bytes_down", "late"):
        words = "replies that came late" if name == "late" else f"bytes {name[6:]} so far"
        samples.append((words, "counter", (f"fedpop_{name}_total", {}, last.get(name, 0))))
    samples.append(
        ("time that rounds took", "counter", ("fedpop_round_seconds_total", {}, last.get("seconds", 0)))
    )
    for name, value in scalars(last).items():
        if name not in COUNTED:
            samples.append(
                (f"{name.replace('_', ' ')} of the last round", "gauge", (f"fedpop_{name}", {}, value))
            )
    for words, kind, name, key in (
        ("the last round that a site's message counted in", "gauge", "fedpop_site_last_round", "last_round"),
        ("rounds that a site's message counted in", "counter", "fedpop_site_rounds_total", "heard"),
        ("a site's replies that came late", "counter", "fedpop_site_late_total", "late"),
        ("1 while a site is waited for", "gauge", "fedpop_site_waited_for", "waited_for"),
    ):
        samples += [(words, kind, (name, {"site": s["name"]}, s[key] or 0)) for s in found["sites"]]
    return exposition(samples)


def of_ledger(ledger: Ledger) -> str:
    """Of a site: what left it."""
    entries, total, last, refused, latest = 0, 0, "", 0, -1
    for entry in ledger.read():
        entries, total, last = entries + 1, total + entry["bytes"], entry["time"]
        refused += "refused" in entry
        latest = entry.get("round", latest)
    when = datetime.fromisoformat(last).timestamp() if last else 0.0
    return exposition(
        [
            ("messages that left this site", "counter", ("fedpop_site_messages_total", {}, entries)),
            ("bytes that left this site", "counter", ("fedpop_site_bytes_total", {}, total)),
            ("requests that were refused", "counter", ("fedpop_site_refusals_total", {}, refused)),
            ("the last round that was answered", "gauge", ("fedpop_site_last_round", {}, latest + 1)),
            ("when the last message left", "gauge", ("fedpop_site_last_message_seconds", {}, when)),
        ]
    )


@contextmanager
def serving_metrics(port: int, text: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """Served ``/metrics`` on this port of this machine, where there is one."""
    if not port:
        yield
        return

    def answer(path: str) -> Served | None:
        if path != "/metrics":
            return None
        try:
            return Served(FORM, text().encode())
        except CheckpointError as error:  # a file is being replaced, or was edited
            return Served("text/plain; charset=utf-8", f"{error}\n".encode(), 500)

    with serving(port, answer) as address:
        say(f"metrics are at {address}/metrics")
        yield


@contextmanager
def serving_ledger(folder: Path, port: int, say: Callable[[str], None]) -> Iterator[None]:
    """A site's numbers."""
    with serving_metrics(port, lambda: of_ledger(Ledger.of(folder)), say):
        yield
