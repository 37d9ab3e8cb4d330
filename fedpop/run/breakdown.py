"""How a run ends before its time: it breaks down (no message is received any more, or theta is not finite)
and says so, or somebody presses Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fedpop.errors import TrainingError
from fedpop.message import Tensors

MOST_SILENT_ROUNDS = 3
"""Rounds in a row in which everybody who took part was left out, after which a run ends."""
REMEDY = (
    "look at this client's data (their scale, outliers) and take smaller steps; standardise x and y where "
    "their columns differ much in size"
)


def require_finite_theta(theta: Tensors, history: Sequence[Mapping[str, Any]], round: int) -> None:
    """Raise unless every part of theta is finite, after so many rounds."""
    bad = [n for n, t in theta.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if not bad:
        return
    when = f"in round {round}" if round else "before the first round"
    raise TrainingError(f"{', '.join(bad)} became NaN or infinite {when}{_first_left_out(history)}; {REMEDY}")


def require_somebody(history: Sequence[Mapping[str, Any]], over: bool) -> None:
    """Raise where everybody was left out in the last rounds, or in all rounds of a run that is over."""
    silent = 0
    for metrics in reversed(history):
        if not nobody(metrics):
            break
        silent += 1
        if silent >= MOST_SILENT_ROUNDS:
            break
    received = any(_silent(m) < m["active"] for m in history) if over and silent else True
    if silent < MOST_SILENT_ROUNDS and received:
        return
    first = _first_silent(history)
    who, rounds = first["left_out"][0], "round" if silent == 1 else f"{silent} rounds in a row"
    raise TrainingError(
        f"everybody who took part was left out, {rounds} from round {first['round']} on, client {who!r} "
        f"first: what they computed was not finite, or out of all proportion; {REMEDY}"
    )


def nobody(metrics: Mapping[str, Any]) -> bool:
    """Whether everybody who took part in a round was left out."""
    return 0 < int(metrics["active"]) <= _silent(metrics)


def _silent(metrics: Mapping[str, Any]) -> int:
    """Units that were left out; of sites with several, not by their names."""
    return int(metrics.get("units_left_out", len(metrics["left_out"])))


def _first_silent(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first of the rounds in a row at the end in which no message was received."""
    found = history[-1]
    for metrics in reversed(history):
        if metrics["active"] > 0 and not nobody(metrics):
            break
        found = metrics if nobody(metrics) else found
    return found


def _first_left_out(history: Sequence[Mapping[str, Any]]) -> str:
    for metrics in history:
        if metrics["left_out"]:
            return f" (client {metrics['left_out'][0]!r} was left out first, in round {metrics['round']})"
    return ""


@contextmanager
def patient_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C waits for the end of the round, so that a checkpoint can be written; twice stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handler(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
