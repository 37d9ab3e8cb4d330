"""Images from bytes to theta: what a run of FedSOUL costs beside the network's passes.

The network, its standardising and its shifts are those of the experiments on CIFAR-10; the bare pass gets
floating-point images, laid out for it and not shifted. ``python -m benchmarks.images`` is the part that runs
in a separate process, to know its memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import fedpop as fp
from benchmarks.round import CLASSES, IMAGES, bare, precision
from benchmarks.timing import Advance, Lap, Spread, in_turns, lap
from fedpop.data.image_task import ImageTask
from fedpop.keys import Key
from fedpop.report.results import Record, record
from fedpop.run.run import Run, Settings

NAME = "images"
ACTIVE, ALL, TEST = 4, 100, 100
SETUP_CLIENTS, REPEATS = 10, 3
SECONDS, LEAST = 60.0, 3
RATE, THREADS, SETUP, FINAL, MEMORY = 0.85, 0.95, 2.0, 0.1, 2.0
MILLION = 1_000_000


def pictures(clients: int, purpose: str, images: int) -> list[tuple[Tensor, Tensor]]:
    """Random bytes, and classes; client by client, since the numbers behind them take four times the room."""
    key, out = Key(0, purpose="bench").at(purpose=purpose), []
    for i in range(clients):
        one = torch.tensor([i])
        x = key.at(purpose="x").uniform(one, (images, 3 * 32 * 32)).mul_(256).to(torch.uint8)
        y = (key.at(purpose="y").uniform(one, (images,)) * CLASSES).long().clamp(max=CLASSES - 1)
        out.append((x.reshape(images, 3, 32, 32), y[0]))
    return out


def federation(clients: int) -> fp.Federation:
    train, test = pictures(clients, "train", IMAGES), pictures(clients, "test", TEST)
    clients = [fp.Client(*a, test=b) for a, b in zip(train, test, strict=True)]
    return fp.Federation.of(clients)


def begun(clients: fp.Federation, model: fp.Composition, active: int) -> Run:
    method = fp.FedSOUL(model, batch=None).prepared(clients.example)
    run = Run(method, method.model.checked(clients), Settings(1000, 0, fp.participation.Uniform(active)))
    run.begin()
    return run


def on(threads: int, program: Callable[[], object]) -> Callable[[], object]:
    def work() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            program()
        finally:
            torch.set_num_threads(before)

    return work


def measure(advance: Advance) -> list[Record]:
    model = ImageTask().model(seed=0)
    model = model.at_precision(model.chosen_precision())  # as a run has it
    ten = federation(SETUP_CLIENTS)
    setups = [lap(lambda: begun(ten, model, SETUP_CLIENTS)) for _ in range(REPEATS)]
    advance(0.2)
    few = federation(ACTIVE)
    run = begun(few, model, ACTIVE)
    assert isinstance(few.train.x, Tensor)
    x = few.train.x.reshape(ACTIVE, IMAGES, 3, 32, 32).float() / 255
    passes = bare(model, x, few.train.y.reshape(ACTIVE, IMAGES), 100)
    programs = {f"bare {n}": on(n, passes) for n in (1, 2)} | {
        f"round {n}": on(n, run.train_round) for n in (1, 2)
    }
    laps = in_turns(programs, seconds=SECONDS, least=LEAST, advance=lambda s: advance(0.2 + 0.6 * s))
    population = fp.FedSOUL(model, batch=None).fit(few, rounds=1, progress=False)
    end = lap(lambda: fp.evaluate(population, "test"))
    metrics = _speeds(laps) | Spread.of([s.cpu for s in setups]).metrics("setup_seconds")
    million = MILLION * median(a.cpu for a in laps["bare 1"]) / (ACTIVE * IMAGES)
    metrics |= {"final_share": end.cpu * ALL / ACTIVE / million, "peak_gib": _memory()}
    setting = {"benchmark": NAME, "clients": ACTIVE, "images": IMAGES, "test": TEST}
    config = run.algorithm.describe() | {"precision": precision(model)}
    return [record("bench", setting, "FedSOUL", 0, metrics, {"rounds": run.round}, config)]


def _speeds(laps: dict[str, list[Lap]]) -> dict[str, float]:
    """Images per second over those of the bare pass, and the gain of a second thread over the bare pass's."""

    def wall(name: str) -> list[float]:
        return [a.wall for a in laps[name]]

    share = [a.cpu / b.cpu for a, b in zip(laps["bare 1"], laps["round 1"], strict=True)]
    four = zip(wall("round 1"), wall("round 2"), wall("bare 1"), wall("bare 2"), strict=True)
    gain = [(r1 / r2) / (b1 / b2) for r1, r2, b1, b2 in four]
    return Spread.of(share).metrics("rate") | Spread.of(gain).metrics("threads")


def _memory() -> float:
    """Peak GiB of a process that holds all clients' images, trains two rounds and scores."""
    command = [sys.executable, "-m", "benchmarks.images"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    return float(json.loads(done.stdout))


def alone() -> float:
    torch.set_num_threads(1)
    model = ImageTask().model(seed=0)
    short = fp.chains.Final(draws=2, burn_in=2)
    everyone = federation(ALL)
    population = fp.FedSOUL(model, batch=None, final=short).fit(
        everyone, rounds=2, participation=10, progress=False
    )
    fp.evaluate(population, "test", widths=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def tables(records: list[Record]) -> list[Table]:
    table = Table(title="Images from bytes to theta, the network of CIFAR-10")
    for name in ("what", "measured", "target"):
        table.add_column(name, justify="left" if name == "what" else "right")
    m: dict[str, Any] = records[0]["metrics"]
    rows = (
        ("images per second, over the bare pass", f"{m['rate']:.2f}", f"at least {RATE}"),
        ("gain of a second thread, over the bare pass's", f"{m['threads']:.2f}", f"at least {THREADS}"),
        ("set-up, 10 clients x 500 images, seconds", f"{m['setup_seconds']:.2f}", f"at most {SETUP:g}"),
        ("final pass, scores of 100 clients, over 1M passes", f"{m['final_share']:.3f}", f"at most {FINAL}"),
        ("peak memory, 100 clients x 500 images, GiB", f"{m['peak_gib']:.2f}", f"at most {MEMORY:g}"),
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return [table]


if __name__ == "__main__":
    print(json.dumps(alone()))
